"""Questions to the running server, asked through the head's SSH connection."""

import contextlib
import http.client
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from blocks import Cluster
from tasks.errors import NodeUnreachable, SparkrailError
from tasks.remote import Remote, connect
from tasks.remote import Stream as Channel

PROMPT = "The quick brown fox"
ANSWER_TOKENS = 4
TOKENS = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)

REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)


class Answer(BaseModel, frozen=True):
    """One real completion; or, of a server that is busy, what it completed for others meanwhile."""

    text: str
    tokens: int
    seconds: float
    busy: bool = False

    @property
    def told(self) -> str:
        if self.busy:
            return f"is busy: {self.tokens} tokens for others in {self.seconds:.0f} s"
        return f"answers {self.text!r} in {self.seconds:.2f} s"


class Silent(SparkrailError):
    """The endpoint did not give the answer that we asked for, at which stage of the asking."""

    stage: Literal["health", "names", "completion"] = "health"
    late: bool = False  # Nothing came in time; anything else is an answer of its own.


class Served(BaseModel, frozen=True):
    """A row of /v1/models."""

    id: str


class Models(BaseModel, frozen=True):
    """The answer of /v1/models."""

    data: tuple[Served, ...]


class Choice(BaseModel, frozen=True):
    """One text that the model chose."""

    text: str = ""


class Usage(BaseModel, frozen=True):
    """What a completion cost."""

    completion_tokens: int = 0


class Completion(BaseModel, frozen=True):
    """The answer of /v1/completions."""

    choices: tuple[Choice, ...]
    usage: Usage = Usage()


Content = TypeVar("Content", bound=BaseModel)


Ask = Callable[[str, str, Any, float], tuple[int, bytes]]
Response = contextlib.AbstractContextManager[http.client.HTTPResponse]


def asker(cluster: Cluster, api_key: str = "") -> Ask:
    """A function (method, path, body, timeout) -> (status, content) to the cluster's endpoint."""
    opened = _opener(cluster, api_key)

    def ask(method: str, path: str, body: Any, timeout: float) -> tuple[int, bytes]:
        with opened(method, path, body, timeout) as response:
            return response.status, response.read()

    return ask


# The lines of the answer to a POST (path, body, timeout), as they come.
Stream = Callable[[str, Any, float], Iterator[bytes]]


def streamer(cluster: Cluster, api_key: str = "") -> Stream:
    """A function that asks the cluster's endpoint for an answer in pieces."""
    opened = _opener(cluster, api_key)

    def stream(path: str, body: Any, timeout: float) -> Iterator[bytes]:
        with opened("POST", path, body, timeout) as response:
            if response.status != 200:
                said = _short(response.read())
                raise Silent(f"{path}: HTTP {response.status}", details=said)
            yield from response

    return stream


def asked_host(cluster: Cluster) -> str:
    """The address on the head by which we ask."""
    return "127.0.0.1" if cluster.serve.host == "0.0.0.0" else cluster.serve.host


def _opener(cluster: Cluster, api_key: str) -> Callable[..., Response]:
    """`_response` with all but what is asked."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    remote = connect(cluster, cluster.head)
    return partial(_response, remote, asked_host(cluster), cluster.serve.port, headers)


@contextlib.contextmanager
def _response(
    remote: Remote,
    host: str,
    port: int,
    headers: Mapping[str, str],
    method: str,
    path: str,
    body: Any,
    timeout: float,
) -> Iterator[http.client.HTTPResponse]:
    try:
        stream = remote.open_tunnel(host, port, timeout)
    except NodeUnreachable as error:
        if not remote.alive:
            raise
        raise Silent(f"{path}: nothing listens on {host}:{port}", node=remote.node.name) from error
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    tunnel: Any = _Tunnel(stream)
    connection.sock = tunnel
    content = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, content, {"Content-Type": "application/json", **headers})
        yield connection.getresponse()
    except (OSError, EOFError, http.client.HTTPException) as error:
        remote.run(("true",), timeout=30)  # Raises when it is the node that is silent.
        late = isinstance(error, TimeoutError)
        said = f"no answer within {timeout:g} s" if late else str(error) or "no answer"
        silent = Silent(f"{path}: {said}", node=remote.node.name)
        silent.late = late
        raise silent from error
    finally:
        connection.close()
        stream.close()


class _Tunnel:
    """A tunnel's end with what http.client needs of a socket; whoever opened it closes it.

    http.client closes the socket of an answer that says `Connection: close` before it reads its
    body. A socket lives on until what was made of it is closed too; a channel does not.
    """

    def __init__(self, stream: Channel) -> None:
        self.sendall = stream.sendall
        self._stream = stream

    def makefile(self, *_: Any) -> io.BufferedReader:
        # A channel's own file cannot peek, as http.client does where an answer comes in chunks.
        return io.BufferedReader(_Reader(self._stream))

    def close(self) -> None:
        """Not yet."""


class _Reader(io.RawIOBase):
    def __init__(self, stream: Channel) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def served_models(ask: Ask) -> list[str]:
    """The names in /v1/models."""
    status, content = ask("GET", "/v1/models", None, 10)
    if status != 200:
        raise Silent(f"/v1/models: HTTP {status}", details=_short(content))
    return [row.id for row in _parse(content, "/v1/models", Models).data]


def complete(
    ask: Ask,
    model: str,
    *,
    tokens: int = ANSWER_TOKENS,
    timeout: float = 60,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """One greedy completion of a few tokens: the only proof that the engine works."""
    started = clock()
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "seed": 0,
    }
    if tokens != ANSWER_TOKENS:
        body["ignore_eos"] = True  # vLLM's own: as many as were asked for, to be timed.
    status, content = ask("POST", "/v1/completions", body, timeout)
    if status != 200:
        raise Silent(f"a completion: HTTP {status}", details=_short(content))
    said = _parse(content, "a completion", Completion)
    return Answer(
        text=said.choices[0].text if said.choices else "",
        tokens=said.usage.completion_tokens,
        seconds=clock() - started,
    )


def check_answers(ask: Ask, model: str, *, timeout: float = 60) -> Answer:
    """Healthy, serving the wanted name, and completing; raises `Silent` with what is wrong."""
    status, content = ask("GET", "/health", None, 10)
    if status != 200:
        raise Silent(f"/health: HTTP {status}", details=_short(content))
    names = served_models(ask)
    if model not in names:
        raise _at("names", Silent(f"wanted {model}, serving {', '.join(names) or 'nothing'}"))
    before = completed_tokens(ask)
    began = time.monotonic()
    try:
        answer = complete(ask, model, timeout=timeout)
    except Silent as error:
        # A full queue is no dead engine: it works for others.
        done = completed_tokens(ask) - before
        if done > 0:
            return Answer(text="", tokens=done, seconds=time.monotonic() - began, busy=True)
        raise _at("completion", error) from error
    if not answer.tokens:
        raise _at("completion", Silent("a completion came back without tokens"))
    return answer


def completed_tokens(ask: Ask) -> int:
    """The tokens that the engine has made so far, for anybody; 0 where it does not count them."""
    return _counted(ask, TOKENS)


def running_requests(ask: Ask) -> int:
    """The requests that the engine works on or has in its queue; 0 where it does not tell."""
    return _counted(ask, REQUESTS)


def _counted(ask: Ask, rows: re.Pattern[str]) -> int:
    try:
        status, content = ask("GET", "/metrics", None, 10)
    except Silent:
        return 0
    found = rows.findall(content.decode(errors="replace")) if status == 200 else []
    return int(sum(map(float, found)))


def _at(stage: Literal["names", "completion"], error: Silent) -> Silent:
    error.stage = stage
    return error


def _parse(content: bytes, what: str, kind: type[Content]) -> Content:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise Silent(
            f"{what}: not what an OpenAI server answers", details=_short(content)
        ) from error


def _short(content: bytes) -> str:
    return content.decode(errors="replace")[:500]

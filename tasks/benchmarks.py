"""The built-in benchmark: how fast the running model answers one request, and eight at once."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ValidationError

from blocks import Cluster, Node
from tasks import endpoint
from tasks.converge import Outcome, Run, step
from tasks.endpoint import Silent, Stream
from tasks.records import now, read_releases, read_state, write_state
from tasks.secret_values import api_key

NAME = "bench"
FILE = "bench.json"
KEPT = 50
WAYS = 8
TOKENS = 128
TIMEOUT = 300.0
BAR = 40
PROMPTS = (
    "The quick brown fox",
    "Once upon a time",
    "In the beginning there was",
    "A letter to a friend:",
    "The history of the river",
    "Dear reader,",
    "Listen to the rain, it says",
    "Seven ways to cross a bridge",
)


class Reply(BaseModel, frozen=True):
    """One streamed completion."""

    first_token: float  # Seconds to it.
    seconds: float
    tokens: int


class Benchmark(BaseModel, frozen=True):
    """What one benchmark measured, and of which release."""

    at: str
    release: str
    single: float  # Tokens per second.
    eight: float  # Of all eight together.
    first_token: float
    first_token_of_eight: float  # The median.
    busy: bool = False  # Whether it worked for others, too.


class Piece(BaseModel, frozen=True):
    """What of a streamed answer counts."""

    choices: tuple[endpoint.Choice, ...] = ()
    usage: endpoint.Usage | None = None


def ask(
    stream: Stream, model: str, prompt: str, clock: Callable[[], float] = time.monotonic
) -> Reply:
    """One completion of a fixed length, timed piece by piece."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = clock()
    first, told, counted = None, 0, 0
    for piece in pieces(stream("/v1/completions", body, TIMEOUT)):
        if piece.usage:
            told = piece.usage.completion_tokens
        if any(choice.text for choice in piece.choices):
            first = first or clock() - began
            counted += 1
    if first is None:
        raise Silent("a streamed completion came back without text")
    return Reply(first_token=first, seconds=clock() - began, tokens=told or counted)


def pieces(lines: Iterator[bytes]) -> Iterator[Piece]:
    """The documents in a stream of server-sent events."""
    for line in lines:
        text = line.decode(errors="replace").strip()
        if not text.startswith("data:") or text == "data: [DONE]":
            continue
        try:
            yield Piece.model_validate_json(text.removeprefix("data:"))
        except ValidationError as error:
            raise Silent("a streamed completion: not what an OpenAI server sends") from error


def measure(stream: Stream, model: str, clock: Callable[[], float] = time.monotonic) -> Any:
    """A warm-up, one alone, and eight at once."""
    ask(stream, model, PROMPTS[0], clock)
    alone = ask(stream, model, PROMPTS[0], clock)
    began = clock()
    with ThreadPoolExecutor(max_workers=WAYS) as pool:
        asked = [pool.submit(ask, stream, model, each, clock) for each in PROMPTS]
        replies = [each.result() for each in asked]
    seconds = clock() - began
    firsts = sorted(each.first_token for each in replies)
    return {
        "single": alone.tokens / max(alone.seconds, 1e-6),
        "eight": sum(each.tokens for each in replies) / max(seconds, 1e-6),
        "first_token": alone.first_token,
        "first_token_of_eight": firsts[len(firsts) // 2],
    }


@step(NAME)
def run_benchmark(cluster: Cluster, node: Node, run: Run) -> Outcome:  # noqa: ARG001 - as every step
    """The running model is measured; the head keeps the last fifty results."""
    key = api_key(cluster)
    busy = endpoint.running_requests(endpoint.asker(cluster, key)) > 0
    rows = read_releases(cluster)
    made = Benchmark(
        at=now(),
        release=rows[0].digest if rows else "",
        busy=busy,
        **measure(endpoint.streamer(cluster, key), cluster.model.name),
    )
    history = [*parse_history(read_state(cluster, FILE)), made][-KEPT:]
    text = json.dumps([each.model_dump() for each in history], indent=2) + "\n"
    write_state(cluster, FILE, text)
    told = (
        f"{made.single:.1f} tokens/s alone, {made.eight:.1f} by eight at once, first token after "
        f"{made.first_token:.2f} s{'; others were served meanwhile' if busy else ''}"
    )
    return Outcome(step=NAME, node=node.name, status="unchanged", detail=told, data=history)


def parse_history(text: str) -> list[Benchmark]:
    """What the head keeps, oldest first; rows that cannot be read are left out."""
    try:
        found = json.loads(text) if text.strip() else []
    except ValueError:
        return []
    history = []
    for row in found if isinstance(found, list) else []:
        try:
            history.append(Benchmark.model_validate(row))
        except ValidationError:
            continue
    return history


def chart(history: Sequence[Benchmark]) -> str:
    """The history as bars of text, which every report can show."""
    lines = []
    for title, value in TITLES.items():
        most = max((value(each) for each in history), default=0.0)
        lines.append(title)
        for each in history:
            bar = "█" * round(BAR * value(each) / most) if most else ""
            lines.append(f"  {each.at[:16]} {each.release[:6]:<6} {bar} {value(each):.4g}")
    return "\n".join(lines)


TITLES: Mapping[str, Callable[[Benchmark], float]] = {
    "tokens/s, one request": lambda each: each.single,
    "tokens/s, eight at once": lambda each: each.eight,
    "seconds to the first token": lambda each: each.first_token,
}

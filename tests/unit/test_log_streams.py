"""Logs line by line: what is asked of a node, and what is said of what it answers."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import logs as flow
from tasks import hidden, log_streams, remote
from tasks.containers import Container
from tasks.errors import NodeUnreachable
from tasks.log_streams import RANKS, Lines, Wanted, streams, tell_ranks
from tasks.remote import Result
from tests.unit.specs import spec

CLUSTER = spec()
RAY, SERVE = "sparkrail-sparks-ray", "sparkrail-sparks-serve"


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        pytest.param(["a\nb\n"], ["a", "b"], id="whole"),
        pytest.param(["a", "b\nc"], ["ab", "c"], id="in parts, the last without an end"),
        pytest.param(["a\r\n", "\n"], ["a", ""], id="other line ends, and an empty one"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_lines(parts: list[str], lines: list[str]) -> None:
    said: list[str] = []
    taking = Lines(said.append)
    for part in parts:
        taking.add(part)
    taking.end()
    assert said == lines


# --- the ranks' logs ------------------------------------------------------------------------------

IDLE, RANK = "worker-ab-01000000-7.out", "worker-cd-01000000-42.err"
Read = Callable[..., dict[str, list[str]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / IDLE).write_text("")
    (tmp_path / RANK).write_text("one\ntwo\nthree\n")
    (tmp_path / "raylet.out").write_text("not a rank's\n")
    return tmp_path


def ranks(folder: Path, lines: str, *known: str) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """The relayed script, run by this machine's shell."""
    script = RANKS.replace("/tmp/ray/session_latest/logs", str(folder))
    argv = ("sh", "-c", script, "sh", lines, *known)
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    said: list[tuple[str, str]] = []
    sizes = tell_ranks(text, lambda what, line: said.append((what, line)))
    return said, sizes


def test_the_last_lines_of_each_rank_and_then_what_is_new(folder: Path) -> None:
    said, sizes = ranks(folder, "2")
    assert said == [("rank 42", "two"), ("rank 42", "three")]
    assert sizes == {RANK: "14"}
    known = f"{RANK}=14"
    assert ranks(folder, "+1", known) == ([], {})
    with (folder / RANK).open("a") as file:
        file.write("four\n")
    (folder / IDLE).write_text("a new rank\nspeaks\n")
    said, sizes = ranks(folder, "+1", known)
    assert sorted(said) == [("rank 42", "four"), ("rank 7", "a new rank"), ("rank 7", "speaks")]
    assert sizes == {RANK: "19", IDLE: "18"}


def test_no_session_of_ray_is_no_error(tmp_path: Path) -> None:
    assert ranks(tmp_path / "none", "5") == ([], {})


# --- over nodes -----------------------------------------------------------------------------------


class Node:
    """A node with its containers, and what `docker logs` and `docker exec` print there."""

    def __init__(self) -> None:
        self.containers: dict[str, Container] = {}
        self.environment = ""
        self.ran: list[tuple[str, ...]] = []
        self.away = False

    def has(self, name: str, id: str = "1" * 64, state: str = "running") -> None:
        self.containers[name] = Container(id=id, name=name, state=state)

    def run(self, argv: tuple[str, ...], **how: Any) -> Result:
        self.ran.append(argv)
        if "node.env" in argv[2]:
            return Result(self.environment, "", 0)
        if argv[2] == log_streams.LOGS:
            assert how["keep"] is False
            how["on_output"](f"said by {argv[-1][:4]}\nkey sk-key-1\n")
        if argv[:2] == ("docker", "exec"):
            return Result(f"\x1e{RANK} 6\nhello\n", "", 0)
        return Result("", "", 0)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Node]]:
    nodes = {"head": Node(), "worker1": Node()}
    for node in nodes.values():
        node.has(RAY)
    nodes["head"].has(SERVE, id="2" * 64)

    def connect(_cluster: Any, node: Any) -> Any:
        if nodes[node.name].away:
            raise NodeUnreachable("no SSH connection", node=node.name, remedy="Is it up?")
        return nodes[node.name]

    @contextlib.contextmanager
    def engine(cluster: Any, node: Any) -> Iterator[Any]:
        rows = [
            {"Id": each.id, "Names": [f"/{name}"], "State": each.state}
            for name, each in connect(cluster, node).containers.items()
        ]
        yield SimpleNamespace(api=SimpleNamespace(containers=lambda **_all: rows))

    monkeypatch.setattr(log_streams, "connect", connect)
    monkeypatch.setattr(log_streams, "engine", engine)
    monkeypatch.setattr(log_streams, "EVERY", 0.01)
    monkeypatch.setattr(hidden, "_values", set())
    monkeypatch.setattr(flow, "load_cluster", lambda _name: CLUSTER)
    yield nodes
    remote.STOP.clear()


def test_every_log_of_every_node(site: dict[str, Node]) -> None:
    shown: list[str] = []
    site["head"].environment = "export VLLM_API_KEY=sk-key-1\nexport SPARKRAIL_SHOWN=\n"
    assert flow.logs("sparks", Wanted(5), show=shown.append) == 0
    assert shown == [
        "head serve | said by 2222",
        "head serve | key ***",
        "head ray | said by 1111",
        "head ray | key ***",
        "head rank 42 | hello",
        "worker1 ray | said by 1111",
        "worker1 ray | key ***",
        "worker1 rank 42 | hello",
    ]
    asked = [argv[4:] for argv in site["head"].ran if argv[2] == log_streams.LOGS]
    assert asked == [("--tail=5", "2" * 64), ("--tail=5", "1" * 64)]


def test_one_node_has_no_name_before_its_lines(site: dict[str, Node]) -> None:
    shown: list[str] = []
    assert flow.logs("sparks", Wanted(5), "worker1", shown.append) == 0
    assert shown == ["ray | said by 1111", "ray | key sk-key-1", "rank 42 | hello"]
    assert site["head"].ran == []


def test_containers_that_are_gone_or_have_ended_say_so(site: dict[str, Node]) -> None:
    shown: list[str] = []
    del site["head"].containers[SERVE]
    site["head"].has(RAY, state="exited")
    site["worker1"].containers.clear()
    assert flow.logs("sparks", Wanted(5), show=shown.append) == 0
    assert shown == [
        f"head serve | [there is no container {SERVE}: not deployed, or removed]",
        "head ray | said by 1111",
        "head ray | key sk-key-1",
        f"head ray | [{RAY} (111111111111) has ended: it is exited]",
        f"head ranks | [the ranks ended with {RAY} (111111111111)]",
        f"worker1 ray | [there is no container {RAY}: not deployed, or removed]",
        f"worker1 ranks | [there is no container {RAY}, and so no log of a rank]",
    ]


def test_a_node_that_is_away_is_told_once_and_the_others_go_on(
    site: dict[str, Node], capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    site["head"].away = True
    assert flow.logs("sparks", Wanted(5), show=shown.append) == 1
    assert capsys.readouterr().err == "head: no SSH connection\nIs it up?\n"
    assert shown[0] == "worker1 ray | said by 1111"


@pytest.mark.usefixtures("site")
def test_an_unknown_node_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert flow.logs("sparks", Wanted(5), "worker7") == 2
    assert capsys.readouterr().err == "sparks has no node worker7; it has head, worker1\n"


def test_who_follows_is_told_what_goes_and_shown_what_comes(site: dict[str, Node]) -> None:
    """A redeploy: gone, away for a while, and there again as another container."""
    [stream, *_] = streams(CLUSTER, CLUSTER.head, Wanted(5, follow=True))
    said: list[str] = []
    node = site["head"]
    node.containers.clear()

    def gone() -> None:
        node.away = True

    def away() -> None:
        node.away = False
        node.has(SERVE, id="3" * 64)

    # Each remark and line is what changes the node.
    steps = {"[there is no container": gone, "[no SSH connection; trying again]": away}

    def say(_what: str, line: str) -> None:
        said.append(line)
        for begin, step in steps.items():
            if line.startswith(begin):
                step()
        if line == "key sk-key-1":
            remote.cancel()

    stream.run(say)
    assert said == [
        f"[there is no container {SERVE}: not deployed, or removed]",
        "[no SSH connection; trying again]",
        "said by 3333",
        "key sk-key-1",
    ]
    [asked] = [argv[4:] for argv in node.ran if argv[2] == log_streams.LOGS]
    assert asked == ("--follow", "--tail=all", "3" * 64)


def test_a_log_that_broke_off_goes_on_where_it_did(site: dict[str, Node]) -> None:
    [stream, *_] = streams(CLUSTER, CLUSTER.head, Wanted(5, follow=True))
    node = site["head"]
    times = 0

    def say(_what: str, line: str) -> None:
        nonlocal times
        times += line == "key sk-key-1"
        if times == 2:
            remote.cancel()

    stream.run(say)
    asked = [argv[4:] for argv in node.ran if argv[2] == log_streams.LOGS]
    assert asked == [("--follow", "--tail=5", "2" * 64), ("--follow", "--since=1s", "2" * 64)]


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("follow", [True, False])
def test_ctrl_c_ends_what_runs_on_the_nodes(follow: bool) -> None:
    def interrupted(_line: str) -> None:
        raise KeyboardInterrupt

    assert flow.logs("sparks", Wanted(5, follow), show=interrupted) == (0 if follow else 1)
    assert remote.STOP.is_set() == follow

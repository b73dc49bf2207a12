"""What a node reaches of its peers: who is asked what, and the relayed program on loopback."""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.peers import Peer, peers_of, question
from tasks.relayed import peers as relay
from tests.unit.specs import spec, workers

SCRIPT = Path(relay.__file__)


def relayed(*asked: dict[str, Any], timeout: float = 2.0) -> list[Peer]:
    """The program as a node runs it."""
    wanted = json.dumps({"source": "127.0.0.1", "timeout": timeout, "peers": asked})
    said = subprocess.run(
        [sys.executable, "-", "peers", wanted],
        input=SCRIPT.read_bytes(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [Peer.model_validate(row) for row in json.loads(said.stdout)]


def asked(port: int, **more: Any) -> dict[str, Any]:
    return {"node": "worker1", "address": "127.0.0.1", "port": port, **more}


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def stub(folder: Path, script: str) -> list[str]:
    """A program that stands in for ssh, which needs an sshd."""
    file = folder / "ssh"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return [str(file), "-o", "BatchMode=yes", "worker1", "true"]


def test_an_answer_a_refusal_and_packets_of_full_size(listener: int) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        found = relayed(asked(listener), asked(closed.getsockname()[1]))
    assert [(peer.tcp, peer.reached) for peer in found] == [("open", True), ("refused", True)]
    assert [peer.packets for peer in found] == [{65535: "arrived"}] * 2
    assert [(peer.lost, peer.login) for peer in found] == [((), None)] * 2


def test_an_address_that_the_node_does_not_have() -> None:
    assert relay.look("192.0.2.1", asked(9), 1) | {"seconds": 0} == {
        "node": "worker1",
        "address": "127.0.0.1",
        "port": 9,
        "tcp": "Cannot assign requested address",
        "packets": {},
        "login": None,
        "seconds": 0,
    }


def test_no_answer() -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        assert relay.dial("127.0.0.1", "127.0.0.1", port, 0.3) == "no answer"


@pytest.mark.parametrize(
    ("fates", "packets"),
    [
        pytest.param({200: "lost"}, {}, id="not even a small one"),
        pytest.param({9000: "arrived"}, {"9000": "arrived"}, id="full size"),
        pytest.param(
            {9000: "lost"}, {"9000": "lost", "1500": "arrived"}, id="a switch swallows full size"
        ),
        pytest.param(
            {9000: "too long", 1500: "lost"},
            {"9000": "too long", "1500": "lost"},
            id="a router says so",
        ),
    ],
)
def test_packets_of_several_sizes(
    monkeypatch: pytest.MonkeyPatch, fates: dict[int, str], packets: dict[str, str]
) -> None:
    monkeypatch.setattr(relay, "own_mtu", lambda _source, _address: 9000)
    monkeypatch.setattr(relay, "packet", lambda _s, _a, size: fates.get(size, "arrived"))
    assert relay.packets("127.0.0.1", "127.0.0.1") == packets


@pytest.mark.parametrize(
    ("script", "login"),
    [
        pytest.param("exit 0", (0, "", 0, ""), id="silent"),
        pytest.param("echo; echo hello", (0, "", 7, "hello"), id="a login that prints"),
        pytest.param(
            "echo Permission denied >&2; exit 255", (255, "Permission denied", 0, ""), id="refused"
        ),
        pytest.param("exec sleep 60", (255, "ssh: no answer within 0.4 s", 0, ""), id="silence"),
    ],
)
def test_logins(tmp_path: Path, script: str, login: tuple[int, str, int, str]) -> None:
    [peer] = relayed(asked(9, login=stub(tmp_path, script)), timeout=0.2)
    found = peer.login
    assert found
    assert (found.code, found.said, found.printed, found.first_line) == login


def test_without_an_ssh() -> None:
    assert relay.log_in(["/absent/ssh"], 1) == {"code": 127, "said": "ssh is not installed"}


def test_whom_a_node_must_reach() -> None:
    """The head reaches all; each worker the head, and the next one."""
    cluster = spec(**workers(3))
    found = {
        node.name: [(peer.name, port) for peer, port in peers_of(cluster, node)]
        for node in cluster.nodes
    }
    assert found == {
        "head": [("worker1", 52365), ("worker2", 52365), ("worker3", 52365)],
        "worker1": [("head", 6379), ("worker2", 52365)],
        "worker2": [("head", 6379), ("worker3", 52365)],
        "worker3": [("head", 6379)],
    }


def test_what_the_program_is_asked() -> None:
    cluster = spec()
    head, worker = (json.loads(question(cluster, node)) for node in cluster.nodes)
    assert (head["source"], worker["source"]) == ("10.77.0.1", "10.77.0.2")
    assert shlex.join(head["peers"][0]["login"]).startswith("ssh -p 22 -o BatchMode=yes -o Strict")
    assert head["peers"][0]["login"][-2:] == ["root@10.77.0.2", "true"]
    assert worker["peers"] == [
        {"node": "head", "address": "10.77.0.1", "port": 6379, "login": None}
    ]

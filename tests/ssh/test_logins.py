"""Logging in, and the ways in which it fails: named, with what to do, in bounded time."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks.errors import LoginRefused, NodeUnreachable
from tasks.remote import connect, parse_key
from tests.ssh.conftest import LogIn, Start
from tests.ssh.sshd import Sshd, free_port, lives, make_key, poll, public, spec

Pair = tuple[Sshd, Sshd]
PIPE = """\
import os, socket, sys, threading
node = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def send():
    while data := os.read(0, 65536):
        node.sendall(data)
    node.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := node.recv(65536):
    os.write(1, data)
"""


def one(node: Sshd, folder: Path, key: Path, **more: Any) -> Cluster:
    known = folder / "known_hosts_of_one"
    known.write_text(node.known)
    ssh = {"known_hosts": known, "key_file": key, "connect_timeout": 2}
    return spec(node.place("head", **more), None, **ssh)


def refused(cluster: Cluster, hop: int = 0) -> str:
    with pytest.raises(LoginRefused) as caught:
        connect(cluster, cluster.nodes[hop])
    return str(caught.value)


def unreachable(cluster: Cluster, hop: int = 0) -> str:
    started = time.monotonic()
    with pytest.raises(NodeUnreachable) as caught:
        connect(cluster, cluster.nodes[hop])
    assert time.monotonic() - started < 10
    return str(caught.value)


# --- keys


@pytest.mark.parametrize("form", ["", "PEM"], ids=["OpenSSH", "PEM"])
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_keys_of_each_kind_let_us_in(start: Start, tmp_path: Path, kind: str, form: str) -> None:
    key = make_key(tmp_path / "id", kind=kind, form=form)
    node = start()
    (node.folder / "authorized_keys").write_text(public(key))
    cluster = one(node, tmp_path, key)
    assert connect(cluster, cluster.head).run(("echo", "in")).stdout == "in\n"


def test_a_key_that_the_node_does_not_know(pair: Pair, tmp_path: Path) -> None:
    key = make_key(tmp_path / "stranger")
    place = pair[0].place("head")
    text = refused(one(pair[0], tmp_path, key))
    assert text == (
        f"head: {place['user']}@127.0.0.1:{pair[0].port} accepts none of our keys ({key})\n"
        "Authentication failed.\n"
        f"Put the public key into ~/.ssh/authorized_keys of {place['user']} on head; "
        "with many keys in the agent, name one by ssh.key_file."
    )


def test_a_user_that_the_node_does_not_know(pair: Pair, tmp_path: Path, login_key: Path) -> None:
    text = refused(one(pair[0], tmp_path, login_key, user="nobody-here"))
    assert "nobody-here@127.0.0.1" in text


def test_a_worker_that_does_not_know_our_key(
    pair: Pair, start: Start, tmp_path: Path, login_key: Path
) -> None:
    worker = start(address="127.0.0.3")
    (worker.folder / "authorized_keys").write_text("")
    known = tmp_path / "known"
    known.write_text(pair[0].known + worker.known)
    cluster = spec(
        pair[0].place("head"), worker.place("worker1"), known_hosts=known, key_file=login_key
    )
    assert refused(cluster, 1).startswith("worker1: ")


def test_no_key_at_all(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "known").write_text(pair[0].known)
    cluster = spec(pair[0].place("head"), None, known_hosts=tmp_path / "known")
    assert "we have no key to offer" in refused(cluster)


def test_a_key_of_the_home_folder_is_found(
    pair: Pair, tmp_path: Path, login_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_bytes(login_key.read_bytes())
    (tmp_path / ".ssh" / "known_hosts").write_text(pair[0].known)
    cluster = spec(pair[0].place("head"), None)
    assert connect(cluster, cluster.head).run(("echo", "in")).stdout == "in\n"


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
@pytest.mark.parametrize("form", ["", "PEM"], ids=["OpenSSH", "PEM"])
def test_an_encrypted_key_needs_its_passphrase(
    pair: Pair, tmp_path: Path, kind: str, form: str
) -> None:
    key = make_key(tmp_path / "id", kind=kind, passphrase="open sesame", form=form)
    assert refused(one(pair[0], tmp_path, key)) == (
        f"ssh.key_file: {key} is encrypted and no passphrase was given\n"
        "Load the key into an agent (ssh-add), or use an ssh-credentials block."
    )
    text = key.read_text()
    parse_key(text, "open sesame")
    with pytest.raises(LoginRefused, match="encrypted and no passphrase"):
        parse_key(text)
    with pytest.raises(LoginRefused, match="the passphrase is wrong"):
        parse_key(text, "close sesame")


def test_an_agent_may_hold_the_encrypted_key(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key(tmp_path / "id", passphrase="open sesame")
    node = start()
    (node.folder / "authorized_keys").write_text(public(key))
    unlocked = tmp_path / "unlocked"
    unlocked.write_bytes(key.read_bytes())
    unlocked.chmod(0o600)
    change = ("ssh-keygen", "-q", "-p", "-P", "open sesame", "-N", "", "-f", str(unlocked))
    subprocess.run(change, check=True, capture_output=True)
    agent = tmp_path / "agent"
    process = subprocess.Popen(("ssh-agent", "-D", "-a", str(agent)), stdout=subprocess.DEVNULL)
    try:
        poll(agent.exists, "the agent starts")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
        subprocess.run(("ssh-add", "-q", str(unlocked)), check=True, capture_output=True)
        cluster = one(node, tmp_path, key)
        assert connect(cluster, cluster.head).run(("echo", "in")).stdout == "in\n"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "No such file or directory", id="absent"),
        pytest.param("nonsense", "is no private key that we can read", id="no key"),
        pytest.param("public", "is no private key that we can read", id="public half"),
        pytest.param("cut", "is no private key that we can read", id="cut off"),
    ],
)
def test_a_key_file_that_holds_no_key(
    pair: Pair, tmp_path: Path, login_key: Path, content: str | None, said: str
) -> None:
    key = tmp_path / "id"
    texts = {"public": public(login_key), "cut": login_key.read_text()[:200]}
    if content is not None:
        key.write_text(texts.get(content, content))
    text = refused(one(pair[0], tmp_path, key))
    assert text.startswith(f"ssh.key_file: {key}")
    assert said in text


# --- reaching a node


def test_a_port_where_nothing_listens(pair: Pair, tmp_path: Path, login_key: Path) -> None:
    port = free_port()
    text = unreachable(one(pair[0], tmp_path, login_key, port=port))
    assert text.startswith(f"head: no SSH connection to {pair[0].place('head')['user']}@127.0.0.1")
    assert text.endswith("Is head up, is its sshd running, and is 127.0.0.1 its address?")


def test_a_worker_where_nothing_listens(pair: Pair, tmp_path: Path, login_key: Path) -> None:
    known = tmp_path / "known"
    known.write_text(pair[0].known)
    place = pair[1].place("worker1", port=free_port("127.0.0.2"))
    cluster = spec(pair[0].place("head"), place, known_hosts=known, key_file=login_key)
    text = unreachable(cluster, 1)
    assert text.startswith("worker1: no SSH connection to ")
    assert "from head: Connect failed" in text


def test_a_name_that_does_not_resolve(pair: Pair, tmp_path: Path, login_key: Path) -> None:
    text = unreachable(one(pair[0], tmp_path, login_key, address="no-such-node.invalid"))
    assert text.startswith("head: no SSH connection to ")


def test_a_node_that_accepts_and_says_nothing(pair: Pair, tmp_path: Path, login_key: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = unreachable(one(pair[0], tmp_path, login_key, port=silent.getsockname()[1]))
    assert "no answer within 2 s" in text


def test_something_that_is_no_sshd(pair: Pair, tmp_path: Path, login_key: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1000)

        answers = pool.submit(answer)
        cluster = one(pair[0], tmp_path, login_key, port=server.getsockname()[1])
        with pytest.raises(NodeUnreachable):
            connect(cluster, cluster.head)
        answers.result(5)


def test_a_head_that_forbids_tunnels(
    pair: Pair, start: Start, tmp_path: Path, login_key: Path
) -> None:
    head = start("AllowTcpForwarding no")
    known = tmp_path / "known"
    known.write_text(head.known + pair[1].known)
    cluster = spec(
        head.place("head"), pair[1].place("worker1"), known_hosts=known, key_file=login_key
    )
    place = pair[1].place("worker1")
    assert refused(cluster, 1) == (
        f"head: sshd forbids the tunnel to {place['user']}@127.0.0.2:{pair[1].port}\n"
        "Set AllowTcpForwarding yes in sshd_config on head and reload sshd."
    )


def test_many_threads_share_one_login(start: Start, tmp_path: Path, login_key: Path) -> None:
    """sshd drops parallel logins beyond MaxStartups."""
    node = start("MaxStartups 1:100:1")
    cluster = one(node, tmp_path, login_key)
    with ThreadPoolExecutor(12) as pool:
        said = pool.map(lambda n: connect(cluster, cluster.head).run(("echo", str(n))), range(12))
        assert [result.stdout for result in said] == [f"{number}\n" for number in range(12)]
    assert node.logins == 1


def test_a_busy_sshd_is_asked_again(start: Start, tmp_path: Path, login_key: Path) -> None:
    node = start("MaxStartups 1:100:1")
    cluster = one(node, tmp_path, login_key)
    with ThreadPoolExecutor(1) as pool:
        with socket.create_connection((node.address, node.port)) as other:
            other.recv(1)
            result = pool.submit(connect, cluster, cluster.head)
            poll(lambda: "MaxStartups" in node.log.read_text(), "sshd drops a login")
        assert result.result(10).run(("echo", "in")).stdout == "in\n"


# --- a way of the user's own


def proxy(script: Path) -> str:
    script.write_text(PIPE)
    return f"{sys.executable} {script} %h %p"


def test_a_proxy_command_reaches_any_port(
    pair: Pair, cluster: Cluster, tmp_path: Path, login_key: Path
) -> None:
    command = proxy(tmp_path / "pipe.py")
    head = pair[0].place("head", proxy_command=command)
    ssh = {"known_hosts": cluster.ssh.known_hosts, "key_file": login_key}
    through = spec(head, pair[1].place("worker1"), **ssh)
    assert connect(through, through.head).run(("echo", "head")).stdout == "head\n"
    assert connect(through, through.workers[0]).run(("echo", "worker")).stdout == "worker\n"


def test_a_proxy_command_knows_the_words_of_openssh(
    pair: Pair, tmp_path: Path, login_key: Path
) -> None:
    said = tmp_path / "said"
    command = f"sh -c 'echo %h %n %p %r 100%% >{said}; exec {proxy(tmp_path / 'pipe.py')}'"
    cluster = one(pair[0], tmp_path, login_key, proxy_command=command)
    connect(cluster, cluster.head)
    user = pair[0].place("head")["user"]
    assert said.read_text() == f"127.0.0.1 127.0.0.1 {pair[0].port} {user} 100%\n"


def test_a_proxy_command_that_fails_has_its_say(
    pair: Pair, tmp_path: Path, login_key: Path
) -> None:
    command = "sh -c 'echo no route by this way >&2; exit 1'"
    text = unreachable(one(pair[0], tmp_path, login_key, proxy_command=command))
    assert "proxy_command said: no route by this way" in text


def test_a_proxy_command_that_ends_is_a_lost_connection(
    pair: Pair, tmp_path: Path, login_key: Path
) -> None:
    pid = tmp_path / "pid"
    command = f"sh -c 'echo $$ >{pid}; exec {proxy(tmp_path / 'pipe.py')}'"
    cluster = one(pair[0], tmp_path, login_key, proxy_command=command)
    connection = connect(cluster, cluster.head)
    subprocess.run(("kill", "-KILL", pid.read_text().strip()), check=True)
    poll(lambda: not connection.alive, "the connection ends")
    again = connect(cluster, cluster.head)
    assert again.run(("echo", "back")).stdout == "back\n"
    again.close()
    assert not lives(int(pid.read_text()))


def test_equal_specs_share_a_login_and_others_do_not(
    pair: Pair, cluster: Cluster, only: LogIn
) -> None:
    first, second = (connect(cluster, node) for node in (cluster.head, cluster.head))
    assert first is second
    assert only(pair[0]) is not first

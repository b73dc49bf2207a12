"""The head as this very machine: the same commands as over SSH, with nothing in between."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocks import Cluster
from tasks import remote
from tasks.engines import engine
from tasks.errors import Cancelled, CommandFailed, CommandTimedOut, NodeUnreachable
from tasks.local import LocalRemote
from tasks.locks import release_lock, take_lock
from tasks.remote import Remote, connect
from tests.unit.specs import RUN, spec


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("HOME", str(tmp_path))
    remote.STOP.clear()
    yield spec(head={"address": "localhost", "transport": "local"})
    remote.STOP.clear()
    remote.disconnect()


@pytest.fixture
def here(cluster: Cluster) -> Remote:
    found = connect(cluster, cluster.head)
    assert isinstance(found, LocalRemote)
    assert connect(cluster, cluster.head) is found
    return found


def test_output_input_and_exit_codes(here: Remote) -> None:
    script = "cat; echo to stderr >&2; exit 3"
    result = here.run(("sh", "-c", script), stdin=b"x" * 300_000, ok=(3,))
    assert (result.stdout, result.stderr, result.code) == ("x" * 300_000, "to stderr\n", 3)
    with pytest.raises(CommandFailed) as error:
        here.run(("sh", "-c", "echo no >&2; exit 4"))
    assert str(error.value) == "head: exit code 4: sh -c 'echo no >&2; exit 4'\nno"


def test_a_command_that_reads_none_of_its_input(here: Remote) -> None:
    assert here.run(("echo", "done"), stdin=b"x" * 3_000_000).stdout == "done\n"


def test_it_begins_at_home_with_a_clean_environment(
    here: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    assert here.run(("pwd",)).stdout == f"{tmp_path}\n"
    assert "secret" not in here.run(("env",)).stdout


def gone(file: Path) -> bool:
    pid = file.read_text().strip()
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


SLOW = ("sh", "-c", "sleep 63 & echo $! >$HOME/pid; wait")


def test_a_deadline_ends_the_whole_group(here: Remote, tmp_path: Path) -> None:
    with pytest.raises(CommandTimedOut, match="still running after 1 s"):
        here.run(SLOW, timeout=1)
    deadline = time.monotonic() + 10
    while not gone(tmp_path / "pid"):
        assert time.monotonic() < deadline


def test_a_cancel_ends_it_too(here: Remote, tmp_path: Path) -> None:
    def cancel() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            pass
        remote.cancel()

    watch = threading.Thread(target=cancel)
    watch.start()
    with pytest.raises(Cancelled):
        here.run(SLOW, timeout=30)
    watch.join()
    deadline = time.monotonic() + 10
    while not gone(tmp_path / "pid"):
        assert time.monotonic() < deadline


def test_files_are_written_whole(here: Remote, tmp_path: Path) -> None:
    here.put(f"{tmp_path}/a/b", b"content" * 10_000, mode=0o600)
    file = tmp_path / "a" / "b"
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"content" * 10_000, 0o600)


def test_a_command_that_talks(here: Remote) -> None:
    stream = here.start(("cat",), shown="talk")
    stream.sendall(b"hello\n")
    assert stream.recv(10) == b"hello\n"
    stream.shutdown_write()
    assert (stream.recv(10), stream.recv_exit_status()) == (b"", 0)
    stream.close()


def test_the_lock_is_held(cluster: Cluster, tmp_path: Path) -> None:
    take_lock.fn(cluster, cluster.head, RUN)
    assert (tmp_path / ".sparkrail/sparks/lock/owner.json").exists()
    release_lock(cluster)


def test_a_tunnel_is_a_connection(here: Remote) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with here.open_tunnel("127.0.0.1", port):
            server.accept()[0].close()
    with pytest.raises(NodeUnreachable) as error:
        here.open_tunnel("127.0.0.1", port)
    assert error.value.brief == f"no connection to 127.0.0.1:{port}: Connection refused"


DOCKER = """\
#!/bin/sh
[ "$*" = "system dial-stdio" ] || exit 1
while read -r line && [ "$line" != "$(printf '\\r')" ]; do :; done
body='{"ApiVersion":"1.41","Version":"20.10.24"}'
printf 'HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %s\\r\\n' ${#body}
printf 'Connection: close\\r\\n\\r\\n%s' "$body"
"""


def test_docker_is_spoken_to_by_its_own_command(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub of docker at the process boundary, which answers each question for its version."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with engine(cluster, cluster.head) as client:
        assert client.version()["Version"] == "20.10.24"
        client.close()


def test_workers_are_reached_without_a_gateway(cluster: Cluster) -> None:
    """The head is this machine: what it reaches, we reach."""
    worker = cluster.workers[0].model_copy(update={"address": "127.0.0.1", "port": 1})
    with pytest.raises(NodeUnreachable) as error:
        connect(cluster.model_copy(update={"workers": (worker,)}), worker)
    assert "no SSH connection to root@127.0.0.1:1" in error.value.brief

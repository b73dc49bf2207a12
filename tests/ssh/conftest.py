"""Two private sshds on loopback: the head, and behind it as gateway the worker."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from blocks import Cluster
from tasks import remote
from tasks.remote import Remote
from tests.ssh import sshd
from tests.ssh.sshd import Sshd, make_key, spec

Start = Callable[..., Sshd]
LogIn = Callable[[Sshd], Remote]


@pytest.fixture(scope="session", autouse=True)
def program() -> None:
    """Missing sshd: installed or a failure in CI, a loud skip elsewhere."""
    in_ci = os.environ.get("CI") == "true"
    if sshd.SSHD is None and in_ci and os.getuid() == 0 and shutil.which("apt-get"):
        install = ("apt-get", "install", "--yes", "--no-install-recommends", "openssh-server")
        subprocess.run(install, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
        sshd.SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd.SSHD is None:
        say = pytest.fail if in_ci else pytest.skip
        say("NO sshd: nothing of the SSH tier is tested; apt-get install openssh-server")


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture(autouse=True)
def not_cancelled() -> Iterator[None]:
    yield
    remote.STOP.clear()


@pytest.fixture(scope="session")
def login_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("login") / "id")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, login_key: Path) -> Iterator[tuple[Sshd, Sshd]]:
    folder = tmp_path_factory.mktemp("nodes")
    head = Sshd(folder / "head", login_key, "127.0.0.1")
    worker = Sshd(folder / "worker", login_key, "127.0.0.2")
    yield head, worker
    remote.disconnect()
    for node in (worker, head):
        node.stop()


@pytest.fixture
def start(tmp_path: Path, login_key: Path) -> Iterator[Start]:
    """Start another sshd, with further lines of sshd_config."""
    started: list[Sshd] = []
    numbers = count()

    def begin(*options: str, address: str = "127.0.0.1", **environment: str) -> Sshd:
        folder = tmp_path / f"sshd{next(numbers)}"
        started.append(Sshd(folder, login_key, address, *options, environment=environment))
        return started[-1]

    yield begin
    remote.disconnect()
    for node in started:
        node.stop()


@pytest.fixture(scope="session")
def cluster(pair: tuple[Sshd, Sshd], login_key: Path) -> Cluster:
    """One connection to each of the pair serves most tests."""
    head, worker = pair
    known_hosts = login_key.parent / "known_hosts"
    known_hosts.write_text(head.known + worker.known)
    return spec(
        head.place("head"), worker.place("worker1"), known_hosts=known_hosts, key_file=login_key
    )


@pytest.fixture
def head(cluster: Cluster) -> Remote:
    return remote.connect(cluster, cluster.head)


@pytest.fixture
def worker(cluster: Cluster) -> Remote:
    return remote.connect(cluster, cluster.workers[0])


@pytest.fixture
def only(tmp_path: Path, login_key: Path) -> LogIn:
    """Log in on one sshd that is the whole cluster."""

    def log_in(node: Sshd) -> Remote:
        known = tmp_path / "known_hosts_of_one"
        known.write_text(node.known)
        cluster = spec(node.place("head"), None, known_hosts=known, key_file=login_key)
        return remote.connect(cluster, cluster.head)

    return log_in

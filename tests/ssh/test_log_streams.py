"""Logs that are followed over a real SSH connection; docker is a stub at the process boundary."""

import contextlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocks import Cluster
from flows import logs as flow
from tasks import log_streams, remote
from tasks.log_streams import RankLogs, Wanted
from tests.ssh.conftest import Start
from tests.ssh.sshd import lives, poll, spec

# It says three lines, and then, as a quiet server does, nothing any more.
DOCKER = """\
#!/bin/sh
case $1 in
cp) exec cat {folder}/logs.tar ;;
logs) ;;
*) exit 1 ;;
esac
echo $$ >{folder}/pid
echo "asked: $*"
echo "on its standard error" >&2
echo "said at the end"
exec sleep 300
"""


class Site:
    """A head with this docker, and the containers that its API is said to list."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: dict[str, str] = {}

    def lives(self) -> bool:
        file = self.folder / "pid"
        return file.exists() and bool(file.read_text().strip()) and lives(int(file.read_text()))

    @contextlib.contextmanager
    def engine(self, _cluster: Any, _node: Any) -> Iterator[Any]:
        rows = [
            {"Id": "1" * 64, "Names": [f"/{name}"], "State": state}
            for name, state in self.states.items()
        ]
        yield SimpleNamespace(api=SimpleNamespace(containers=lambda **_all: rows))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER.format(folder=tmp_path))
    docker.chmod(0o755)
    monkeypatch.setattr(log_streams, "engine", found.engine)
    return found


@pytest.fixture
def cluster(start: Start, site: Site, login_key: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    node = start(PATH=f"{site.folder / 'bin'}:{os.environ['PATH']}")
    known = site.folder / "known_hosts"
    known.write_text(node.known)
    made = spec(node.place("head"), None, known_hosts=known, key_file=login_key)
    monkeypatch.setattr(flow, "load_cluster", lambda _name: made)
    return made


def test_ctrl_c_ends_what_follows_a_quiet_container(site: Site, cluster: Cluster) -> None:
    """Whose next line, at which it would notice that nobody reads, may never come."""
    site.states = {f"sparkrail-{cluster.name}-serve": "running"}
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line.endswith("said at the end"):
            assert site.lives()
            raise KeyboardInterrupt

    assert flow.logs("loopback", Wanted(5, follow=True), show=show) == 0
    assert [line for line in shown if line.startswith("serve | ")] == [
        f"serve | asked: logs --follow --tail=5 {'1' * 64}",
        "serve | on its standard error",
        "serve | said at the end",
    ]
    poll(lambda: not site.lives(), "docker logs ends")


def test_the_ranks_of_a_container_that_has_ended(site: Site, cluster: Cluster) -> None:
    logs = site.folder / "logs"
    logs.mkdir()
    (logs / "worker-ab-01000000-42.err").write_text("one\ntwo\nthree, without an end")
    (logs / "worker-ab-01000000-7.out").write_text("")
    (logs / "raylet.out").write_text("not a rank's\n")
    with tarfile.open(site.folder / "logs.tar", "w") as archive:
        archive.add(logs, "logs")
    name = f"sparkrail-{cluster.name}-ray"
    site.states = {name: "exited"}
    said: list[tuple[str, str]] = []
    stream = RankLogs(cluster, cluster.head, Wanted(2))
    stream.run(lambda what, line: said.append((what, line)))
    assert said == [
        ("rank 42", "two"),
        ("rank 42", "three, without an end"),
        ("ranks", f"[the ranks ended with {name} (111111111111)]"),
    ]
    remote.disconnect()

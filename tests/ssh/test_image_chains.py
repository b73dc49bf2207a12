"""A stream through a chain of workers by real sshds; docker is a stub at the process boundary."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks import remote
from tasks.errors import Cancelled, CommandFailed, NodeUnreachable, SparkrailError
from tasks.image_chains import Round, stream
from tasks.image_streams import STEP
from tasks.transfers import Progress
from tests.ssh.sshd import Sshd, poll, spec

SIZE = 60_000_000  # More than all that waits on the way.
DOCKER = """\
#!/bin/sh
cd {home}
case "$1" in
save) exec head -c {size} /dev/zero;;
load) echo $PPID >pid; [ ! -e full ] || {{ echo no space left on device >&2; exit 1; }}
      [ ! -e slow ] || {{ head -c 1000000 >/dev/null; touch begun; exec sleep 100; }}
      cat >loaded; echo Loaded image;;
esac
"""


class Nodes:
    """A head and three workers, each an sshd with a home and a docker of its own."""

    def __init__(self, folder: Path, login_key: Path) -> None:
        self.sshds: list[Sshd] = []
        names = ("head", "worker1", "worker2", "worker3")
        for number, name in enumerate(names):
            programs = folder / name / "bin"
            programs.mkdir(parents=True)
            docker = programs / "docker"
            docker.write_text(DOCKER.format(home=folder / name / "home", size=SIZE))
            docker.chmod(0o755)
            path = f"{programs}:{os.environ['PATH']}"
            address = f"127.0.0.{number + 1}"
            self.sshds.append(Sshd(folder / name, login_key, address, environment={"PATH": path}))
        known_hosts = folder / "known_hosts"
        known_hosts.write_text("".join(sshd.known for sshd in self.sshds))
        head, *workers = [sshd.place(name) for name, sshd in zip(names, self.sshds, strict=True)]
        pair = spec(head, workers[0], known_hosts=known_hosts, key_file=login_key)
        one = pair.workers[0]
        # A fabric of loopback addresses, which a spec may not name.
        self.cluster: Cluster = pair.model_copy(
            update={
                "workers": tuple(
                    one.model_copy(
                        update={
                            "name": place["name"],
                            "address": place["address"],
                            "port": place["port"],
                            "fabric_address": place["address"],
                        }
                    )
                    for place in workers
                )
            }
        )

    def home(self, number: int) -> Path:
        return self.sshds[number].home

    def loaded(self) -> list[int]:
        files = [self.home(number) / "loaded" for number in (1, 2, 3)]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def send(self) -> Round:
        orders: dict[str, Any] = {
            "save": ["docker", "save", "engine:1"],
            "layers": [],
            "spare": [],
            "blobs": {},
            "legacy": True,
        }
        workers = self.cluster.workers
        bars = {node.name: Progress(STEP, self.cluster, node, SIZE) for node in workers}
        return stream(self.cluster, workers, orders, SIZE, bars)


@pytest.fixture
def nodes(tmp_path: Path, login_key: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path, login_key)
    yield found
    remote.disconnect()
    for sshd in found.sshds:
        sshd.stop()


class Midway:
    """A transfer in the midst of which the second worker has stopped to load."""

    def __init__(self, nodes: Nodes) -> None:
        (nodes.home(2) / "slow").touch()
        self.found: Round | SparkrailError | None = None
        self.thread = threading.Thread(target=self._run, args=(nodes,))
        self.thread.start()
        poll(lambda: (nodes.home(2) / "begun").exists(), "the second worker loads")

    def _run(self, nodes: Nodes) -> None:
        try:
            self.found = nodes.send()
        except SparkrailError as error:
            self.found = error

    def end(self) -> Round | SparkrailError:
        self.thread.join(60)
        assert self.found is not None
        return self.found


@pytest.fixture
def midway(nodes: Nodes) -> Midway:
    return Midway(nodes)


def test_all_get_it(nodes: Nodes) -> None:
    found = nodes.send()
    assert sorted(found.loaded) == ["worker1", "worker2", "worker3"]
    assert nodes.loaded() == [SIZE] * 3
    assert {moved.bytes for moved in found.loaded.values()} == {SIZE}


def test_a_full_disk_in_the_middle(nodes: Nodes) -> None:
    (nodes.home(2) / "full").touch()
    found = nodes.send()
    assert sorted(found.loaded) == ["worker1", "worker3"]
    assert str(found.failed["worker2"]).startswith(
        "worker2: docker load of the image from head ended with exit code 1\n"
        "no space left on device\nMake room on worker2"
    )
    assert nodes.loaded() == [SIZE, 0, SIZE]


def test_one_that_is_away_from_the_start_is_passed_by(nodes: Nodes) -> None:
    nodes.sshds[2].stop()
    found = nodes.send()
    assert sorted(found.loaded) == ["worker1", "worker3"]
    assert isinstance(found.failed["worker2"], NodeUnreachable)


def test_one_that_is_killed_cuts_off_those_behind_it(nodes: Nodes, midway: Midway) -> None:
    os.kill(int((nodes.home(2) / "pid").read_text()), signal.SIGKILL)
    found = midway.end()
    assert isinstance(found, Round)
    assert sorted(found.loaded) == ["worker1"]
    assert sorted(found.failed) == ["worker2"]
    assert sorted(found.cut_off) == ["worker3"]
    assert nodes.loaded()[0] == SIZE


@pytest.mark.extended
def test_one_that_freezes_is_given_up(nodes: Nodes, midway: Midway) -> None:
    pid = int((nodes.home(2) / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        poll(lambda: nodes.loaded()[0] == SIZE, "the first worker has all of it", 60)
    finally:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
    found = midway.end()
    assert isinstance(found, Round)
    assert (sorted(found.loaded), sorted(found.failed)) == (["worker1"], ["worker2"])


def test_cancelled(nodes: Nodes, midway: Midway) -> None:
    pid = int((nodes.home(2) / "pid").read_text())
    remote.cancel()
    assert isinstance(midway.end(), Cancelled)
    poll(lambda: not Path(f"/proc/{pid}").exists(), "its program ends")


def test_a_source_that_fails(nodes: Nodes) -> None:
    docker = nodes.home(0).parent / "bin" / "docker"
    docker.write_text("#!/bin/sh\nhead -c 9999999 /dev/zero; echo boom >&2; exit 3\n")
    with pytest.raises(CommandFailed, match=r"(?s)^head: docker save ended .* 3 .*boom"):
        nodes.send()
    assert nodes.loaded() != [SIZE] * 3

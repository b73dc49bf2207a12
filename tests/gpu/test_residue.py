"""The cleanup on real NVIDIA GPUs of this machine, which is its own head: nothing is pretended."""

import contextlib
import getpass
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocks import Cluster
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.page_caches import release_page_cache
from tasks.residue import clean_residue
from tests.unit.specs import spec

HOLDER = Path(__file__).with_name("hold_memory.py")
MIB = 11_981  # 11.7 GiB.
RUN = Run(id="test", who="test")
DRY = Run(id="test", who="test", dry_run=True)
USER = getpass.getuser()
SECONDS = 5.0


def smi(query: str) -> list[list[str]]:
    argv = ("nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits")
    try:
        said = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return []
    return [line.split(", ") for line in said.stdout.splitlines()] if not said.returncode else []


GPUS = len(smi("gpu=index"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU on this machine: NOTHING IS TESTED HERE"),
]


def used() -> list[int]:
    return [int(row[0]) for row in smi("gpu=memory.used")]


@contextlib.contextmanager
def holding(mib: int, *gpus: int, named: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that holds so much on each of these GPUs."""
    words = [named or sys.executable, str(HOLDER), str(mib), *map(str, gpus)]
    process = subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    remote.STOP.clear()
    yield spec(
        head={"address": "localhost", "transport": "local", "gpus": GPUS},
        workers=[],
        serve={"tensor_parallel": GPUS},
        model={"path": str(tmp_path)},
        residue={
            "policy": "stop-listed",
            "listed": [{"command": "*hold_memory.py *", "user": USER}],
            "excepted": [{"command": "*hold_memory.py 512 *", "user": USER}],
            # With anything held there is too little.
            "free_mib": min(int(row[0]) for row in smi("gpu=memory.free")),
        },
    )
    remote.disconnect()


def clean(cluster: Cluster, run: Run = RUN) -> Outcome:
    outcome = clean_residue.fn(cluster, cluster.head, run)
    assert isinstance(outcome, Outcome)
    print(outcome.status, outcome.detail, f"{outcome.seconds:.1f} s")
    return outcome


def test_a_holder_is_found_stopped_and_its_memory_proven_back(cluster: Cluster) -> None:
    idle = used()
    with (
        holding(MIB, 0) as process,
        holding(512, 0) as excepted,
        holding(256, 0, named="Xorg") as x,
    ):
        took = used()[0] - idle[0]
        assert took >= MIB + 512 + 256
        dry = clean(cluster, DRY)
        assert dry.status == "planned"
        assert dry.detail.startswith(f"end process of {USER}")
        assert f"pid {process.pid} ({sys.executable} {HOLDER} {MIB} 0) holds " in dry.detail
        assert "left alone: excepted" in dry.detail
        assert "left alone: a display server" in dry.detail
        assert process.poll() is None

        outcome = clean(cluster)
        assert outcome.status == "changed"
        assert process.wait(1) == -15
        assert (excepted.poll(), x.poll()) == (None, None)
        found = re.search(
            r": ended on TERM; (\d+) MiB back(?: on GPU 0)? after (\d+\.\d) s", outcome.detail
        )
        assert found, outcome.detail
        assert int(found[1]) >= MIB
        assert float(found[2]) <= SECONDS
        assert clean(cluster).status == "unchanged"
    assert _returns_to(idle) <= SECONDS


def _returns_to(idle: list[int]) -> float:
    began = time.monotonic()
    while used() != idle and time.monotonic() - began < 2 * SECONDS:
        pass
    return time.monotonic() - began


def test_memory_that_is_enough_leaves_everybody_alone(cluster: Cluster) -> None:
    enough = cluster.model_copy(
        update={"residue": cluster.residue.model_copy(update={"free_mib": 1024})}
    )
    with holding(MIB, 0) as process:
        outcome = clean(enough)
        assert (outcome.status, process.poll()) == ("unchanged", None)
        assert "left alone: there is memory enough" in outcome.detail


def test_who_ignores_term_is_killed(cluster: Cluster) -> None:
    impatient = cluster.model_copy(
        update={"residue": cluster.residue.model_copy(update={"grace_seconds": 1})}
    )
    with holding(MIB, 0) as process:
        os.kill(process.pid, 19)  # Stopped, it cannot even take a TERM.
        outcome = clean(impatient)
        assert process.wait(1) == -9
        assert "killed, as it did not end within 1 s" in outcome.detail


@pytest.mark.skipif(GPUS < 2, reason="one GPU only")
def test_one_process_on_two_gpus(cluster: Cluster) -> None:
    idle = used()
    with holding(MIB, 0, 1) as process, holding(512, 1) as excepted:
        outcome = clean(cluster)
        assert (process.wait(1), excepted.poll()) == (-15, None)
        found = re.search(r"; (\d+) MiB back on GPU 0, (\d+) MiB back on GPU 1", outcome.detail)
        assert found and min(int(found[1]), int(found[2])) >= MIB, outcome.detail
    assert _returns_to(idle) <= SECONDS


def test_page_cache_of_the_model_is_released(cluster: Cluster) -> None:
    file = Path(cluster.model.path) / "model.safetensors"
    with file.open("wb") as out:
        for _ in range(64):
            out.write(os.urandom(16 << 20))
    released = release_page_cache(cluster, cluster.head)
    print(released)
    assert (released.before, released.after) == (1 << 30, 0)
    assert released.free_after - released.free_before > 900 << 20

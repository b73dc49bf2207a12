"""The weights: to one and to four workers, by our streams, by rsync and by a plain copy.

Once with links as fast as the machine, where the processors are the limit, and once with links of
400 Mbit/s. The files are in memory: all nodes of a lab share one disk, which real ones do not. A
transfer's time is that from its start until every file is checked, synced, in its place and
remembered; the time of the whole step, with its looks before and after, is shown beside it.

Where the processors are the limit the model has 3.2 GB. To start the programs over SSH and to let
the files settle takes about a tenth of a second whatever the size: 4 % of a transfer of 3.2 GB, but
10 % of one of 1.3 GB, and nothing in one of 119 GB, which is what people deploy.
"""

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from blocks import Cluster, Node
from tasks import remote
from tasks.converge import Outcome, Run
from tasks.manifests import Manifest, Send
from tasks.transfers import Progress
from tasks.weight_streams import transfer
from tasks.weights import STEP, ensure_weights, observe
from tests.bench.rows import Row, compared
from tests.lab import lab
from tests.lab.command import say
from tests.lab.layout import Lab, Shape, nodes

LAB = Lab("lab-bench-weights")
RUN = Run(id="bench", who="bench")
PATH = "/models/bench"
LINK = 400_000_000 / 8
MIB = 1 << 20
PLAIN = (Path(__file__).parent / "plain_copy.py").read_bytes()


def measure(repetitions: int) -> list[Row]:
    """Brings two labs up, one after the other, measures, and takes them down."""
    return [*by_processor(repetitions), *by_link(repetitions)]


@dataclass
class Series:
    """What the repetitions gave, by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        say(f"{name}: {value:.4g}")
        self.values.setdefault(name, []).append(value)

    def __getitem__(self, name: str) -> list[float]:
        return self.values[name]


def by_processor(repetitions: int) -> list[Row]:
    """Links without a limit: both ends share the machine's processors."""
    with up(Shape(workers=1, docker=False, engine=False)) as bench:
        bench.fill(files=8, size=384 * MIB)
        found, [worker] = Series(), bench.cluster.workers
        ways: dict[str, Callable[[], float]] = {
            "rsync": lambda: bench.rsync(worker),
            "plain": lambda: bench.plain(worker),
            "ours": lambda: bench.ours([worker], found),
            "step": lambda: bench.step([worker]),
        }
        for number in range(repetitions):
            order = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
            for name in order:
                bench.clear()
                found.add(name, bench.megabytes / ways[name]())
    one = "weights to one worker, processors the limit"
    return [
        compared(one, found["ours"], "MB/s", other="rsync -a over ssh", others=found["rsync"],
                 at_least=2.5),
        compared(one, found["ours"], "MB/s", other="plain sendfile and recv, nothing checked",
                 others=found["plain"], at_least=0.7),
        compared("... the whole step", found["step"], "MB/s", other="rsync -a over ssh",
                 others=found["rsync"]),
        compared("... memory of our largest process", found["memory"], "MB", other="allowed",
                 others=[150.0], at_most=1.0),
    ]  # fmt: skip


def by_link(repetitions: int) -> list[Row]:
    """Links of 400 Mbit/s, which is what limits then."""
    with up(Shape(workers=4, docker=False, engine=False, fabric_rate="400mbit")) as bench:
        bench.fill(files=8, size=64 * MIB)
        found, workers = Series(), bench.cluster.workers
        for number in range(repetitions):
            parts: list[Callable[[], None]] = [
                lambda: found.add("one", bench.ours(workers[:1], found)),
                lambda: found.add("four", bench.ours(workers, found, sent="sent")),
                lambda: found.add("rsync", sum(bench.rsync(worker) for worker in workers)),
            ]
            for part in parts if number % 2 == 0 else reversed(parts):
                bench.clear()
                part()
        size = bench.megabytes
    one = [size / seconds for seconds in found["one"]]
    return [
        compared("weights to one worker, 400 Mbit/s the limit", one, "MB/s", other="the link",
                 others=[LINK / 1e6], at_least=0.9),
        compared("... to four workers", found["four"], "s", other="to one", others=found["one"],
                 at_most=1.3),
        compared("... to four workers", found["four"], "s", other="four rsyncs in turn",
                 others=found["rsync"]),
        compared("... bytes that the head sends to four", found["sent"], "MB", other="the model",
                 others=[size], at_most=1.1),
    ]  # fmt: skip


class Bench:
    """A lab with a model on its head."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.want = Manifest()

    @property
    def megabytes(self) -> float:
        return self.want.size / 1e6

    def fill(self, *, files: int, size: int) -> None:
        """A model of random bytes, read and remembered as each night finds it."""
        for node in self.cluster.nodes:
            on(node.name, f"mkdir -p {PATH}; mount -t tmpfs -o size=4g model {PATH}")
            # As in a deploy, which has looked at all nodes before it sends anything.
            remote.connect(self.cluster, node)
        on("head", f"cd {PATH}; echo '{{}}' | tee config.json tokenizer.json")
        for at in range(files):
            on("head", f"head -c {size} /dev/urandom > {PATH}/model-{at}.bin")
        self.want = observe(self.cluster, self.cluster.head, RUN)

    def clear(self) -> None:
        """Nothing on the workers; the head's files in its page cache, for whoever reads them."""
        for worker in self.cluster.workers:
            on(worker.name, f"rm -rf {PATH}/* {PATH}/.[a-z]*; sync -f {PATH}")
        on("head", f"cat {PATH}/* > /dev/null")

    def ours(self, workers: Sequence[Node], found: Series, sent: str = "") -> float:
        """Until the last of them has all."""
        what = Send(tuple(sorted(self.want.files)), self.want.size, len(self.want.files))

        def fetch(worker: Node) -> None:
            with Progress(STEP, self.cluster, worker, what.size) as progress:
                moving.fetch(worker, what, progress)

        before = sent_bytes()
        with transfer(self.cluster, self.want) as moving, ThreadPoolExecutor() as pool:
            began = time.monotonic()
            list(pool.map(fetch, workers))
            seconds = time.monotonic() - began
            found.add("memory", max(peak_megabytes(node.name) for node in self.cluster.nodes))
        if sent:
            found.add(sent, (sent_bytes() - before) / 1e6)
        return seconds

    def step(self, workers: Sequence[Node]) -> float:
        """As a deploy does it."""
        began = time.monotonic()
        with ThreadPoolExecutor() as pool:
            outcomes = list(
                pool.map(lambda worker: ensure_weights.fn(self.cluster, worker, RUN), workers)
            )
        seconds = time.monotonic() - began
        assert all(isinstance(each, Outcome) and each.status == "changed" for each in outcomes)
        return seconds

    def rsync(self, worker: Node) -> float:
        began = time.monotonic()
        on("head", f"rsync -a -e ssh {PATH}/ root@{worker.fabric_address}:{PATH}/")
        return time.monotonic() - began

    def plain(self, worker: Node) -> float:
        """One connection, as fast as it goes; its receiver is there before the clock runs."""
        files = json.dumps([(path, file.size) for path, file in sorted(self.want.files.items())])
        for name in ("head", worker.name):
            on(name, "cat > /tmp/plain_copy.py", PLAIN)
        words = [worker.fabric_address, PATH, files]
        argv = lab.command_line(
            LAB, worker.name, ["python3", "/tmp/plain_copy.py", "receive", *words]
        )
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as receiver:
            watch = threading.Timer(300, receiver.kill)
            watch.start()
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == b"ready\n"
            began = time.monotonic()
            subprocess.run(
                lab.command_line(LAB, "head", ["python3", "/tmp/plain_copy.py", "send", *words]),
                timeout=300,
                check=True,
            )
            assert receiver.wait() == 0
            watch.cancel()
        return time.monotonic() - began


@contextlib.contextmanager
def up(shape: Shape) -> Iterator[Bench]:
    lab.down(LAB)
    try:
        lab.up(LAB, shape)
        spec = yaml.safe_load(LAB.spec.read_text())
        spec["model"]["path"] = PATH
        # The files stand for a model's; only their bytes count here.
        yield Bench(Cluster.model_validate(spec))
    finally:
        remote.disconnect()
        lab.down(LAB)


def on(node: str, script: str, stdin: bytes = b"") -> str:
    argv = lab.command_line(LAB, node, ["sh", "-ec", script])
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def peak_megabytes(node: str) -> float:
    """The most that one of our programs on a node has had in memory so far."""
    script = (
        "for pid in $(pgrep -f 'python3.* weights_[a-z]*$'); do grep VmHWM /proc/$pid/status; done"
    )
    return max(
        (int(line.split()[1]) * 1024 / 1e6 for line in on(node, script).splitlines()), default=0.0
    )


def sent_bytes() -> int:
    """What has left the head's fabric port, headers included."""
    head, *_ = nodes(Shape())
    return int(on("head", f"cat /sys/class/net/{head.fabric_interface}/statistics/tx_bytes"))

"""What runs against what was asked, in words: one table of states that people meet."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tasks.container_looks import cause_of, parse_found
from tasks.containers import BOOT_LABEL, CLUSTER_LABEL, DIGEST_LABEL, SHARES_LABEL, Container
from tasks.endpoint import Answer, Silent
from tasks.errors import NodeUnreachable, NotReady, SparkrailError
from tasks.ray_nodes import RayNode
from tasks.standings import Found, Looked, Standing, standings
from tasks.topology import ContainerSpec, Fabric, containers, files
from tests.unit.specs import spec

CLUSTER = spec()
RAY, SERVE = "sparkrail-sparks-ray", "sparkrail-sparks-serve"
IMAGE, OLDER = "c0ffee" * 8, "abc123" * 8
STARTED = "2026-11-30T10:00:00.123456789Z"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.localtime", time.gmtime)


def wanted(boot: str = "") -> dict[str, tuple[ContainerSpec, ...]]:
    fabric = Fabric(interface="eth1")
    return {
        node.name: containers(
            CLUSTER, node, "/root", fabric, files(CLUSTER, node, fabric), IMAGE, "w", boot
        )
        for node in CLUSTER.nodes
    }


@dataclass
class Site:
    """What was asked, and what was found: everything as asked until a case changes it."""

    wanted: dict[str, tuple[ContainerSpec, ...]]
    looked: dict[str, Looked | SparkrailError]
    ray: Any
    answer: Any
    found: dict[str, dict[str, Found]] = field(default_factory=dict)

    def change(self, node: str, name: str, labels: dict[str, str] | None = None, **by: Any) -> None:
        """Other labels of a container, another state of it, or other fields of what was found."""
        found = self.found[node][name]
        state = by.pop("state", found.container.state)
        more = {"labels": {**found.container.labels, **(labels or {})}, "state": state}
        container = found.container.model_copy(update=more)
        self.found[node][name] = found.model_copy(update={"container": container, **by})

    def rows(self) -> list[Standing]:
        for node, found in self.found.items():
            seen = self.looked[node]
            if isinstance(seen, Looked):
                self.looked[node] = seen.model_copy(update={"found": found})
        return standings(CLUSTER, self.wanted, self.looked, self.ray, self.answer)


def healthy() -> Site:
    found = {name: {each.name: as_made(name, each) for each in specs} for name, specs in WANTED}
    return Site(
        wanted=dict(WANTED),
        looked={name: Looked(boot="boot-1") for name in found},
        ray=[ray_node("10.77.0.1"), ray_node("10.77.0.2")],
        answer=Answer(text=" jumps", tokens=4, seconds=0.5),
        found=found,
    )


WANTED = tuple(wanted("boot-1").items())


def as_made(node: str, want: ContainerSpec) -> Found:
    labels = {
        CLUSTER_LABEL: "sparks",
        DIGEST_LABEL: want.digest,
        BOOT_LABEL: want.boot,
        SHARES_LABEL: f"{want.shares} on {node}" if want.shares else "",
    }
    id = f"{want.name} on {node}"
    container = Container(id=id, name=want.name, state="running", labels=labels)
    image = {"image": "engine:1", "image_content": IMAGE, "image_created": "2026-11-01T00:00:00Z"}
    return Found.model_validate({"container": container, "started": STARTED, **image})


def ray_node(address: str, *, alive: bool = True) -> RayNode:
    resources = {"GPU": 1.0, f"node:{address}": 1.0}
    return RayNode(id=address, alive=alive, address=address, resources=resources)


def lose_the_worker(site: Site) -> None:
    site.ray = [ray_node("10.77.0.1"), ray_node("10.77.0.2", alive=False)]


UNREACHABLE = NodeUnreachable("no SSH connection to root@10.77.0.2:22", node="worker1")
SINCE = ", since 2026-11-30 10:00:00"
CONTAINERS = (("head", "Ray"), ("head", "server"), ("worker1", "Ray"))
ENDED = {
    "state": "exited",
    "exit_code": 137,
    "finished": "2026-11-30T11:00:00Z",
}


def unasked(site: Site) -> None:
    site.wanted = {}


def nothing_there(site: Site) -> None:
    site.found = {"head": {}, "worker1": {}}
    site.ray, site.answer = None, Silent("/health: nothing listens on 127.0.0.1:8000")


def stranger_answers(site: Site) -> None:
    del site.found["head"][SERVE]


def unreachable(site: Site) -> None:
    del site.found["worker1"]
    site.looked["worker1"] = UNREACHABLE


def head_unreachable(site: Site) -> None:
    site.found.clear()
    site.wanted, site.ray, site.answer = {}, None, None
    for name in ("head", "worker1"):
        site.looked[name] = NodeUnreachable("no SSH connection", node="head")


def server_on_a_worker(site: Site) -> None:
    site.found["worker1"][SERVE] = site.found["head"][SERVE]


def both(*changes: Callable[[Site], None]) -> Callable[[Site], object]:
    return lambda site: [change(site) for change in changes]


Expected = dict[tuple[str, str], tuple[str, str]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            lambda site: site.change(
                "worker1", RAY, {BOOT_LABEL: "boot-0"}, cause="INFO all is well", **ENDED
            ),
            {
                ("worker1", "Ray"): (
                    "rebooted since",
                    "the node was rebooted since this was deployed; "
                    "ended with exit code 137, 2026-11-30 11:00:00",
                )
            },
            id="rebooted",
        ),
        pytest.param(
            lambda site: site.change("worker1", RAY, {BOOT_LABEL: "boot-0"}),
            {
                ("worker1", "Ray"): (
                    "rebooted since",
                    f"the node was rebooted since this was deployed{SINCE}",
                )
            },
            id="rebooted, and somebody started it again",
        ),
        pytest.param(
            lambda site: site.change("worker1", RAY, {BOOT_LABEL: ""}),
            {},
            id="deployed by a release that recorded no boot",
        ),
        pytest.param(
            lambda site: site.change("worker1", RAY, {DIGEST_LABEL: "d"}, image_content=OLDER),
            {
                ("worker1", "Ray"): (
                    "older image",
                    "runs an older image: engine:1 (abc123abc123, made 2026-11-01 00:00:00)"
                    + SINCE,
                )
            },
            id="an older image",
        ),
        pytest.param(
            lambda site: site.change("head", SERVE, {DIGEST_LABEL: "d"}, image_content=""),
            {
                ("head", "server"): (
                    "older image",
                    f"runs an image engine:1 that is not on the node any more{SINCE}",
                )
            },
            id="an image that is gone",
        ),
        pytest.param(
            lambda site: site.change("head", SERVE, {DIGEST_LABEL: "other"}),
            {
                ("head", "server"): (
                    "another spec",
                    "deployed with another spec (arguments, variables, files or weights)" + SINCE,
                )
            },
            id="another spec",
        ),
        pytest.param(
            lambda site: site.change("head", SERVE, cause="a rank ended: died", **ENDED),
            {
                ("head", "server"): (
                    "ended",
                    "ended with exit code 137, 2026-11-30 11:00:00: a rank ended: died",
                ),
                ("head", "endpoint"): (
                    "not ours",
                    "another process than our server answers ' jumps' in 0.50 s",
                ),
            },
            id="the server ended, and another answers",
        ),
        pytest.param(
            lambda site: site.change("worker1", RAY, out_of_memory=True, **ENDED),
            {
                ("worker1", "Ray"): (
                    "ended",
                    "ended with exit code 137, out of memory, 2026-11-30 11:00:00",
                )
            },
            id="out of memory",
        ),
        pytest.param(
            lambda site: site.change("worker1", RAY, state="restarting"),
            {("worker1", "Ray"): ("ended", "is restarting")},
            id="a crash loop",
        ),
        pytest.param(
            lambda site: site.change("head", SERVE, {SHARES_LABEL: "an earlier Ray"}),
            {
                ("head", "server"): (
                    "Ray started anew",
                    f"the Ray that it was started on is gone{SINCE}",
                )
            },
            id="Ray was started anew",
        ),
        pytest.param(
            lose_the_worker,
            {
                ("worker1", "Ray"): (
                    "rank lost",
                    "its container runs, but its rank is lost: 10.77.0.2 is not alive in Ray"
                    + SINCE,
                )
            },
            id="a rank is lost while its container lives",
        ),
        pytest.param(
            lambda site: setattr(site, "ray", NotReady("Ray's head does not answer", node="head")),
            {
                ("head", "Ray"): (
                    "no answer",
                    f"its container runs, but Ray's head does not answer{SINCE}",
                )
            },
            id="the head's Ray is silent",
        ),
        pytest.param(
            lambda site: setattr(site, "answer", Silent("/health: HTTP 500")),
            {("head", "endpoint"): ("no answer", "does not answer: /health: HTTP 500")},
            id="the server is silent",
        ),
        pytest.param(
            unreachable,
            {
                ("worker1", "Ray"): (
                    "unreachable",
                    "cannot be looked at: no SSH connection to root@10.77.0.2:22; "
                    "Ray on the head still has it alive",
                )
            },
            id="a worker that only we cannot reach",
        ),
        pytest.param(
            both(unreachable, lose_the_worker),
            {
                ("worker1", "Ray"): (
                    "unreachable",
                    "cannot be looked at: no SSH connection to root@10.77.0.2:22; "
                    "Ray on the head has lost it too",
                )
            },
            id="a worker that is away",
        ),
        pytest.param(
            head_unreachable,
            {
                ("head", "Ray"): ("unreachable", "cannot be looked at: no SSH connection"),
                ("worker1", "Ray"): ("unreachable", "cannot be looked at: no SSH connection"),
                ("head", "server"): ("", ""),
                ("head", "endpoint"): ("unknown", "the head cannot be asked"),
            },
            id="the head is away",
        ),
        pytest.param(
            lambda site: site.change("head", RAY, {CLUSTER_LABEL: ""}),
            {
                ("head", "Ray"): (
                    "not ours",
                    f"a container ({f'{RAY} on head'[:12]}) that sparkrail did not start{SINCE}",
                )
            },
            id="a stranger's container under our name",
        ),
        pytest.param(
            server_on_a_worker,
            {
                ("worker1", "server"): (
                    "another spec",
                    f"a server on a node that is not the head{SINCE}",
                )
            },
            id="a server on a node that is no head any more",
        ),
        pytest.param(
            stranger_answers,
            {
                ("head", "server"): ("not there", "nothing: there is no container of that name"),
                ("head", "endpoint"): (
                    "not ours",
                    "another process than our server answers ' jumps' in 0.50 s",
                ),
            },
            id="no server, and yet an answer",
        ),
        pytest.param(
            nothing_there,
            dict.fromkeys(CONTAINERS, ("not there", "nothing: there is no container of that name"))
            | {
                ("head", "endpoint"): (
                    "no answer",
                    "does not answer: /health: nothing listens on 127.0.0.1:8000",
                )
            },
            id="never deployed",
        ),
        pytest.param(
            unasked,
            dict.fromkeys(CONTAINERS, ("unknown", f"runs{SINCE}")),
            id="what was asked cannot be told",
        ),
    ],
)
def test_every_row(change: Callable[[Site], object], expected: Expected) -> None:
    site = healthy()
    change(site)
    rows = {(row.node, row.what): (row.state, row.runs) for row in site.rows()}
    as_asked = {(row.node, row.what): (row.state, row.runs) for row in healthy().rows()}
    gone = {key for key, (state, _) in expected.items() if not state}
    assert rows == {key: row for key, row in (as_asked | expected).items() if key not in gone}


def test_all_is_as_asked() -> None:
    assert [tuple(row.model_dump().values()) for row in healthy().rows()] == [
        ("head", "Ray", "as asked", "Ray in engine:1 (c0ffeec0ffee)", f"as asked{SINCE}"),
        ("head", "server", "as asked", "tiny in engine:1 (c0ffeec0ffee)", f"as asked{SINCE}"),
        ("worker1", "Ray", "as asked", "Ray in engine:1 (c0ffeec0ffee)", f"as asked{SINCE}"),
        ("head", "endpoint", "as asked", "tiny on port 8000", "answers ' jumps' in 0.50 s"),
    ]


def test_a_boot_is_no_part_of_what_is_compared() -> None:
    """A deploy after a reboot would start anew what runs, else."""
    digests = [[each.digest for each in specs] for specs in wanted("boot-1").values()]
    assert digests == [[each.digest for each in specs] for specs in wanted("boot-2").values()]


def test_what_docker_inspects() -> None:
    """Captured of docker 20.10: of what still runs, the end is in the year 1."""
    container = as_made("head", WANTED[0][1][0]).container
    told = {
        "State": {
            "Status": "running",
            "OOMKilled": False,
            "ExitCode": 0,
            "StartedAt": STARTED,
            "FinishedAt": "0001-01-01T00:00:00Z",
        },
        "Config": {"Image": "engine:1"},
    }
    assert parse_found(container, told) == Found(
        container=container, started=STARTED, image="engine:1"
    )


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        pytest.param("", "", id="it said nothing"),
        pytest.param("one\n\x1b[36mtwo\x1b[0m\n\n", "two", id="its last line"),
        pytest.param(
            "INFO\nRuntimeError: CUDA out of memory. Tried\nbye\n",
            "the model does not fit into the memory that is left: "
            "RuntimeError: CUDA out of memory. Tried",
            id="what we know",
        ),
    ],
)
def test_why_a_container_ended(log: str, cause: str) -> None:
    assert cause_of(log) == cause

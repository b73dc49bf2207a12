"""Preflight: each check as a table of states, and the error that names every blocked one."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks.checks import CHECKS
from tasks.converge import Run
from tasks.errors import (
    CommandFailed,
    CommandTimedOut,
    HostKeyRefused,
    LoginRefused,
    NodeUnreachable,
    PreflightFailed,
    SparkrailError,
)
from tasks.node_facts import (
    Address,
    Folder,
    Gpu,
    GpuHolder,
    Interface,
    NodeFacts,
    Port,
    Process,
    Rdma,
    parse_docker,
    parse_facts,
)
from tasks.preflight import Problem, preflight, preflight_failed, problems

DATA = Path(__file__).parent / "data"
GIB = 2**30
OURS = "b9b5e01d4f6d897faa6ca0f11b0edfd26b15f1f0867bd5c4a429dd637f4130ca"
FOREIGN = "aeab91d42265a999222fec651791ded3038d744a0c0ba659b401ac51c5e2ac0b"

Change = Callable[[NodeFacts], NodeFacts]


def cluster(**changes: Any) -> Cluster:
    return Cluster.model_validate(
        {
            "name": "lab",
            "head": {"name": "head", "address": "10.88.0.1", "fabric_address": "10.77.0.1"},
            "workers": [{"name": "worker1", "fabric_address": "10.77.0.2"}],
            "image": {"name": "engine:1"},
            "model": {"name": "tiny", "path": "/models/tiny"},
            "serve": {"tensor_parallel": 2},
            **changes,
        }
    )


def healthy(hostname: str, address: str) -> NodeFacts:
    """A captured node, with what a real one has beside it."""
    facts = parse_facts((DATA / "facts/lab-head.json").read_text())
    docker = parse_docker(
        "1.41",
        {**json.loads((DATA / "docker/info-20.10.json").read_text()), "Runtimes": {"nvidia": {}}},
        json.loads((DATA / "docker/image-20.10.json").read_text()),
        [],
    )
    image = docker.image and docker.image.model_copy(update={"size": 10 * GIB})
    disks = tuple(disk.model_copy(update={"free": 100 * GIB}) for disk in facts.disks)
    return facts.model_copy(
        update={
            "hostname": hostname,
            "interfaces": (interface(address),),
            "docker": docker.model_copy(update={"image": image}),
            "disks": disks,
            "model": Folder(path="/models/tiny", exists=True, files=9, bytes=4 * GIB),
        }
    )


def interface(address: str, **changes: Any) -> Interface:
    fields = {"name": "enp1s0f1np1", "state": "UP", "mtu": 9000, "speed": 200000}
    addresses = (Address(address=address, prefix=24),)
    return Interface.model_validate({**fields, "addresses": addresses} | changes)


def nodes(**changed: Change) -> dict[str, NodeFacts | SparkrailError]:
    facts = {"head": healthy("head", "10.77.0.1"), "worker1": healthy("worker1", "10.77.0.2")}
    return {name: changed.get(name, _same)(found) for name, found in facts.items()}


def _same(facts: NodeFacts) -> NodeFacts:
    return facts


def having(**changes: Any) -> Change:
    return lambda facts: facts.model_copy(update=changes)


def docker(**changes: Any) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        assert facts.docker
        return facts.model_copy(update={"docker": facts.docker.model_copy(update=changes)})

    return change


def image(**changes: Any) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        assert facts.docker
        assert facts.docker.image
        return docker(image=facts.docker.image.model_copy(update=changes))(facts)

    return change


def free(size: int, **changes: int) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        disks = tuple(disk.model_copy(update={"free": size, **changes}) for disk in facts.disks)
        return facts.model_copy(update={"disks": disks})

    return change


def both(*changes: Change) -> Change:
    def change(facts: NodeFacts) -> NodeFacts:
        for each in changes:
            facts = each(facts)
        return facts

    return change


def process(pid: int = 42, **changes: Any) -> Process:
    fields = {"pid": pid, "pgid": pid, "user": "joe", "command": "python3 -m x", "started": 1.0}
    return Process.model_validate({**fields, **changes})


def container(id: str, name: str, label: str = "", state: str = "running") -> dict[str, Any]:
    labels = {"sparkrail.cluster": label} if label else {}
    made = parse_facts((DATA / "facts/lab-head.json").read_text()).time - 3 * 3600
    fields = {"Id": id, "Names": [f"/{name}"], "State": state, "Created": int(made)}
    return {**fields, "Labels": labels}


def containers(*rows: Mapping[str, Any]) -> Change:
    info = json.loads((DATA / "docker/info-20.10.json").read_text())
    return docker(containers=parse_docker("1.41", info, None, rows).containers)


def row(
    check: str,
    facts: Mapping[str, NodeFacts | SparkrailError],
    node: str = "head",
    spec: Cluster | None = None,
    weights_bytes: int | None = None,
) -> Problem:
    found = problems(spec or cluster(), facts, weights_bytes)
    return next(row for row in found if (row.check, row.node) == (check, node))


def test_a_healthy_cluster_is_ready_everywhere() -> None:
    rows = problems(cluster(), nodes())
    assert [row for row in rows if row.verdict != "ready"] == []
    assert [row.check for row in rows if row.node == "head"] == ["reachable", *CHECKS]
    assert all(row.detail and not row.remedy for row in rows)


@pytest.mark.parametrize(
    ("error", "check", "detail", "remedy"),
    [
        pytest.param(
            NodeUnreachable("no SSH connection to x", node="worker1", remedy="Is it up?"),
            "reachable",
            "no SSH connection to x",
            "Is it up?",
            id="unreachable",
        ),
        pytest.param(
            NodeUnreachable("no SSH connection to y", node="head", remedy="Is it up?"),
            "reachable",
            "head: no SSH connection to y",
            "Is it up?",
            id="behind an unreachable head",
        ),
        pytest.param(
            CommandTimedOut("still running after 30 s: python3", node="worker1"),
            "reachable",
            "still running after 30 s: python3",
            "",
            id="frozen",
        ),
        pytest.param(
            HostKeyRefused("unknown host key", node="worker1", remedy="Trust it:\necho x"),
            "host key",
            "unknown host key",
            "Trust it:\necho x",
            id="host key",
        ),
        pytest.param(
            LoginRefused("accepts none of our keys", node="worker1", details="no", remedy="Put"),
            "login",
            "accepts none of our keys\nno",
            "Put",
            id="login",
        ),
        pytest.param(
            CommandFailed(
                "exit code 127: python3 -IS - '{}'",
                node="worker1",
                details="env: ‘python3’: No such file or directory",  # noqa: RUF001
            ),
            "python3",
            "there is no python3",
            "On worker1: sudo apt install python3-minimal",
            id="no python3",
        ),
        pytest.param(
            CommandFailed("exit code 1: python3 -IS -", node="worker1", details="KeyError: 'x'"),
            "facts",
            "exit code 1: python3 -IS -\nKeyError: 'x'",
            "",
            id="the script failed",
        ),
        pytest.param(None, "reachable", "", "", id="nothing"),
    ],
)
def test_a_node_without_facts_is_one_blocked_row(
    error: SparkrailError | None, check: str, detail: str, remedy: str
) -> None:
    facts = nodes()
    del facts["worker1"]
    if error:
        facts["worker1"] = error
    else:
        check, detail = "facts", "its facts were not gathered"
    rows = [row for row in problems(cluster(), facts) if row.node == "worker1"]
    assert rows == [
        Problem(node="worker1", check=check, verdict="blocked", detail=detail, remedy=remedy)
    ]


def test_without_the_head_workers_are_judged_by_themselves() -> None:
    facts = {**nodes(), "head": NodeUnreachable("no", node="head")}
    rows = problems(cluster(), facts)
    assert {row.verdict for row in rows if row.node == "worker1"} == {"ready"}


DOWN = interface("10.77.0.1", state="DOWN")
FABRIC = [
    pytest.param(
        "fabric address",
        having(interfaces=(interface("10.88.0.1", name="eth0"), interface("127.0.0.1", name="lo"))),
        "blocked",
        "no interface has 10.77.0.1; head has eth0 10.88.0.1/24",
        id="address on no interface",
    ),
    pytest.param(
        "fabric address",
        having(interfaces=(), interfaces_error="ip is not installed"),
        "blocked",
        "cannot tell which interface has 10.77.0.1: ip is not installed",
        id="no ip program",
    ),
    pytest.param(
        "fabric link",
        having(interfaces=(DOWN,)),
        "blocked",
        "enp1s0f1np1 is DOWN",
        id="link down",
    ),
    pytest.param(
        "fabric link",
        having(
            interfaces=(
                interface(
                    "10.77.0.1",
                    rdma=(Rdma(device="rocep1s0f1", port=1, state="DOWN", link_layer="Ethernet"),),
                ),
            )
        ),
        "slow",
        "enp1s0f1np1 UP, 200000 Mbit/s, rocep1s0f1 port 1 DOWN",
        id="RDMA port down",
    ),
    pytest.param(
        "fabric link",
        having(
            interfaces=(
                interface(
                    "10.77.0.1",
                    rdma=(Rdma(device="roce0", port=1, state="ACTIVE", link_layer="Ethernet"),),
                ),
            )
        ),
        "slow",
        "enp1s0f1np1 UP, 200000 Mbit/s, roce0 port 1 ACTIVE; no RoCE v2 GID for 10.77.0.1",
        id="no GID of the address",
    ),
    pytest.param(
        "fabric link",
        having(
            interfaces=(
                interface(
                    "10.77.0.1",
                    speed=None,
                    rdma=(Rdma(device="ib0", port=1, state="ACTIVE", link_layer="InfiniBand"),),
                ),
            )
        ),
        "ready",
        "enp1s0f1np1 UP, ib0 port 1 ACTIVE",
        id="InfiniBand",
    ),
]

DOCKER = [
    pytest.param(
        "docker",
        having(docker=None, docker_error="no answer", docker_socket="absent"),
        "blocked",
        "no answer",
        id="docker absent",
    ),
    pytest.param(
        "nvidia runtime",
        docker(runtimes=("runc",)),
        "blocked",
        "docker has no NVIDIA runtime, so that containers get no GPU",
        id="no NVIDIA runtime",
    ),
    pytest.param(
        "nvidia runtime",
        both(
            docker(runtimes=("runc",)),
            having(programs={"nvidia-container-runtime-hook": "/usr/bin/hook"}),
        ),
        "ready",
        "/usr/bin/hook",
        id="NVIDIA hook only",
    ),
    pytest.param(
        "image", docker(image=None), "blocked", "engine:1 is not on head", id="no image on the head"
    ),
    pytest.param(
        "image",
        image(architecture="arm64"),
        "blocked",
        "engine:1 is made for arm64, head is amd64",
        id="image of another architecture",
    ),
    pytest.param(
        "image",
        _same,
        "ready",
        "amd64, 10.0 GiB, its entrypoint vllm serve is not used",
        id="entrypoint is told",
    ),
    pytest.param(
        "containers",
        containers(container(FOREIGN, "sparkrail-lab-ray", state="exited")),
        "blocked",
        "sparkrail-lab-ray (aeab91d42265, exited, made 3 hours ago) is not ours",
        id="foreign container",
    ),
    pytest.param(
        "containers",
        containers(container(FOREIGN, "sparkrail-lab-ray", label="other")),
        "blocked",
        "sparkrail-lab-ray (aeab91d42265, running, made 3 hours ago) is not ours",
        id="container of another cluster",
    ),
    pytest.param(
        "containers",
        containers(container(OURS, "sparkrail-lab-ray", label="lab"), container(FOREIGN, "web")),
        "ready",
        "sparkrail-lab-ray running",
        id="our container",
    ),
]

MACHINE = [
    pytest.param(
        "programs",
        having(programs={"rsync": ""}),
        "blocked",
        "not on the PATH of root: rsync, ssh",
        id="rsync and ssh missing",
    ),
    pytest.param(
        "weights",
        having(model=Folder(path="/models/tiny", exists=False, files=0, bytes=0)),
        "blocked",
        "/models/tiny does not exist on head",
        id="no weights on the head",
    ),
    pytest.param(
        "weights",
        having(model=Folder(path="/models/tiny", exists=True, files=0, bytes=0)),
        "blocked",
        "/models/tiny is empty on head",
        id="empty weights folder",
    ),
    pytest.param(
        "disk",
        free(GIB // 2),
        "blocked",
        "0.5 GiB free at /var/lib/docker, 1.0 GiB for docker needed",
        id="head's disk full",
    ),
    pytest.param(
        "gpus",
        having(gpus=(), gpus_error="nvidia-smi is not installed"),
        "blocked",
        "nvidia-smi finds 0 GPUs, the spec says 1; nvidia-smi is not installed",
        id="no GPU",
    ),
    pytest.param(
        "gpu memory",
        having(gpu_holders=(GpuHolder(pid=42, name="python3", used_mib=11700, process=process()),)),
        "slow",
        "python3 holds 11700 MiB: pid 42 of joe (python3 -m x)",
        id="GPU memory held by a process",
    ),
    pytest.param(
        "gpu memory",
        having(gpu_holders=(GpuHolder(pid=7, name="[Not Found]"),)),
        "slow",
        "[Not Found] holds an unknown amount: pid 7",
        id="GPU memory held by an unknown process",
    ),
    pytest.param(
        "gpu memory",
        both(
            containers(container(OURS, "sparkrail-lab-serve", label="lab")),
            having(
                gpu_holders=(
                    GpuHolder(pid=42, name="vllm", used_mib=9, process=process(container=OURS)),
                )
            ),
        ),
        "ready",
        "held by 1 processes of ours",
        id="GPU memory held by us",
    ),
    pytest.param(
        "gpu memory",
        having(gpu_holders_error="nvidia-smi: exit code 9: no"),
        "slow",
        "cannot tell who holds it: nvidia-smi: exit code 9: no",
        id="GPU memory unknown",
    ),
    pytest.param(
        "memory", _same, "ready", "23.5 GiB, 21.5 GiB available, 18.4 GiB of it free", id="memory"
    ),
]


@pytest.mark.parametrize(("check", "change", "verdict", "detail"), [*FABRIC, *DOCKER, *MACHINE])
def test_check_on_the_head(check: str, change: Change, verdict: str, detail: str) -> None:
    found = row(check, nodes(head=change))
    assert (found.verdict, found.detail) == (verdict, detail)
    assert bool(found.remedy) == (verdict != "ready")


OTHER_GPU = Gpu(index=0, name="NVIDIA GB10", uuid="GPU-1", driver="570.1")
OTHER_IMAGE = image(layers=("sha256:other",))
NOTHING = Folder(path="/models/tiny", exists=False, files=0, bytes=0)


@pytest.mark.parametrize(
    ("check", "change", "verdict", "detail"),
    [
        pytest.param(
            "fabric subnet",
            having(
                interfaces=(
                    interface("10.77.0.2", addresses=(Address(address="10.77.0.2", prefix=30),)),
                )
            ),
            "blocked",
            "10.77.0.2 is in 10.77.0.0/30, head's 10.77.0.1 in 10.77.0.0/24",
            id="other subnet",
        ),
        pytest.param(
            "fabric mtu",
            having(interfaces=(interface("10.77.0.2", name="enP2p1s0f0np0", mtu=1500),)),
            "slow",
            "enP2p1s0f0np0 has 1500, head's enp1s0f1np1 has 9000",
            id="other MTU",
        ),
        pytest.param(
            "architecture",
            having(architecture="aarch64"),
            "blocked",
            "aarch64, but head is x86_64",
            id="other architecture",
        ),
        pytest.param(
            "image",
            having(architecture="aarch64"),
            "blocked",
            "engine:1 is made for amd64, worker1 is arm64",
            id="the head's image does not fit",
        ),
        pytest.param(
            "image", docker(image=None), "ready", "will be copied from the head", id="no image"
        ),
        pytest.param(
            "image",
            OTHER_IMAGE,
            "ready",
            "differs from the head's, will be copied",
            id="other image",
        ),
        pytest.param("weights", _same, "ready", "9 files, 4.0 GiB", id="weights as on the head"),
        pytest.param(
            "weights",
            having(model=NOTHING),
            "ready",
            "will be copied from head (4.0 GiB)",
            id="no weights",
        ),
        pytest.param(
            "disk",
            free(100 * GIB),
            "ready",
            "100.0 GiB free at /var/lib/docker, 1.0 GiB for docker needed; "
            "100.0 GiB free at /models, nothing needed",
            id="disk for nothing new",
        ),
        pytest.param(
            "disk",
            both(docker(image=None), free(20 * GIB)),
            "blocked",
            "20.0 GiB free at /var/lib/docker, 21.0 GiB for docker and the image needed",
            id="disk too small for the image",
        ),
        pytest.param(
            "disk",
            both(OTHER_IMAGE, free(20 * GIB)),
            "slow",
            "20.0 GiB free at /var/lib/docker, 21.0 GiB for docker and the image needed, "
            "less where layers are shared",
            id="disk perhaps too small for another image",
        ),
        pytest.param(
            "disk",
            both(docker(image=None), having(model=NOTHING), free(24 * GIB, device=1)),
            "blocked",
            "24.0 GiB free at /var/lib/docker, 21.0 GiB for docker and the image "
            "+ 4.0 GiB for the weights needed",
            id="one mount for image and weights",
        ),
        pytest.param(
            "driver",
            having(gpus=(OTHER_GPU,)),
            "slow",
            "570.1, but head has 580.95.05",
            id="other driver",
        ),
        pytest.param("clock", having(clock_offset=-61.0), "slow", "61 s behind head's", id="late"),
        pytest.param("clock", having(clock_offset=9.0), "slow", "9 s ahead of head's", id="ahead"),
    ],
)
def test_check_on_a_worker(check: str, change: Change, verdict: str, detail: str) -> None:
    found = row(check, nodes(worker1=change), "worker1")
    assert (found.verdict, found.detail) == (verdict, detail)
    assert bool(found.remedy) == (verdict != "ready")


def test_weights_that_the_worker_may_not_write() -> None:
    def unwritable(facts: NodeFacts) -> NodeFacts:
        disks = tuple(disk.model_copy(update={"writable": False}) for disk in facts.disks)
        return facts.model_copy(update={"disks": disks, "model": NOTHING})

    found = row("weights", nodes(worker1=unwritable), "worker1")
    assert (found.verdict, found.detail) == (
        "blocked",
        "root may not write to /models, but /models/tiny must be made or completed",
    )
    assert found.remedy == "On worker1: sudo install -d -o root /models/tiny"


def test_the_callers_size_of_the_weights_counts() -> None:
    found = row("disk", nodes(), "worker1", weights_bytes=200 * GIB)
    assert found.verdict == "blocked"
    assert "100.0 GiB free at /models, 196.0 GiB for the weights needed" in found.detail
    assert found.remedy.startswith("Free 96.0 GiB at /models on worker1")


def test_the_containerd_store_has_its_own_disk() -> None:
    def change(facts: NodeFacts) -> NodeFacts:
        disks = tuple(
            disk.model_copy(update={"nearest": disk.path, "free": 0})
            if disk.path == "/var/lib/containerd"
            else disk
            for disk in facts.disks
        )
        return docker(store="containerd")(facts.model_copy(update={"disks": disks}))

    found = row("disk", nodes(head=change))
    assert (found.verdict, found.detail) == (
        "blocked",
        "0.0 GiB free at /var/lib/containerd, 1.0 GiB for docker needed",
    )


def listening(port: int, owner: Process | None = None, uid: int = 0) -> Change:
    return having(ports=(Port(port=port, address="0.0.0.0", uid=uid, owner=owner),))


RAY = containers(container(OURS, "sparkrail-lab-ray", label="lab"))
FREE = "6379 free, 8000 free, 8265 free, 52365 free"


@pytest.mark.parametrize(
    ("change", "verdict", "detail", "remedy"),
    [
        pytest.param(listening(22, process()), "ready", FREE, "", id="other port"),
        pytest.param(
            listening(8000, process(unit="llm.service")),
            "blocked",
            "8000 (serve.port) is held by pid 42 of joe (python3 -m x) of llm.service",
            "On head: sudo systemctl stop llm.service; or choose another port in the spec.",
            id="a systemd unit",
        ),
        pytest.param(
            listening(8265, process()),
            "blocked",
            "8265 (Ray's dashboard) is held by pid 42 of joe (python3 -m x)",
            "On head: kill 42",
            id="a process",
        ),
        pytest.param(
            both(
                listening(6379, process(container=FOREIGN)),
                containers(container(FOREIGN, "redis")),
            ),
            "blocked",
            "6379 (ray.port) is held by pid 42 of joe (python3 -m x) in container redis",
            "On head: docker stop redis; or choose another port in the spec.",
            id="a foreign container",
        ),
        pytest.param(
            both(listening(6379, process(container=OURS)), RAY),
            "ready",
            "6379 ours, 8000 free, 8265 free, 52365 free",
            "",
            id="our container",
        ),
        pytest.param(
            both(listening(6379), RAY),
            "ready",
            "6379 ours, 8000 free, 8265 free, 52365 free",
            "",
            id="owner hidden, our container runs",
        ),
        pytest.param(
            both(listening(8000), RAY),
            "blocked",
            "8000 (serve.port) is held by a process of uid 0, which root may not look at",
            "On head: sudo ss -ltnp 'sport = :8000' tells whose it is.",
            id="owner hidden, our container for it is absent",
        ),
    ],
)
def test_ports(change: Change, verdict: str, detail: str, remedy: str) -> None:
    found = row("ports", nodes(head=change))
    assert (found.verdict, found.detail, found.remedy) == (verdict, detail, remedy)


def test_a_worker_needs_the_agents_port_only() -> None:
    assert row("ports", nodes(), "worker1").detail == "52365 free"


@pytest.mark.parametrize(
    ("socket", "remedy"),
    [
        ("absent", "Install docker on head, or start it: sudo systemctl enable --now docker"),
        ("denied", "Let root use it: sudo usermod -aG docker root"),
        ("open", "See `docker info` and `journalctl -u docker` on head."),
    ],
)
def test_remedy_for_docker(socket: str, remedy: str) -> None:
    change = having(docker=None, docker_error="no", docker_socket=socket)
    assert row("docker", nodes(head=change)).remedy == remedy


def test_what_cannot_be_told_is_no_row() -> None:
    change = having(docker=None, docker_error="no", interfaces=())
    rows = problems(cluster(), nodes(head=change))
    assert [row.check for row in rows if row.node == "head" and row.verdict == "blocked"] == [
        "docker",
        "fabric address",
    ]


def test_a_cluster_without_gpu_access() -> None:
    spec = cluster(image={"name": "engine:1", "gpu_access": "none"})
    change = both(docker(runtimes=()), having(gpus=(), gpu_holders_error="no"))
    rows = problems(spec, nodes(head=change, worker1=change))
    assert [row for row in rows if row.verdict != "ready"] == []
    assert row("gpus", nodes(), spec=spec).detail == "NVIDIA GB10 (image.gpu_access is none)"


def test_an_image_from_the_control_machine_may_be_absent() -> None:
    spec = cluster(image={"name": "engine:1", "source": "control"})
    found = row("image", nodes(head=docker(image=None)), spec=spec)
    assert (found.verdict, found.detail) == ("ready", "will be copied from the control machine")


def test_one_node_needs_no_copying() -> None:
    spec = cluster(workers=[], serve={"tensor_parallel": 1})
    facts: dict[str, NodeFacts | SparkrailError] = {"head": having(programs={})(_facts("head"))}
    assert "programs" not in [row.check for row in problems(spec, facts)]


def _facts(name: str) -> NodeFacts:
    found = nodes()[name]
    assert isinstance(found, NodeFacts)
    return found


def test_the_error_names_every_blocked_row_and_survives_pickling() -> None:
    facts = nodes(head=docker(image=None))
    facts["worker1"] = NodeUnreachable("no SSH connection", node="worker1", remedy="Is it up?")
    error = pickle.loads(pickle.dumps(preflight_failed(problems(cluster(), facts))))
    assert isinstance(error, PreflightFailed)
    assert str(error) == (
        f"preflight: blocked by 2 of {len(CHECKS) + 2} checks, on head, worker1\n"
        "head: image: engine:1 is not on head\n"
        "  On head: docker pull engine:1; or set image.source to control.\n"
        "worker1: reachable: no SSH connection\n"
        "  Is it up?\n"
        "Nothing was touched."
    )
    assert [row.verdict for row in error.problems].count("blocked") == 2
    assert len(error.problems) == len(CHECKS) + 2


RUN = Run(id="1", who="me")


def test_the_step_returns_all_rows() -> None:
    spec, facts = cluster(), nodes(worker1=having(clock_offset=9.0))
    outcome: Any = preflight.fn(spec, spec.head, RUN, facts)
    assert (outcome.step, outcome.node, outcome.status) == ("preflight", "head", "unchanged")
    assert outcome.detail == f"{len(outcome.data)} checks, slow: worker1: clock"
    assert {row.verdict for row in outcome.data} == {"ready", "slow"}


def test_the_step_refuses() -> None:
    spec = cluster()
    with pytest.raises(PreflightFailed, match="blocked by 1 of"):
        preflight.fn(spec, spec.head, RUN, nodes(head=docker(image=None)))

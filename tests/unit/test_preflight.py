"""Preflight: each check as a table of states, and the error that names every blocked one."""

import pickle
from typing import Any

import pytest

from tasks.checks import CHECKS
from tasks.converge import Run
from tasks.engine_verdicts import Verdict
from tasks.errors import (
    CommandFailed,
    CommandTimedOut,
    HostKeyRefused,
    LoginRefused,
    NodeUnreachable,
    PreflightFailed,
    SparkrailError,
)
from tasks.manifests import File, Manifest
from tasks.node_facts import Address, Gpu, GpuHolder, ModelFacts, NodeFacts, Port, Process, Rdma
from tasks.peers import Login
from tasks.preflight import Problem, preflight, preflight_failed, problems
from tests.unit.sites import (
    ACCEPTED,
    FOREIGN,
    GIB,
    OURS,
    PEERS,
    WEIGHTS,
    Change,
    both,
    cluster,
    container,
    containers,
    docker,
    free,
    having,
    image,
    interface,
    nodes,
    process,
    row,
    same,
)

# The only way of the weights that needs the head's own ssh.
BY_RSYNC = cluster(weights={"transport": "rsync"})


def test_a_healthy_cluster_is_ready_everywhere() -> None:
    rows = problems(BY_RSYNC, nodes(), ACCEPTED)
    assert [row for row in rows if row.verdict != "ready"] == []
    assert {row.check for row in rows} == {"reachable", *CHECKS} - {"own code"}
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
        same,
        "ready",
        "amd64, 10.0 GiB, its entrypoint vllm serve is not used",
        id="entrypoint is told",
    ),
    pytest.param(
        "container names",
        containers(container(FOREIGN, "sparkrail-lab-ray", state="exited")),
        "blocked",
        "sparkrail-lab-ray (aeab91d42265, exited, made 3 hours ago) is not ours",
        id="foreign container",
    ),
    pytest.param(
        "container names",
        containers(container(FOREIGN, "sparkrail-lab-ray", label="other")),
        "blocked",
        "sparkrail-lab-ray (aeab91d42265, running, made 3 hours ago) is not ours",
        id="container of another cluster",
    ),
    pytest.param(
        "container names",
        containers(container(OURS, "sparkrail-lab-ray", label="lab"), container(FOREIGN, "web")),
        "ready",
        "sparkrail-lab-ray running",
        id="our container",
    ),
]

NOTHING = Manifest(folder="does not exist")
MACHINE = [
    pytest.param(
        "programs",
        having(programs={"rsync": ""}),
        "blocked",
        "not on the PATH of root: ssh",
        id="ssh missing",
    ),
    pytest.param(
        "weights",
        having(weights=NOTHING),
        "blocked",
        "the model in /models/tiny is not complete: it does not exist",
        id="no weights on the head",
    ),
    pytest.param(
        "weights",
        having(weights=Manifest()),
        "blocked",
        "the model in /models/tiny is not complete: config.json is missing; there are no weights "
        "(*.safetensors); there is no tokenizer (tokenizer.json, tokenizer.model, ...)",
        id="empty weights folder",
    ),
    pytest.param(
        "weights",
        having(
            weights=WEIGHTS.model_copy(
                update={"faults": {"model.safetensors": "has 9 bytes, its header promises 12"}}
            )
        ),
        "blocked",
        "the model in /models/tiny is not complete: model.safetensors has 9 bytes, its header "
        "promises 12",
        id="truncated shard",
    ),
    pytest.param(
        "own code",
        having(model=ModelFacts(own_code=("config.json",), config={"model_type": "odd"})),
        "blocked",
        "config.json names code of the model's own (auto_map), which the engine may not run",
        id="auto_map without trust_remote_code",
    ),
    pytest.param(
        "parallel sizes",
        having(model=ModelFacts(config={"num_attention_heads": 7})),
        "blocked",
        "7 attention heads cannot be shared by 2 tensor-parallel ranks",
        id="heads that cannot be split",
    ),
    pytest.param(
        "parallel sizes", same, "ready", "4 attention heads over 2 ranks", id="heads that can"
    ),
    pytest.param("driver", same, "ready", "580.95.05, CUDA unknown", id="driver"),
    pytest.param(
        "driver",
        both(having(cuda="12.8"), image(cuda="13.0.1")),
        "slow",
        "580.95.05, CUDA 12.8, but engine:1 is made for CUDA 13.0.1",
        id="image for a newer CUDA",
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
        "memory", same, "ready", "120.0 GiB, 115.0 GiB available, 110.0 GiB of it free", id="memory"
    ),
]


@pytest.mark.parametrize(("check", "change", "verdict", "detail"), [*FABRIC, *DOCKER, *MACHINE])
def test_check_on_the_head(check: str, change: Change, verdict: str, detail: str) -> None:
    found = row(check, nodes(head=change))
    assert (found.verdict, found.detail) == (verdict, detail)
    assert bool(found.remedy) == (verdict != "ready")


def without(name: str) -> Manifest:
    return Manifest(files={path: file for path, file in WEIGHTS.files.items() if path != name})


OTHER_GPU = Gpu(index=0, name="NVIDIA GB10", uuid="GPU-1", driver="570.1")
OTHER_IMAGE = image(content="other")


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
            "differs from the head's, will be replaced by it",
            id="other image",
        ),
        pytest.param("weights", same, "ready", "3 files, 4.0 GiB", id="weights as on the head"),
        pytest.param(
            "weights",
            having(weights=NOTHING),
            "ready",
            "3 of 3 files will be copied from head (4.0 GiB): config.json, model.safetensors, "
            "tokenizer.json",
            id="no weights",
        ),
        pytest.param(
            "weights",
            having(weights=without("tokenizer.json")),
            "ready",
            "1 of 3 files will be copied from head (1.0 GiB): tokenizer.json",
            id="no tokenizer on the worker",
        ),
        pytest.param(
            "disk",
            both(
                free(2 * GIB),
                having(
                    weights=Manifest(
                        files={
                            **WEIGHTS.files,
                            "model.safetensors": File(size=GIB, sha256="old"),
                        }
                    )
                ),
            ),
            "ready",
            "2.0 GiB free at /var/lib/docker, 1.0 GiB for docker needed; "
            "2.0 GiB free at /models, 2.0 GiB for the weights needed",
            id="room for a file that grows, beside the old one",
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
            both(docker(image=None), having(weights=NOTHING), free(24 * GIB, device=1)),
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
        return facts.model_copy(update={"disks": disks, "weights": NOTHING})

    found = row("weights", nodes(worker1=unwritable), "worker1")
    assert (found.verdict, found.detail) == (
        "blocked",
        "root may not write to /models, but /models/tiny must be made or completed",
    )
    assert found.remedy == "On worker1: sudo install -d -o root /models/tiny"


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


PATHS = [
    pytest.param("fabric path", {}, "ready", "head 6379 open", "", id="an answer"),
    pytest.param(
        "fabric path",
        {"tcp": "refused"},
        "ready",
        "head 6379 reached, nobody listens yet",
        "",
        id="a refusal",
    ),
    pytest.param(
        "fabric path",
        {"tcp": "no answer"},
        "blocked",
        "10.77.0.1:6379 (head) from 10.77.0.2: no answer",
        "Does a firewall on head let the other nodes in? All TCP ports must be open between fabric "
        "addresses, such as: sudo ufw allow from 10.77.0.0/24",
        id="filtered",
    ),
    pytest.param(
        "fabric path",
        {"tcp": "No route to host"},
        "blocked",
        "10.77.0.1:6379 (head) from 10.77.0.2: No route to host",
        None,
        id="no route",
    ),
    pytest.param("fabric mtu", {}, "ready", "9000, proven to head", "", id="full size arrives"),
    pytest.param("fabric mtu", {"packets": {}}, "ready", "9000", "", id="cannot be told"),
    pytest.param(
        "fabric mtu",
        {"packets": {9000: "lost", 1500: "arrived"}},
        "blocked",
        "packets of 9000 bytes from enp1s0f1np1 do not arrive at head, those of 1500 do",
        "Something between them has a smaller MTU: raise it on the switch, or lower it on all "
        "nodes, lastingly: sudo ip link set enp1s0f1np1 mtu 1500",
        id="a switch swallows full size",
    ),
]


@pytest.mark.parametrize(("check", "changes", "verdict", "detail", "remedy"), PATHS)
def test_the_way_to_the_peers(
    check: str, changes: dict[str, Any], verdict: str, detail: str, remedy: str | None
) -> None:
    peer = PEERS["worker1"].model_copy(update=changes)
    found = row(check, nodes(worker1=having(peers=(peer,))), "worker1")
    assert (found.verdict, found.detail) == (verdict, detail)
    if remedy is not None:
        assert found.remedy == remedy


def test_a_peer_that_told_nothing_is_no_fault_of_the_way() -> None:
    facts = {**nodes(), "worker1": NodeUnreachable("no", node="worker1")}
    lost = PEERS["head"].model_copy(update={"tcp": "no answer", "packets": {}})
    facts["head"] = having(peers=(lost,))(_facts("head"))
    found = [row for row in problems(cluster(), facts) if row.verdict == "blocked"]
    assert [row.check for row in found] == ["reachable"]


def test_lost_packets_are_told_although_they_keep_us_from_the_node() -> None:
    facts = {**nodes(), "worker1": NodeUnreachable("no", node="worker1")}
    lost = PEERS["head"].model_copy(update={"packets": {9000: "lost", 1500: "arrived"}})
    facts["head"] = having(peers=(lost,))(_facts("head"))
    found = [row for row in problems(cluster(), facts) if row.verdict == "blocked"]
    assert [(row.node, row.check) for row in found] == [
        ("head", "fabric mtu"),
        ("worker1", "reachable"),
    ]


@pytest.mark.parametrize(
    ("login", "sends", "verdict", "detail", "remedy"),
    [
        pytest.param(Login(code=0), True, "ready", "head -> root@10.77.0.2", "", id="as wanted"),
        pytest.param(
            Login(code=255, said="Host key verification failed."),
            True,
            "blocked",
            "head -> root@10.77.0.2:22: head does not know its host key\n"
            "Host key verification failed.",
            "Trust it, on head, as root:\n"
            "ssh-keyscan -p 22 10.77.0.2 >> ~/.ssh/known_hosts\n"
            "and compare it with /etc/ssh/ssh_host_*_key.pub on worker1.",
            id="unknown host key",
        ),
        pytest.param(
            Login(code=255, said="root@10.77.0.2: Permission denied (publickey)."),
            False,
            "slow",
            "head -> root@10.77.0.2:22: worker1 accepts none of head's keys\n"
            "root@10.77.0.2: Permission denied (publickey).; nothing is to be sent just now",
            "Let it in, on head, as root:\nssh-copy-id -p 22 root@10.77.0.2\n"
            "It needs a key without a passphrase there (ssh-keygen makes one).",
            id="no key, and nothing to send",
        ),
        pytest.param(
            Login(code=0, printed=6, first_line="hello"),
            True,
            "blocked",
            "the login of root@10.77.0.2 prints 6 bytes unasked, which breaks rsync: hello",
            "On worker1, let ~/.bashrc and its like print only in interactive shells: "
            "[ -t 1 ] || return",
            id="a login that prints",
        ),
    ],
)
def test_the_heads_ssh_to_a_worker(
    login: Login, sends: bool, verdict: str, detail: str, remedy: str
) -> None:
    peer = PEERS["head"].model_copy(update={"login": login})
    change = having(weights=without("tokenizer.json")) if sends else same
    told = nodes(head=having(peers=(peer,)), worker1=change)
    found = row("head's ssh", told, "worker1", BY_RSYNC)
    assert (found.verdict, found.detail, found.remedy) == (verdict, detail, remedy)


def test_streams_need_no_ssh_of_the_head() -> None:
    peer = PEERS["head"].model_copy(update={"login": Login(code=255, said="no")})
    found = problems(cluster(), nodes(head=having(peers=(peer,))), ACCEPTED)
    assert "head's ssh" not in {each.check for each in found}


@pytest.mark.parametrize(
    ("check", "engine", "verdict", "detail"),
    [
        pytest.param("engine", ACCEPTED, "ready", "vllm 0.32.0, ray 2.60.0", id="versions"),
        pytest.param(
            "engine", Verdict(missing=("ray",)), "blocked", "engine:1 has no ray", id="no Ray"
        ),
        pytest.param(
            "engine",
            Verdict(missing=("python3", "vllm", "ray")),
            "blocked",
            "engine:1 has no python3 and no vllm and no ray",
            id="no engine at all",
        ),
        pytest.param(
            "arguments", ACCEPTED, "ready", "accepted by vLLM's parser (asked)", id="accepted"
        ),
        pytest.param(
            "arguments",
            Verdict(refused="unrecognized arguments: --x"),
            "blocked",
            "vllm serve refuses its arguments: unrecognized arguments: --x",
            id="unknown flag",
        ),
        pytest.param(
            "arguments",
            Verdict(unparsed="RuntimeError: no GPU"),
            "slow",
            "vLLM's parser could not be asked: RuntimeError: no GPU",
            id="a parser that cannot be asked",
        ),
    ],
)
def test_the_engines_verdict(check: str, engine: Verdict, verdict: str, detail: str) -> None:
    found = row(check, nodes(), engine=engine)
    assert (found.verdict, found.detail) == (verdict, detail)
    assert bool(found.remedy) == (verdict != "ready")


def test_trusted_code() -> None:
    spec = cluster(model={"name": "tiny", "path": "/models/tiny", "trust_remote_code": True})
    change = having(model=ModelFacts(own_code=("config.json",)))
    found = row("own code", nodes(head=change), spec=spec)
    assert (found.verdict, found.detail) == (
        "ready",
        "trusted: config.json names code in the model's folder",
    )


def test_an_object_store_that_exceeds_shared_memory() -> None:
    spec = cluster(image={"name": "engine:1", "shm_mib": 64}, ray={"object_store_mib": 200})
    found = row("shared memory", nodes(), spec=spec)
    assert (found.verdict, found.detail, found.remedy) == (
        "blocked",
        "ray.object_store_mib is 200, but containers have 64 MiB of shared memory",
        "Set image.shm_mib to 200 or more.",
    )


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
    alone = having(programs={}, peers=())(_facts("head"))
    facts: dict[str, NodeFacts | SparkrailError] = {"head": alone}
    assert "programs" not in [row.check for row in problems(spec, facts)]


def _facts(name: str) -> NodeFacts:
    found = nodes()[name]
    assert isinstance(found, NodeFacts)
    return found


def test_the_error_names_every_blocked_row_and_survives_pickling() -> None:
    facts = nodes(head=docker(image=None))
    facts["worker1"] = NodeUnreachable("no SSH connection", node="worker1", remedy="Is it up?")
    rows = problems(cluster(), facts)
    count = len(rows)
    error = pickle.loads(pickle.dumps(preflight_failed(rows)))
    assert isinstance(error, PreflightFailed)
    assert str(error) == (
        f"preflight: blocked by 2 of {count} checks, on head, worker1\n"
        "head: image: engine:1 is not on head\n"
        "  On head: docker pull engine:1; or set image.source to control.\n"
        "worker1: reachable: no SSH connection\n"
        "  Is it up?\n"
        "Nothing was touched."
    )
    assert [row.verdict for row in error.problems].count("blocked") == 2
    assert len(error.problems) == count


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

"""Facts: the relayed script on made-up /proc and /sys trees and stub programs, and the parsers."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster, Node
from tasks import facts as reading
from tasks.docker_facts import parse_docker, parse_image
from tasks.errors import CommandFailed
from tasks.facts import parse_facts, summary
from tasks.node_facts import NodeFacts
from tasks.relayed import facts as relay
from tasks.topology import Fabric

DATA = Path(__file__).parent / "data"
SCRIPT = Path(relay.__file__)
CONTAINER = "b9b5e01d4f6d897faa6ca0f11b0edfd26b15f1f0867bd5c4a429dd637f4130ca"
GPU = "GPU-96e89a29-8e0a-9f46-9b9a-e458d6afae9f"
HEAD = (DATA / "facts" / "lab-head.json").read_text()


def captured(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def tree(root: Path, files: Mapping[str, str]) -> str:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return str(root)


def relayed(path: Path, /, **wanted: Any) -> NodeFacts:
    """The script as a node runs it, with nothing but these programs on its PATH."""
    path.mkdir(exist_ok=True)
    said = subprocess.run(
        [sys.executable, "-IS", "-", json.dumps({"model": "/absent", **wanted})],
        input=SCRIPT.read_bytes(),
        env={"PATH": str(path)},
        capture_output=True,
        check=True,
    )
    return parse_facts(said.stdout.decode())


def stub(folder: Path, name: str, script: str) -> Path:
    """A program that stands in for the real one: a node without GPU has no nvidia-smi."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return folder


def says(text: str, code: int = 0) -> str:
    return f"printf '%s\\n' {shlex.quote(text)}; exit {code}"


# --- processes ---------------------------------------------------------------------------------

STAT = "{pid} (a) name) {state} 1 {pgid} 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 12300 0 0\n"


def proc(root: Path, pid: int, *, state: str = "S", **files: str) -> None:
    stat = STAT.format(pid=pid, state=state, pgid=pid)
    tree(root / str(pid), {"stat": stat, "cmdline": "python3\0-m\0x\0", **files})


@pytest.mark.parametrize(
    ("cgroup", "container", "unit"),
    [
        pytest.param(f"12:pids:/docker/{CONTAINER}\n", CONTAINER, "", id="cgroup v1"),
        pytest.param(f"0::/system.slice/docker-{CONTAINER}.scope\n", CONTAINER, "", id="cgroup v2"),
        pytest.param(
            f"9:cpu:/docker/{'a' * 64}/docker/{CONTAINER}\n", CONTAINER, "", id="docker in docker"
        ),
        pytest.param("0::/system.slice/llm.service\n", "", "llm.service", id="systemd unit"),
        pytest.param(
            "0::/user.slice/user-1000.slice/session-3.scope\n", "", "", id="login session"
        ),
        pytest.param("", "", "", id="unreadable"),
    ],
)
def test_owner_of_a_process(tmp_path: Path, cgroup: str, container: str, unit: str) -> None:
    proc(tmp_path, 42, cgroup=cgroup)
    tree(tmp_path, {"stat": "cpu 1\nbtime 1700000000\n"})
    found = relay.process(str(tmp_path), 42)
    assert found is not None
    assert (found["container"], found["unit"]) == (container, unit)
    assert (found["pgid"], found["command"]) == (42, "python3 -m x")
    assert found["started"] == 1700000123.0


@pytest.mark.parametrize("state", ["Z", "X"])
def test_an_ended_process_is_none(tmp_path: Path, state: str) -> None:
    proc(tmp_path, 42, state=state)
    assert relay.process(str(tmp_path), 42) is None
    assert relay.process(str(tmp_path), 43) is None


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 501 1
   1: 01004D0A:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 502 1
   2: 01004D0A:0016 02004D0A:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 503 1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A - - - 0 0 504
"""


def test_ports_and_their_owners(tmp_path: Path) -> None:
    tree(tmp_path, {"net/tcp": TCP, "net/tcp6": TCP6})
    proc(tmp_path, 42, cgroup=f"0::/system.slice/docker-{CONTAINER}.scope")
    (tmp_path / "42/fd").mkdir()
    (tmp_path / "42/fd/3").symlink_to("socket:[501]")
    found = relay.ports(str(tmp_path))
    assert [(port["address"], port["port"], port["uid"]) for port in found] == [
        ("127.0.0.1", 8080, 1000),
        ("10.77.0.1", 6379, 0),
        ("::1", 80, 0),
    ]
    assert found[0]["owner"]["container"] == CONTAINER
    assert [port["owner"] for port in found[1:]] == [None, None]


def test_leftovers_are_those_of_other_groups(tmp_path: Path) -> None:
    proc(tmp_path, 42, environ="HOME=/\0SPARKRAIL_RUN=lab/1\0")
    proc(tmp_path, 43, environ="HOME=/\0SPARKRAIL_RUN=lab/2\0")
    proc(tmp_path, 44, environ="XSPARKRAIL_RUN=lab/3\0")
    proc(tmp_path, 45, state="Z", environ="SPARKRAIL_RUN=lab/4\0")
    found = [(left["pid"], left["run"]) for left in relay.leftovers(str(tmp_path), own_group=43)]
    assert found == [(42, "lab/1")]


def test_the_real_proc(tmp_path: Path) -> None:
    environment = {**os.environ, "SPARKRAIL_RUN": "lab/dead"}
    left = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            facts = relayed(tmp_path / "bin")
    finally:
        left.kill()
        left.wait()
    listener = next(found for found in facts.ports if found.port == port)
    assert listener.owner is not None
    assert listener.owner.pid == os.getpid()
    runs = {process.pid: (process.run, process.command) for process in facts.leftovers}
    assert runs[left.pid] == ("lab/dead", "sleep 600")
    assert facts.memory.total >= facts.memory.available > 0
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# --- GPUs --------------------------------------------------------------------------------------


def nvidia_smi(gpus: str, holders: str = "exit 0") -> str:
    return f'case "$*" in *compute-apps*) {holders};; *) {gpus};; esac'


@pytest.mark.parametrize(
    ("row", "memory", "free"),
    [
        pytest.param(f"0, NVIDIA GB10, {GPU}, 580.95.05, [N/A], [N/A]", None, None, id="GB10"),
        pytest.param(
            f"0, NVIDIA GB10, {GPU}, 580.95.05, Not Supported, Not Supported",
            None,
            None,
            id="older GB10",
        ),
        pytest.param(
            f"0, NVIDIA H200, {GPU}, 580.95.05, 143771, 143000", 143771, 143000, id="H200"
        ),
    ],
)
def test_gpus(tmp_path: Path, row: str, memory: int | None, free: int | None) -> None:
    facts = relayed(stub(tmp_path / "bin", "nvidia-smi", nvidia_smi(says(row))))
    assert [(gpu.uuid, gpu.driver, gpu.memory_mib, gpu.free_mib) for gpu in facts.gpus] == [
        (GPU, "580.95.05", memory, free)
    ]
    assert facts.gpus_error == ""


def test_a_driver_that_refuses_to_tell_the_memory(tmp_path: Path) -> None:
    script = (
        f'case "$*" in *compute-apps*) ;; *memory.total*) {says("Not Supported", 6)};; '
        f"*) {says(f'0, NVIDIA GB10, {GPU}, 580.95.05')};; esac"
    )
    facts = relayed(stub(tmp_path / "bin", "nvidia-smi", script))
    assert [gpu.name for gpu in facts.gpus] == ["NVIDIA GB10"]
    assert facts.gpus_error == ""


@pytest.mark.parametrize(
    ("script", "error"),
    [
        pytest.param(None, "nvidia-smi is not installed", id="absent"),
        pytest.param(
            says("NVIDIA-SMI has failed because it couldn't communicate with the driver.", 9),
            "nvidia-smi: exit code 9: NVIDIA-SMI has failed because it couldn't communicate with "
            "the driver.",
            id="no driver",
        ),
        pytest.param("exec /bin/sleep 60", "nvidia-smi gave no answer within 2 s", id="hangs"),
    ],
)
def test_gpus_that_cannot_be_asked(tmp_path: Path, script: str | None, error: str) -> None:
    programs = tmp_path / "bin"
    if script:
        stub(programs, "nvidia-smi", script)
    facts = relayed(programs, timeout=2)
    assert (facts.gpus, facts.gpu_holders) == ((), ())
    assert (facts.gpus_error, facts.gpu_holders_error) == (error, error)


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("| NVIDIA-SMI 580.95.05  Driver Version: 580.95.05  CUDA Version: 13.0     |", "13.0"),
        ("| NVIDIA-SMI 590.44  KMD Version: 590.44  CUDA UMD Version: 13.1   |", "13.1"),
        ("No devices were found", ""),
    ],
)
def test_the_newest_cuda_that_the_driver_serves(tmp_path: Path, line: str, cuda: str) -> None:
    script = f'case "$*" in "") {says(line)};; esac'
    assert relayed(stub(tmp_path / "bin", "nvidia-smi", script)).cuda == cuda


@pytest.mark.parametrize(
    ("row", "holder"),
    [
        pytest.param("42, VLLM::Worker_TP0, 95245", (42, "VLLM::Worker_TP0", 95245), id="plain"),
        pytest.param("42, a, b, c, 7", (42, "a, b, c", 7), id="commas in its name"),
        pytest.param("42, python3, [N/A]", (42, "python3", None), id="memory unknown"),
        pytest.param("43, [Not Found], 12", (43, "[Not Found]", 12), id="other PID namespace"),
        pytest.param("44, python3, 12", None, id="ended, not yet reaped"),
        pytest.param("No running processes found", None, id="no row"),
    ],
)
def test_gpu_holders(tmp_path: Path, row: str, holder: tuple[int, str, int | None] | None) -> None:
    root = tmp_path / "proc"
    proc(root, 42)
    proc(root, 44, state="Z")
    programs = stub(tmp_path / "bin", "nvidia-smi", nvidia_smi("exit 0", says(row)))
    facts = relayed(programs, proc=str(root))
    found = [(held.pid, held.name, held.used_mib) for held in facts.gpu_holders]
    assert found == ([holder] if holder else [])
    assert facts.gpus_error == "nvidia-smi lists no GPU"


# --- network -----------------------------------------------------------------------------------


def rdma_device(name: str, interface: str, **gids: str) -> dict[str, str]:
    """A RoCE device: gid0="RoCE v2 <gid>" and so on."""
    port = f"class/infiniband/{name}/ports/1"
    files = {
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/link_layer": "Ethernet\n",
        f"{port}/rate": "200 Gb/sec (4X HDR)\n",
        f"class/infiniband/{name}/device/net/{interface}/mtu": "9000\n",
    }
    for key, value in gids.items():
        index = key.removeprefix("gid")
        kind, _, gid = value.rpartition(" ")
        files |= {
            f"{port}/gids/{index}": f"{gid}\n",
            f"{port}/gid_attrs/types/{index}": f"{kind}\n",
            f"{port}/gid_attrs/ndevs/{index}": f"{interface}\n",
        }
    return files


def test_interfaces_with_rdma(tmp_path: Path) -> None:
    mapped = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
    sys_root = tree(
        tmp_path / "sys",
        {
            "class/net/enp1s0f1np1/speed": "200000\n",
            "class/net/enP7s7/speed": "-1\n",
            **rdma_device(
                "rocep1s0f1",
                "enp1s0f1np1",
                gid0="IB/RoCE v1 fe80:0000:0000:0000:0000:0000:0000:0001",
                gid1="RoCE v2 fe80:0000:0000:0000:0000:0000:0000:0001",
                gid2=f"IB/RoCE v1 {mapped}",
                gid3=f"RoCE v2 {mapped}",
            ),
            **rdma_device("roceP2p1s0f1", "enP2p1s0f1np1"),
        },
    )
    programs = stub(tmp_path / "bin", "ip", f"/bin/cat {DATA / 'ip/addr-6.1.0.json'}")
    facts = relayed(programs, sys=sys_root)
    assert [(found.name, found.state, found.mtu, found.speed) for found in facts.interfaces] == [
        ("lo", "UNKNOWN", 65536, None),
        ("enP7s7", "UP", 1500, None),
        ("enp1s0f1np1", "UP", 9000, 200000),
    ]
    fabric = facts.interface_of("10.77.0.1")
    assert fabric is not None
    assert fabric.network_of("10.77.0.1") == "10.77.0.0/24"
    assert facts.rdma_devices == ("roceP2p1s0f1", "rocep1s0f1")
    assert [(port.device, port.state, port.roce_v2) for port in fabric.rdma] == [
        ("rocep1s0f1", "ACTIVE", {"10.77.0.1": 3})
    ]
    assert facts.fabric("10.77.0.1") == Fabric(interface="enp1s0f1np1", rdma=("rocep1s0f1:1",))
    assert facts.interface_of("10.77.0.9") is None
    assert facts.fabric("10.77.0.9") is None


def test_infiniband_port_without_gid_owners(tmp_path: Path) -> None:
    sys_root = tree(tmp_path, rdma_device("mlx5_0", "ib0"))
    assert [port["interfaces"] for port in relay.rdma_ports(sys_root)] == [["ib0"]]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        pytest.param(None, "ip is not installed", id="absent"),
        pytest.param(says('Option "-j" is unknown', 255), "ip: exit code 255: ", id="too old"),
        pytest.param(says("1: lo: mtu"), "ip: no JSON: 1: lo: mtu", id="no JSON"),
    ],
)
def test_interfaces_that_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, error: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    if script:
        stub(programs, "ip", script)
    monkeypatch.setattr(relay, "PATH", str(programs))
    found, said = relay.interfaces("/absent", relay.Asked("ip", "-j", "addr", timeout=10))
    assert found == []
    assert said.startswith(error)


# --- machine -----------------------------------------------------------------------------------


def test_disks_of_paths_that_do_not_exist_yet(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    wanted = str(tmp_path / "models/org/name")
    facts = relayed(tmp_path / "bin", paths=[wanted, str(tmp_path), "/proc"])
    disk = facts.disk_of(wanted)
    assert disk is not None
    assert disk.nearest == str(tmp_path / "models")
    assert disk.writable
    assert disk.total > disk.free > 0
    assert disk.device == facts.disks[1].device != facts.disks[2].device
    assert facts.disk_of("/elsewhere") is None


@pytest.mark.parametrize(
    ("files", "config", "own_code"),
    [
        pytest.param({}, {}, (), id="no folder"),
        pytest.param({"config.json": "no JSON"}, {}, (), id="unreadable"),
        pytest.param({"config.json": "[1]"}, {}, (), id="of another form"),
        pytest.param(
            {"config.json": '{"model_type": "llama", "other": 1}'},
            {"model_type": "llama"},
            (),
            id="what is asked for",
        ),
        pytest.param(
            {"config.json": '{"model_type": "vl", "text_config": {"num_hidden_layers": 3}}'},
            {"model_type": "vl", "num_hidden_layers": 3},
            (),
            id="the language part of a model of several",
        ),
        pytest.param(
            {
                "config.json": '{"auto_map": {"AutoConfig": "c.C"}}',
                "tokenizer_config.json": '{"auto_map": {}}',
            },
            {},
            ("config.json", "tokenizer_config.json"),
            id="code of its own",
        ),
    ],
)
def test_what_a_models_configs_say(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], own_code: tuple[str, ...]
) -> None:
    tree(tmp_path / "model", files)
    keys = ["model_type", "num_hidden_layers"]
    found = relayed(tmp_path / "bin", model=str(tmp_path / "model"), config=keys).model
    assert (found.config, found.own_code) == (config, own_code)


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        pytest.param({}, True, id="systemd's default"),
        pytest.param({"systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True, id="a comment"),
        pytest.param({"systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, False, id="switched off"),
        pytest.param(
            {
                "systemd/logind.conf": "RemoveIPC=no",
                "systemd/logind.conf.d/50-own.conf": "RemoveIPC = yes",
            },
            True,
            id="a drop-in has the last word",
        ),
    ],
)
def test_whether_logind_removes_ipc(tmp_path: Path, files: dict[str, str], removes: bool) -> None:
    etc = tree(tmp_path / "etc", files)
    assert relayed(tmp_path / "bin", etc=etc).removes_ipc is removes


def test_programs_on_the_path(tmp_path: Path) -> None:
    programs = stub(tmp_path / "bin", "rsync", "exit 0")
    found = relayed(programs, programs=["rsync", "ssh"]).programs
    assert found == {"rsync": str(programs / "rsync"), "ssh": ""}


# --- parsers -----------------------------------------------------------------------------------


def test_captured_facts() -> None:
    facts = parse_facts(HEAD)
    assert (facts.hostname, facts.user, facts.home) == ("head", "root", "/root")
    assert facts.fabric("10.77.0.1") == Fabric(interface="enp1s0f1np1")
    assert [gpu.name for gpu in facts.gpus] == ["NVIDIA GB10"]


def test_captured_facts_of_a_node_without_ip_and_docker() -> None:
    facts = parse_facts((DATA / "facts" / "h200.json").read_text())
    assert [(gpu.name, gpu.driver, gpu.memory_mib) for gpu in facts.gpus] == [
        ("NVIDIA H200", "580.159.04", 143771)
    ]
    assert (facts.interfaces_error, facts.docker_socket) == ("ip is not installed", "absent")


@pytest.mark.parametrize("text", ["", "Killed", '{"hostname": "head"}'])
def test_other_text_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        parse_facts(text)
    assert str(caught.value).startswith(
        f"the facts script printed something else than facts\n{text}"
    )


def test_captured_docker() -> None:
    docker = parse_docker(
        "1.41",
        captured("docker/info-20.10.json"),
        captured("docker/image-20.10.json"),
        captured("docker/containers-20.10.json"),
    )
    assert (docker.version, docker.api_version) == ("20.10.24+dfsg1", "1.41")
    assert (docker.store, docker.storage_driver) == ("classic", "overlay2")
    assert docker.root == "/var/lib/docker"
    assert "nvidia" not in docker.runtimes
    assert docker.image is not None
    assert docker.image.entrypoint == ("vllm", "serve")
    assert docker.image.architecture == "amd64"
    assert len(docker.image.layers) == 1
    assert docker.container(CONTAINER) == docker.containers[0]
    assert docker.containers[0].name == "sparkrail-lab-facts-serve"
    assert docker.containers[0].labels == {"sparkrail.cluster": "lab-facts"}
    assert docker.container("") is None


def test_containerd_store_and_half_removed_container() -> None:
    info = captured("docker/info-20.10.json")
    info |= {"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    rows = [{"Id": CONTAINER, "Names": None, "State": "removing"}]
    docker = parse_docker("1.44", info, None, rows)
    assert (docker.store, docker.image, docker.containers) == ("containerd", None, ())


def test_image_without_entrypoint() -> None:
    image = captured("docker/image-20.10.json")
    image["Config"]["Entrypoint"] = None
    image["Config"]["Env"] = ["PATH=/bin", "CUDA_VERSION=13.0.1"]
    found = parse_image(image)
    assert (found.entrypoint, found.cuda) == ((), "13.0.1")


def test_summary(cluster: Cluster) -> None:
    facts = parse_facts(HEAD)
    assert summary(cluster.head, facts) == "GB10 x1, 24 GiB, enp1s0f1np1"
    other = Node(name="other", fabric_address="10.77.0.9")
    bare = facts.model_copy(update={"gpus": ()})
    assert summary(other, bare) == "no GPU, 24 GiB, 10.77.0.9 on no interface"


def test_what_the_script_is_asked_for(cluster: Cluster) -> None:
    wanted = json.loads(reading.arguments(cluster, "/data/docker"))
    assert wanted["paths"] == [
        "/var/lib/docker",
        "/var/lib/containerd",
        "/models/tiny",
        "/data/docker",
    ]
    assert wanted["model"] == "/models/tiny"
    assert "num_attention_heads" in wanted["config"]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.model_validate(
        {
            "name": "lab",
            "head": {"name": "head", "address": "10.88.0.1", "fabric_address": "10.77.0.1"},
            "workers": [{"name": "worker1", "fabric_address": "10.77.0.2"}],
            "image": {"name": "engine:1"},
            "model": {"name": "tiny", "path": "/models/tiny"},
            "serve": {"tensor_parallel": 2},
        }
    )

"""The lab itself, on the real thing: what it promises to tests, to the demo and to its host."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import network, nvidia_smi, spec
from tests.lab.base import mirror
from tests.lab.errors import LabError
from tests.lab.layout import REPOSITORY, Lab, Node, Shape
from tests.lab.processes import in_namespaces, recall, started

LAB = Lab("lab-selftest")
HEAD, WORKER = Node(0), Node(1)


def lab(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it; the lab's name follows the action."""
    action, *rest = arguments
    return subprocess.run(
        [sys.executable, "-m", "tests.lab", action, f"--name={LAB.name}", *rest],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def lab_ok(*arguments: str) -> str:
    done = lab(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def on(where: str, *command: str) -> str:
    return lab_ok("exec", where, "--", *command).strip()


def states() -> dict[str, dict[str, object]]:
    return {node["name"]: node for node in json.loads(lab_ok("status", "--json"))["nodes"]}


def traces() -> list[str]:
    """Everything on this machine that carries the lab's name."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    loops = [file.read_text() for file in Path("/sys/block").glob("loop*/loop/backing_file")]
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{LAB.cgroup}")]
    files = [LAB.folder, LAB.spec, *network.namespace_files(LAB)]
    found = [str(file) for file in files if file.exists()]
    return [*found, *groups, *(line for line in [*mounts, *loops] if LAB.name in line)]


def links() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    lab_ok("down")
    before = links()
    lab_ok("up", "--no-engine")
    assert links() == before, "the lab's links must not be seen by the host"
    yield
    inodes = network.inodes(LAB)
    lab_ok("down")
    assert traces() == []
    assert in_namespaces("net", inodes) == set()
    assert links() == before


@pytest.fixture
def healthy(running: None) -> Iterator[None]:  # noqa: ARG001
    yield
    lab_ok("up", "--no-engine")


@pytest.fixture
def ssh(running: None, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:  # noqa: ARG001
    """OpenSSH with strict host keys, by the proxy command that the cluster spec names."""
    config = tmp_path / "config"
    config.write_text(
        f"""
        Host *
            UserKnownHostsFile {LAB.known_hosts}
            GlobalKnownHostsFile /dev/null
            StrictHostKeyChecking yes
            IdentityFile {LAB.key_file}
            IdentitiesOnly yes
            BatchMode yes
            ConnectTimeout 3
        Host 10.88.0.1
            ProxyCommand {spec.proxy_command(LAB)}
        Host 10.77.0.*
            ProxyCommand ssh -F {config} -W %h:%p root@10.88.0.1
        """
    )

    # With nohup they would inherit that it is ignored: ssh ends its proxy commands by it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def run(target: str, command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        argv = ["ssh", "-F", str(config), target, command]
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=30, check=False
        )

    return run


Ssh = Callable[..., subprocess.CompletedProcess[str]]
lab_test = pytest.mark.lab


def test_names_of_labs() -> None:
    for name in ("lab", "lab-a", "lab-a-b2"):
        assert Lab(name).name == name
    for name in ("cluster", "lab_a", "lab-", "lab-A", "../lab"):
        with pytest.raises(LabError, match="allowed are lab and lab-"):
            Lab(name)


def test_interfaces_differ_between_nodes() -> None:
    assert HEAD.fabric_interface != WORKER.fabric_interface


def test_spec_spreads_over_every_node() -> None:
    for workers in range(5):
        serve = spec.document(LAB, Shape(workers=workers))["serve"]
        assert serve["tensor_parallel"] * serve["pipeline_parallel"] == workers + 1


def test_mirror_is_read_from_apt() -> None:
    found = mirror()
    assert found is None or found.startswith("http")


def test_nvidia_smi_prints_like_gb10(capsys: pytest.CaptureFixture[str]) -> None:
    fields = "index,name,memory.total,memory.used,memory.free"
    nvidia_smi.main([f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    assert capsys.readouterr().out == "0, NVIDIA GB10, [N/A], [N/A], [N/A]\n"
    nvidia_smi.main(["--query-gpu=index,name,memory.total,memory.free", "--format=csv"])
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading == "index, name, memory.total [MiB], memory.free [MiB]"
    nvidia_smi.main([])
    assert "Not Supported" in capsys.readouterr().out


@lab_test
@pytest.mark.usefixtures("running")
def test_exec_passes_streams_and_exit_code() -> None:
    done = lab("exec", "head", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 7)
    assert lab("exec", "worker9", "--", "true").returncode == 1


@lab_test
@pytest.mark.usefixtures("running")
def test_each_node_is_a_machine_of_its_own() -> None:
    assert [on(name, "hostname") for name in ("head", "worker1")] == ["head", "worker1"]
    assert on("head", "cat", "/proc/1/cmdline").startswith("init\0")
    assert on("head", "ls", "/sys/class/net").split() == ["enP7s7", "enp1s0f1np1", "lo"]
    assert on("worker1", "ls", "/sys/class/net").split() == ["enP2p1s0f0np0", "lo"]
    assert on("head", "docker", "info", "--format={{.Driver}} {{.Name}}") == "overlay2 head"


@lab_test
def test_ssh_goes_the_way_of_the_spec(ssh: Ssh) -> None:
    assert ssh("root@10.88.0.1", "hostname").stdout == "head\n"
    assert ssh("op@10.77.0.2", "id -un; hostname; docker ps -q").stdout == "op\nworker1\n"
    echoed = ssh("root@10.88.0.1", "cat; echo end", stdin="x" * 1_000_000)
    assert echoed.stdout == "x" * 1_000_000 + "end\n"
    for user in ("root", "op"):
        hop = "ssh -o BatchMode=yes 10.77.0.2 'id -un; hostname'"
        assert ssh(f"{user}@10.88.0.1", hop).stdout == f"{user}\nworker1\n"


@lab_test
@pytest.mark.usefixtures("running")
def test_control_reaches_the_head_only() -> None:
    assert "dev enp0s1" in on("control", "ip", "route", "get", "10.88.0.1")
    for address in ("10.77.0.1", "10.77.0.2", "10.88.0.254"):
        done = lab("exec", "control", "--", "ip", "route", "get", address)
        assert "Network is unreachable" in done.stderr
    # The host itself: read, not asked, since a packet could leave it.
    table = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    assert "10.77." not in table
    assert "10.88." not in table


@lab_test
@pytest.mark.usefixtures("running")
def test_up_again_changes_nothing_and_another_shape_is_refused() -> None:
    before = states()
    lab_ok("up", "--no-engine")
    assert states() == before
    refused = lab("up", "--no-engine", "--workers=2")
    assert refused.returncode == 1
    assert "run `down --name lab-selftest` first" in refused.stderr


@lab_test
@pytest.mark.usefixtures("healthy")
def test_link_down_cuts_the_fabric_only(ssh: Ssh) -> None:
    lab_ok("break", "worker1", "link-down")
    assert states()["worker1"]["link"] == "down"
    assert on("worker1", "cat", "/sys/class/net/enP2p1s0f0np0/carrier") == "0"
    assert ssh("root@10.77.0.2", "true").returncode == 255
    assert ssh("root@10.88.0.1", "true").returncode == 0
    lab_ok("break", "worker1", "link-up")
    assert ssh("root@10.77.0.2", "true").returncode == 0


@lab_test
@pytest.mark.usefixtures("healthy")
def test_stopped_sshd_refuses(ssh: Ssh) -> None:
    lab_ok("break", "head", "stop-sshd")
    assert "Connection refused" in ssh("root@10.88.0.1", "true").stderr
    assert (states()["head"]["state"], states()["head"]["sshd"]) == ("up", False)
    lab_ok("break", "head", "start-sshd")
    assert ssh("root@10.88.0.1", "true").returncode == 0


@lab_test
@pytest.mark.usefixtures("healthy")
def test_frozen_node_accepts_but_never_answers(ssh: Ssh) -> None:
    lab_ok("break", "head", "freeze")
    assert "timed out" in ssh("root@10.88.0.1", "true").stderr
    assert states()["head"]["state"] == "frozen"
    assert "is frozen" in lab("exec", "head", "--", "true").stderr
    lab_ok("break", "head", "thaw")
    assert ssh("root@10.88.0.1", "true").returncode == 0


@lab_test
@pytest.mark.usefixtures("healthy")
def test_full_disk_is_bounded() -> None:
    lab_ok("break", "worker1", "fill-disk")
    done = lab("exec", "worker1", "--", "bash", "-c", "echo weights > /models/new")
    assert "No space left on device" in done.stderr
    on("worker1", "sh", "-c", "echo elsewhere > /var/tmp/new")
    lab_ok("break", "worker1", "free-disk")
    on("worker1", "sh", "-c", "echo weights > /models/new && rm /models/new")


@lab_test
@pytest.mark.usefixtures("healthy")
def test_held_gpu_shows_a_real_process() -> None:
    query = ("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv")
    pid = lab_ok("break", "worker1", "hold-gpu", "11700").strip()
    assert on("worker1", *query).splitlines()[1:] == [f"{pid}, /usr/bin/python3, 11700 MiB"]
    on("worker1", "kill", pid)
    assert on("worker1", *query).splitlines()[1:] == []
    lab_ok("break", "worker1", "hold-gpu", "100")
    lab_ok("break", "worker1", "release-gpu")
    assert on("worker1", *query).splitlines()[1:] == []


@lab_test
@pytest.mark.usefixtures("healthy")
def test_reboot_keeps_files_and_changes_the_boot_id(ssh: Ssh) -> None:
    word = str(uuid.uuid4())
    on("worker1", "sh", "-c", f"echo {word} > /root/kept; echo {word} > /models/kept; touch /run/x")
    boot_id = on("worker1", "cat", "/proc/sys/kernel/random/boot_id")
    lab_ok("break", "worker1", "kill")
    assert states()["worker1"]["state"] == "down"
    assert ssh("root@10.77.0.2", "true").returncode == 255
    lab_ok("break", "worker1", "boot")
    assert on("worker1", "cat", "/root/kept", "/models/kept").split() == [word, word]
    assert on("worker1", "cat", "/proc/sys/kernel/random/boot_id") != boot_id
    assert lab("exec", "worker1", "--", "test", "-e", "/run/x").returncode == 1
    assert ssh("root@10.77.0.2", "true").returncode == 0


@lab_test
@pytest.mark.usefixtures("running")
def test_up_mends_what_is_broken() -> None:
    before = states()
    lab_ok("break", "head", "stop-sshd")
    lab_ok("break", "head", "freeze")
    lab_ok("break", "worker1", "kill")
    lab_ok("up", "--no-engine")
    after = states()
    assert after["head"] == before["head"]
    assert {**after["worker1"], "pid": None} == {**before["worker1"], "pid": None}


@lab_test
@pytest.mark.usefixtures("healthy")
def test_down_cleans_up_after_killed_supervisors_and_with_anything_running() -> None:
    control = [sys.executable, "-m", "tests.lab", "exec", f"--name={LAB.name}", "control", "--"]
    stray = subprocess.Popen([*control, "sleep", "1000"], cwd=REPOSITORY)
    init = recall(LAB.places(HEAD).init)
    assert init is not None
    status = Path(f"/proc/{init.pid}/status").read_text()
    supervisor = int(status.split("PPid:")[1].split()[0])
    lab_ok("break", "worker1", "hold-gpu", "1")
    lab_ok("break", "worker1", "freeze")
    os.kill(supervisor, signal.SIGKILL)
    lab_ok("down")
    assert stray.wait(timeout=10) == -signal.SIGKILL
    assert started(init.pid) != init.started
    assert traces() == []
    lab_ok("down")


@lab_test
@pytest.mark.usefixtures("healthy")
def test_down_cleans_up_after_an_interrupted_up() -> None:
    lab_ok("down")
    argv = [sys.executable, "-m", "tests.lab", "up", f"--name={LAB.name}", "--no-engine"]
    up = subprocess.Popen(argv, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    for line in up.stderr:
        if "booting worker1" in line:
            up.kill()
    up.wait(timeout=10)
    up.stderr.close()
    lab_ok("down")
    assert traces() == []

"""Who holds GPU memory on a node of the lab, and what the cleanup does about each of them.

Processes, containers and control groups are real. At the process boundary there are two stand-ins:
the lab's nvidia-smi, whose holders register themselves, and a systemctl for which a unit is a
control group and a script that starts it: a node of namespaces has no systemd.
"""

import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from blocks import Cluster, Node, Residue
from flows.recovery import restored_on_failure
from flows.steps import Silent, Steps
from tasks import remote
from tasks.containers import CLUSTER_LABEL
from tasks.converge import Outcome, Run
from tasks.errors import CommandFailed, NotReady, SparkrailError
from tasks.page_caches import release_page_cache
from tasks.residue import clean_residue, remember
from tests.lab import engine_image, lab
from tests.lab.layout import Lab, cache_home
from tests.lab.product import lab_command, poll

pytestmark = pytest.mark.lab

LAB = Lab("lab-gpu")
RUN = Run(id="test", who="test")
DRY = Run(id="test", who="test", dry_run=True)
TOTAL = 100_000
IMAGE = "tiny:hold"

# $1 MiB, $2 the group, $3 the name; the shell becomes what it registers.
HOLD = """\
for root in /sys/fs/cgroup/systemd /sys/fs/cgroup; do
    [ -e "$root/cgroup.procs" ] && break
done
[ -z "$2" ] || { mkdir -p "$root/$2"; echo $$ >"$root/$2/cgroup.procs"; }
exec setpriv --reuid="$4" --clear-groups bash -c '
    printf "{\\"mib\\": %s, \\"started\\": %s}" "$1" "$(cut -d" " -f22 /proc/$$/stat)" \\
        >/run/gpu-holders/$$
    exec -a "$2" "${3:-sleep}" infinity' bash "$1" "$3" "$5"
"""
SYSTEMCTL = """\
#!/bin/bash
shift  # --no-ask-password
verb=$1
while [ "$1" != -- ]; do shift; done
shift
for root in /sys/fs/cgroup/systemd /sys/fs/cgroup; do [ -e $root/cgroup.procs ] && break; done
for unit; do
    case $verb in
        show) printf 'Restart=always\\nId=%s\\n\\n' "$unit" ;;
        stop) kill $(cat "$root/system.slice/$unit/cgroup.procs") ;;
        start) setsid "/run/units/$unit" </dev/null >/dev/null 2>&1 & ;;
    esac
    echo "$verb $unit" >>/run/systemctl.log
done
"""
IN_CONTAINER = (
    'echo "{\\"mib\\": $0, \\"started\\": $(busybox cut -d" " -f22 /proc/$$/stat)}" '
    ">/run/gpu-holders/$$; exec sleep 1000000"
)


def on(node: str, script: str, stdin: bytes = b"") -> str:
    argv = lab.command_line(LAB, node, ["bash", "-ec", script])
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def put(node: str, path: str, text: str) -> None:
    on(node, f"mkdir -p $(dirname {path}); cat >{path}; chmod 755 {path}", text.encode())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    lab_command(LAB, "down")
    lab_command(LAB, "up", "--workers=0", "--no-engine")
    archive = engine_image.tiny_image(cache_home(), IMAGE)
    on("head", "docker load", stdin=archive.read_bytes())
    on("head", f"useradd ada; echo {TOTAL} >/run/gpu-memory; mkdir -m 1777 /run/gpu-holders")
    put("head", "/usr/local/bin/systemctl", SYSTEMCTL)
    put("head", "/usr/local/bin/hold", f"#!/bin/bash\n{HOLD}")
    on("head", "cp /bin/sleep /usr/local/bin/Xorg")
    yield Cluster.model_validate(yaml.safe_load(LAB.spec.read_text()))
    remote.disconnect()
    lab_command(LAB, "down")


@pytest.fixture(autouse=True)
def tidy(cluster: Cluster) -> Iterator[None]:  # noqa: ARG001 - the lab must be up
    yield
    on(
        "head",
        "docker ps -aq | xargs -r docker rm -f >/dev/null; cd /run/gpu-holders; "
        "for pid in *; do [ ! -e /proc/$pid ] || kill -9 $pid || true; done; rm -f -- *; "
        "rm -rf ~/.sparkrail /run/units /run/systemctl.log",
    )


def told(cluster: Cluster, **residue: Any) -> Cluster:
    """The spec with a part `residue`; with less than all of it free there is too little memory."""
    part = Residue.model_validate({"free_mib": TOTAL, "grace_seconds": 5, **residue})
    return cluster.model_copy(update={"residue": part})


def hold(
    mib: int,
    name: str = "python3 job.py",
    *,
    user: str = "root",
    group: str = "",
    program: str = "",
) -> int:
    """The pid of a process that holds memory once it is registered."""
    words = shlex.join(("hold", str(mib), group, name, user, program))
    pid = on("head", f"setsid {words} </dev/null >/dev/null 2>&1 & echo $!")
    poll(lambda: on("head", f"[ ! -s /run/gpu-holders/{pid} ] || cat /proc/{pid}/comm"))
    poll(lambda: "bash" not in on("head", f"cat /proc/{pid}/comm"))
    return int(pid)


def container(name: str, mib: int, *options: str) -> int:
    """The pid, on the node, of a container's process that holds memory."""
    shared = "--network=none --pid=host --volume=/run/gpu-holders:/run/gpu-holders"
    words = shlex.join(("sh", "-c", IN_CONTAINER, str(mib)))
    more = shlex.join(options)
    on("head", f"docker run -d --name={name} {shared} {more} {IMAGE} {words}")
    return int(poll(lambda: _registered(name)))


def _registered(name: str) -> str:
    pid = on("head", f"docker inspect --format '{{{{.State.Pid}}}}' {name}")
    return on("head", f"[ ! -s /run/gpu-holders/{pid} ] || echo {pid}")


def unit(name: str, mib: int) -> int:
    """A unit as our systemctl knows it, started."""
    words = shlex.join(("hold", str(mib), f"system.slice/{name}", "python3 llm.py", "root"))
    put("head", f"/run/units/{name}", f"#!/bin/sh\nexec {words}\n")
    return hold(mib, "python3 llm.py", group=f"system.slice/{name}")


def alive(pid: int) -> bool:
    return on("head", f"cut -d' ' -f3 /proc/{pid}/stat 2>/dev/null || true") not in ("", "Z")


def state(name: str) -> str:
    shown = "{{.State.Running}} {{.HostConfig.RestartPolicy.Name}}"
    return on("head", f"docker inspect --format '{shown}' {name}")


def clean(cluster: Cluster, run: Run = RUN) -> Outcome:
    outcome = clean_residue.fn(cluster, cluster.head, run)
    assert isinstance(outcome, Outcome)
    return outcome


LISTED = [
    {"container": "reranker"},
    {"unit": "llm"},
    {"command": "python3 job.py *", "user": "ada"},
    {"command": "*Xorg*", "user": "root"},
]


def everybody() -> dict[str, int]:
    """One holder of each kind, and beside each one that looks like it."""
    return {
        "reranker": container("reranker", 11_700, "--restart=always"),
        "reranker2": container("reranker2", 300, "--restart=always"),
        "llm": unit("llm.service", 2_000),
        "llm2": unit("llm2.service", 50),
        "ada": hold(1_000, user="ada", group="user.slice/user-1000.slice/session-7.scope"),
        "root": hold(40),
        "Xorg": hold(30, "/usr/lib/xorg/Xorg :0", program="Xorg"),
    }


def test_each_owner_is_stopped_or_left_as_the_policy_says(cluster: Cluster) -> None:
    pids = everybody()
    wanted = told(cluster, policy="stop-listed", listed=LISTED)
    docked = {
        name: on("head", f"docker inspect --format '{{{{slice .Id 0 12}}}}' {name}")
        for name in ("reranker", "reranker2")
    }
    steps = [
        f"stop container reranker ({docked['reranker']}, restart always): "
        f"pid {pids['reranker']} (sleep 1000000) holds 11700 MiB",
        f"stop unit llm.service (restart always): "
        f"pid {pids['llm']} (python3 llm.py infinity) holds 2000 MiB",
        f"end process of ada in session-7.scope: "
        f"pid {pids['ada']} (python3 job.py infinity) holds 1000 MiB",
    ]
    left = [
        f"container reranker2 ({docked['reranker2']}, restart always): "
        f"pid {pids['reranker2']} (sleep 1000000) holds 300 MiB; left alone: not listed",
        f"unit llm2.service (restart always): "
        f"pid {pids['llm2']} (python3 llm.py infinity) holds 50 MiB; left alone: not listed",
        f"process of root: "
        f"pid {pids['root']} (python3 job.py infinity) holds 40 MiB; left alone: not listed",
        f"process of root: pid {pids['Xorg']} (/usr/lib/xorg/Xorg :0 infinity) holds 30 MiB; "
        "left alone: a display server",
    ]
    report = clean(told(cluster, listed=LISTED))
    assert report.status == "unchanged"
    assert report.detail.count("left alone: the policy is to report") == 6

    dry = clean(wanted, DRY)
    assert (dry.status, dry.detail) == ("planned", "; ".join([*steps, *left]))
    assert all(map(alive, pids.values()))
    assert {state(name) for name in docked} == {"true always"}

    done = clean(wanted)
    assert done.status == "changed"
    gone = {"reranker", "llm", "ada"}
    assert {name for name, pid in pids.items() if not alive(pid)} == gone
    assert (state("reranker"), state("reranker2")) == ("false no", "true always")
    assert "stop llm.service" in on("head", "cat /run/systemctl.log")
    said = [f"{steps[0]}: stopped", f"{steps[1]}: stopped", f"{steps[2]}: ended on TERM"]
    assert done.detail.startswith("; ".join(said) + "; 14700 MiB back after ")
    assert "; ".join(left) in done.detail
    assert done.detail.endswith(f"too little memory: 99580 of {TOTAL} MiB are to be had")

    again = clean(wanted)
    assert (again.status, [name for name, pid in pids.items() if not alive(pid)]) == (
        "unchanged",
        ["reranker", "llm", "ada"],
    )


def test_all_but_the_excepted_and_those_of_other_users(cluster: Cluster) -> None:
    pids = everybody()
    other = container("serve2", 10, f"--label={CLUSTER_LABEL}=other")
    excepted = [{"container": "reranker2"}, {"unit": "llm2.service"}]
    done = clean(told(cluster, policy="stop-all-except", excepted=excepted))
    left = {"reranker2", "llm2", "ada", "Xorg"}
    assert {name for name, pid in pids.items() if alive(pid)} == left
    assert alive(other)
    assert "left alone: of another user (ada), and not listed" in done.detail
    assert "left alone: it serves the cluster other, and is not listed" in done.detail
    assert done.detail.count("left alone: excepted") == 2


def test_memory_that_is_enough_leaves_everybody_alone(cluster: Cluster) -> None:
    pid = hold(500)
    enough = told(cluster, policy="stop-all-except", free_mib=TOTAL - 500)
    outcome = clean(enough)
    assert (outcome.status, alive(pid)) == ("unchanged", True)
    assert outcome.detail == (
        f"process of root: pid {pid} (python3 job.py infinity) holds 500 MiB; "
        "left alone: there is memory enough: 99500 of 99500 MiB are to be had"
    )


def test_one_that_ignores_term_is_killed(cluster: Cluster) -> None:
    put("head", "/usr/local/bin/stubborn", "#!/bin/bash\ntrap '' TERM\nread </run/never\n")
    on("head", "mkfifo /run/never")
    pid = hold(500, "stubborn", program="/usr/local/bin/stubborn")
    on("head", f"kill {pid} || true")
    outcome = clean(told(cluster, policy="stop-all-except", grace_seconds=1))
    assert "killed, as it did not end within 1 s" in outcome.detail
    assert not alive(pid)


def test_what_comes_back_is_reported_as_such(cluster: Cluster) -> None:
    loop = "while :; do hold 700 '' 'python3 phoenix.py' root || true; done"
    keeper = on("head", f"setsid bash -c {shlex.quote(loop)} </dev/null >/dev/null 2>&1 & echo $!")
    try:
        poll(lambda: on("head", "ls /run/gpu-holders"))
        with pytest.raises(NotReady) as error:
            clean(told(cluster, policy="stop-all-except"))
    finally:
        on("head", f"kill {keeper}; pkill -f '^python3 phoenix' || true")
    assert error.value.brief.startswith("GPU residue cleanup: came back: process of root as pid ")
    assert "(python3 phoenix.py infinity)" in error.value.brief


def test_what_outlives_our_container_is_ended_and_its_shm_removed(cluster: Cluster) -> None:
    label, mount = f"--label={CLUSTER_LABEL}={cluster.name}", "--volume=/dev/shm:/dev/shm"
    container("sparkrail-ray", 10, label, mount)
    stranger = hold(20)
    on("head", "echo theirs >/dev/shm/psm_theirs")
    words = shlex.join(("sh", "-c", f"exec 3>/dev/shm/psm_ours; {IN_CONTAINER}", "900"))
    on("head", f"docker exec -d sparkrail-ray {words}")
    held = "grep -l 900 /run/gpu-holders/* | xargs -rn1 basename"
    pid = int(poll(lambda: on("head", held)))
    ident = on("head", "docker inspect --format '{{.Id}}' sparkrail-ray")
    remember(cluster, cluster.head, [ident])
    # As an engine core does that hangs in the driver: it is in no container any more.
    on(
        "head",
        f"for group in $(find /sys/fs/cgroup -maxdepth 2 -name cgroup.procs); do "
        f"echo {pid} >$group || true; done 2>/dev/null; docker rm -f sparkrail-ray",
    )
    assert alive(pid)
    assert clean(cluster, DRY).status == "unchanged", "in a dry run our release still runs"
    outcome = clean(cluster)
    assert outcome.status == "changed"
    assert f"end what outlived our container: pid {pid} (sleep 1000000)" in outcome.detail
    assert "remove orphaned shared memory of ours: /dev/shm/psm_ours: removed" in outcome.detail
    assert on("head", "ls /dev/shm") == "psm_theirs"
    assert (alive(pid), alive(stranger)) == (False, True)
    assert clean(cluster).status == "unchanged"


def test_what_was_stopped_runs_again_when_the_deploy_fails(cluster: Cluster) -> None:
    container("reranker", 800, "--restart=always")
    container("passing", 60, "--rm")
    unit("llm.service", 70)
    wanted = told(cluster, policy="stop-all-except", restore=True)
    steps = Steps(wanted, RUN, Silent())
    with pytest.raises(SparkrailError, match="no such model"), restored_on_failure(steps):
        assert "stopped, and removed, as it was made with --rm" in clean(wanted).detail
        assert state("reranker") == "false no"
        raise SparkrailError("no such model")
    assert state("reranker") == "true always"
    poll(lambda: on("head", "grep -l '70,' /run/gpu-holders/* | wc -l") != "0")
    [row] = steps.rows
    assert (row.step, row.outcome) == ("restore", "changed")
    assert row.detail == "started container reranker again; started unit llm.service again"


def test_unified_memory_is_proven_by_the_nodes_own(cluster: Cluster) -> None:
    on("head", "mv /run/gpu-memory /run/unified-memory; nvidia-smi >/dev/null")
    on("head", "mount --bind /run/meminfo /proc/meminfo")
    try:
        pid = hold(11_700)
        outcome = clean(told(cluster, policy="stop-all-except", free_mib=90_000))
    finally:
        on("head", "umount /proc/meminfo; mv /run/unified-memory /run/gpu-memory")
    assert not alive(pid)
    assert "; 11700 MiB back after " in outcome.detail


def test_a_user_without_rights_is_told_what_to_do(cluster: Cluster) -> None:
    pid = hold(500)
    on(
        "head",
        "install -d -o ada -m 700 /home/ada/.ssh; usermod --shell /bin/sh ada; "
        "install -o ada -m 600 ~/.ssh/authorized_keys /home/ada/.ssh/authorized_keys",
    )
    ada = cluster.head.model_copy(update={"user": "ada"})
    listed = [{"command": "python3 job.py*", "user": "root"}]
    wanted = told(cluster, policy="stop-listed", listed=listed).model_copy(update={"head": ada})
    with pytest.raises(CommandFailed) as error:
        clean(wanted)
    assert str(error.value) == (
        f"head: not allowed to end pid {pid}\n"
        "ada is not root there: set residue.sudo, or end it yourself."
    )
    assert alive(pid)


def test_page_cache_of_the_model_alone_is_released(cluster: Cluster) -> None:
    path = cluster.model.path
    on("head", f"mkdir -p {path}; head -c 64M /dev/urandom >{path}/model.safetensors")
    on("head", f"cp {path}/model.safetensors /models/other; sync; cat /models/other >/dev/null")
    head: Node = cluster.head
    assert release_page_cache(cluster, head, dry_run=True).after == 64 << 20
    released = release_page_cache(cluster, head)
    assert (released.before, released.after) == (64 << 20, 0)
    other = cluster.model_copy(
        update={"model": cluster.model.model_copy(update={"path": "/models"})}
    )
    assert release_page_cache(other, head, dry_run=True).after >= 64 << 20
    assert "page cache of the model" not in clean(cluster).detail

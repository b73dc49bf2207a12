"""The steps of the cleanup: which are due, what each is called, what it runs; and the proof."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks.converge import Gone, Ready, Waiting
from tasks.errors import CommandFailed
from tasks.gpu_looks import Gpu, Look, Memory, Process, parse_look
from tasks.owners import Docked, group
from tasks.remote import Command, Result, command_failed
from tasks.residue import outlived
from tasks.residue_policy import Room
from tasks.residue_proof import Done, back, evidence, hidden, left_alone, proof, still_short
from tasks.residue_steps import Actor, DropCaches, Have, Reap, RemoveShm, Stop, plan, restartable
from tests.unit.holders import H200, ID, SLICE, UUID, docked, holders, look, process, row
from tests.unit.specs import spec

LISTED = [
    {"container": "reranker"},
    {"unit": "llm"},
    {"command": "python3 job*", "user": "ada"},
]
SHORT = Room(100_000, 40_000, 20_000, unified=True)
ENOUGH = Room(30_000, 40_000, 30_000, unified=True)
CONTAINER = process(7, cgroup=f"0::/docker/{ID}", user="root")
UNIT = process(8, "python3 llm.py", cgroup=f"{SLICE}/llm.service", user="root")
BARE = process(9)
STRANGER = process(10, user="bob")


def listing(**changes: Any) -> Cluster:
    return spec(residue={"policy": "stop-listed", "listed": LISTED, **changes})


def have(*processes: Process, room: Room | None = SHORT, **more: Any) -> Have:
    seen = {key: more.pop(key) for key in [*more] if key in Look.model_fields}
    return Have(holders(look(*processes, **seen), docked()), room, **more)


ALL = (CONTAINER, UNIT, BARE, STRANGER)
STOPS = [
    "stop container reranker (b9b5e01d4f6d, restart always): pid 7 (python3 job.py) holds 1000 MiB",
    "stop unit llm.service: pid 8 (python3 llm.py) holds 1000 MiB",
    "end process of ada: pid 9 (python3 job.py) holds 1000 MiB",
]


@pytest.mark.parametrize(
    ("cluster", "found", "steps"),
    [
        pytest.param(listing(), have(), [], id="nobody"),
        pytest.param(listing(), have(*ALL), STOPS, id="by policy"),
        pytest.param(spec(), have(*ALL), [], id="the policy is to report"),
        pytest.param(listing(), have(*ALL, room=ENOUGH), [], id="memory is enough"),
        pytest.param(
            listing(), have(*ALL, room=None), STOPS, id="how much there is cannot be told"
        ),
        pytest.param(
            spec(),
            have(BARE, room=ENOUGH, outlived=(BARE,), shm=("/dev/shm/a", "/dev/shm/b")),
            [
                "end what outlived our container: pid 9 (python3 job.py)",
                "remove orphaned shared memory of ours: /dev/shm/a, /dev/shm/b",
            ],
            id="what outlived us goes in any case",
        ),
        pytest.param(
            listing(drop_caches=True),
            have(room=Room(30_000, 40_000, 10_000, unified=True)),
            ["drop the page cache, of which 20000 MiB stand in the way"],
            id="page cache, and it may be dropped",
        ),
        pytest.param(
            listing(),
            have(room=Room(30_000, 40_000, 10_000, unified=True)),
            [],
            id="page cache, and it may not be dropped",
        ),
    ],
)
def test_plan(cluster: Cluster, found: Have, steps: list[str]) -> None:
    assert [str(each) for each in plan(cluster, found)] == steps


# --- how each is done ----------------------------------------------------------------------------


class Node:
    """Stands in for a node: remembers what it is told to run."""

    def __init__(self, *said: str, code: int = 0) -> None:
        self.node = spec().head
        self.asked: list[str] = []
        self.said = list(said)
        self.code = code

    def run(self, argv: Sequence[str], **_options: Any) -> Result:
        self.asked.append(str(Command(tuple(argv))))
        result = Result(self.said.pop(0) if self.said else "", "a password is required", self.code)
        if self.code:
            raise command_failed(self.node, Command(tuple(argv)), result)
        return result


def actor(node: Node, uid: int = 0, **residue: Any) -> Actor:
    cluster, remote = listing(**residue), node
    made = Actor(cluster, cluster.head, remote, "~/record")  # type: ignore[arg-type]
    made.uid, made.user = uid, "root" if uid == 0 else "nvidia"
    return made


def stop(held: Process) -> Stop:
    [only] = group(look(held), {ID: docked()})
    return Stop(only, (held,) if only.owner.kind == "process" else ())


@pytest.mark.parametrize(
    ("uid", "sudo", "prefix"),
    [(0, True, ""), (0, False, ""), (1000, True, "sudo -n -- "), (1000, False, "")],
    ids=["root may sudo", "root", "a user may sudo", "a user may not"],
)
def test_sudo_only_where_it_is_needed_and_allowed(uid: int, sudo: bool, prefix: str) -> None:
    node = Node("", '[{"pid": 9, "said": "ended on TERM"}]', "")
    acting = actor(node, uid, sudo=sudo)
    said = [acting.do(each) for each in (stop(UNIT), stop(BARE), DropCaches(1))]
    assert said == ["stopped", "ended on TERM", "dropped"]
    wanted = {"processes": [{"pid": 9, "started": 900, "command": "python3 job.py"}], "grace": 30}
    arguments = str(Command((json.dumps(wanted),)))
    assert node.asked == [
        f"{prefix}systemctl --no-ask-password stop -- llm.service",
        f"{prefix}python3 - end_processes {arguments}",
        f"{prefix}sh -c 'sync; echo 1 >/proc/sys/vm/drop_caches'",
    ]


def test_ones_own_processes_need_no_sudo() -> None:
    node = Node('[{"pid": 9, "said": "gone already"}]')
    mine = process(9, user="nvidia")
    assert actor(node, 1000, sudo=True).do(Reap((mine,))) == "gone already"
    assert node.asked[0].startswith("python3 - end_processes ")


def test_orphaned_shared_memory_is_removed_by_the_record() -> None:
    node = Node("{}")
    assert actor(node).do(RemoveShm(("/dev/shm/a",))) == "removed"
    assert node.asked == ["python3 - outliving remove '~/record'"]


@pytest.mark.parametrize(
    ("uid", "sudo", "remedy"),
    [
        pytest.param(
            1000,
            True,
            "\nLet nvidia use sudo without a password there: `sudo -n true` must work.",
            id="sudo asks for a password",
        ),
        pytest.param(
            1000,
            False,
            "\nnvidia is not root there: set residue.sudo, or end it yourself.",
            id="no sudo",
        ),
        pytest.param(0, False, "", id="root"),
    ],
)
def test_what_is_refused_says_what_to_do(uid: int, sudo: bool, remedy: str) -> None:
    with pytest.raises(CommandFailed) as error:
        actor(Node(code=1), uid, sudo=sudo).do(stop(UNIT))
    assert str(error.value) == f"head: cannot stop unit llm.service\na password is required{remedy}"


def test_a_process_that_we_may_not_end_is_named() -> None:
    node = Node('[{"pid": 9, "said": "not allowed"}]')
    with pytest.raises(CommandFailed, match=r"^head: not allowed to end pid 9\n"):
        actor(node, 1000).do(stop(BARE))


@pytest.mark.parametrize(
    ("held", "known", "kept"),
    [
        pytest.param(UNIT, docked(), {"kind": "unit", "name": "llm.service"}, id="unit"),
        pytest.param(
            CONTAINER,
            docked(),
            {"kind": "container", "name": "reranker", "id": ID, "restart": {"Name": "always"}},
            id="container",
        ),
        pytest.param(CONTAINER, docked(removed_at_end=True), None, id="one that docker removes"),
        pytest.param(BARE, docked(), None, id="a bare process cannot be started again"),
    ],
)
def test_restartable(held: Process, known: Docked, kept: dict[str, Any] | None) -> None:
    [only] = group(look(held), {ID: known})
    assert restartable(Stop(only)) == kept


# --- the proof -----------------------------------------------------------------------------------


def unified(available: int) -> Memory:
    return Memory(total_mib=121_000, free_mib=available, available_mib=available)


def gpu(free: int) -> tuple[Gpu, ...]:
    return (Gpu(index=0, uuid=UUID, total_mib=143_771, used_mib=143_771 - free, free_mib=free),)


DONE = [Done(stop(BARE), "ended on TERM")]
BEFORE = have(BARE, memory=unified(40_000))
OWN = Room(100_000, 40_000, 40_000, unified=False)


@pytest.mark.parametrize(
    ("now", "seconds", "answer"),
    [
        pytest.param(
            have(BARE, memory=unified(41_000)), 1, "still listed: pid 9 (python3)", id="listed"
        ),
        pytest.param(
            have(rows=(row(9),), memory=unified(41_000)),
            1,
            "still listed: pid 9 (python3)",
            id="the driver lists it, /proc does not",
        ),
        pytest.param(
            have(process(9, started=5000, user="bob"), memory=unified(41_000)),
            9,
            "",
            id="another process has its pid",
        ),
        pytest.param(
            have(process(9, state="Z"), memory=unified(41_000)), 9, "", id="a zombie is listed"
        ),
        pytest.param(
            have(memory=unified(40_100)),
            9,
            "memory is not back: 1000 MiB were held, 100 MiB are back",
            id="memory is not back",
        ),
        pytest.param(have(memory=unified(40_960)), 9, "", id="nearly all of it is back"),
        pytest.param(
            have(memory=unified(40_100), room=ENOUGH), 9, "", id="others took it, but it is enough"
        ),
        pytest.param(
            have(memory=unified(41_000)), 1, "it may be started again", id="too early to tell"
        ),
        pytest.param(have(memory=unified(41_000)), 3, "", id="gone, and the memory is back"),
        pytest.param(
            have(outlived=(STRANGER,)),
            3,
            "ours still run: pid 10 (python3 job.py)",
            id="what outlived us still runs",
        ),
    ],
)
def test_proof(now: Have, seconds: float, answer: str) -> None:
    found = proof(BEFORE, now, DONE, seconds)
    assert isinstance(found, Waiting if answer else Ready)
    assert (found.why if isinstance(found, Waiting) else "") == answer


@pytest.mark.parametrize(
    ("held", "now", "said"),
    [
        pytest.param(
            BARE,
            have(process(30, started=100_001), rows=()),
            "came back: process of ada as pid 30 (python3 job.py)",
            id="a bare process, before it holds anything",
        ),
        pytest.param(
            CONTAINER,
            have(process(30, cgroup=f"0::/docker/{ID}", started=100_001)),
            "came back: container reranker (b9b5e01d4f6d, restart always) as pid 30 "
            "(python3 job.py)",
            id="a container",
        ),
        pytest.param(
            UNIT,
            have(process(30, cgroup=f"{SLICE}/llm.service", started=100_001)),
            "came back: unit llm.service as pid 30 (python3 job.py)",
            id="a unit",
        ),
    ],
)
def test_what_comes_back_ends_the_wait(held: Process, now: Have, said: str) -> None:
    found = proof(BEFORE, now, [Done(stop(held), "stopped")], 1)
    assert isinstance(found, Gone)
    assert found.why == said
    assert found.remedy == "Something starts it again; stop that, or name it instead."


def test_a_bystander_of_the_same_name_has_not_come_back() -> None:
    bystander = process(30, started=99_000)
    now = have(bystander, rows=(), memory=unified(41_000))
    assert isinstance(proof(BEFORE, now, DONE, 9), Ready)


@pytest.mark.parametrize(
    ("free", "answer"),
    [(101_000, ""), (100_300, "memory is not back: 1000 MiB of GPU 0 were held, 300 MiB are back")],
)
def test_memory_of_a_gpu_of_its_own_is_proven_there(free: int, answer: str) -> None:
    before = have(BARE, gpus=gpu(100_000), room=OWN)
    found = proof(before, have(gpus=gpu(free), room=OWN), DONE, 9)
    assert (found.why if isinstance(found, Waiting) else "") == answer


def test_what_the_driver_does_not_tell_cannot_be_missed() -> None:
    before = have(BARE, rows=(row(9, None),), memory=unified(40_000))
    assert isinstance(proof(before, have(memory=unified(40_000)), DONE, 9), Ready)


# --- what people are told ------------------------------------------------------------------------


def test_evidence() -> None:
    before = have(BARE, STRANGER, memory=unified(40_000))
    rows = evidence(listing(), before, have(memory=unified(41_010)), DONE, 0.84)
    assert rows == [
        {
            "owner": "process of ada",
            "processes": "9 python3",
            "held": "1000 MiB",
            "action": "ended on TERM",
            "after": "gone, 1010 MiB back after 0.8 s",
        },
        {
            "owner": "process of bob",
            "processes": "10 python3",
            "held": "1000 MiB",
            "action": "left alone",
            "after": "not listed",
        },
    ]
    [first, _] = evidence(listing(), before, None, DONE, 0)
    assert first["after"] == "not proven"


def test_memory_that_is_back_is_told_by_gpu() -> None:
    two = (Gpu(index=1, uuid="GPU-1", total_mib=9, used_mib=0, free_mib=9),)
    before = have(BARE, gpus=(*gpu(100_000), *two), room=OWN)
    assert (
        back(before, have(gpus=(*gpu(101_000), *two), room=OWN), DONE) == "1000 MiB back on GPU 0"
    )


def test_left_alone() -> None:
    found = have(BARE, XORG, rows_error="nvidia-smi: exit code 9: no")
    assert left_alone(spec(), found) == [
        "process of ada: pid 9 (python3 job.py) holds 1000 MiB; "
        "left alone: the policy is to report",
        "process of root: pid 11 (/usr/lib/xorg/Xorg :0) holds 1000 MiB; "
        "left alone: a display server",
        "cannot tell who holds GPU memory: nvidia-smi: exit code 9: no",
    ]
    assert left_alone(spec(image={"gpu_access": "none"}), have(rows_error="no", room=ENOUGH)) == []


XORG = process(11, "/usr/lib/xorg/Xorg :0", user="root")


def test_memory_that_nobody_is_listed_for_has_an_unknown_holder() -> None:
    opener = process(20, "python3 hidden.py", user="bob", rss_mib=900)
    seen: dict[str, Any] = {"processes": (opener,), "openers": (20,), "largest": (20,)}
    assert hidden(have(uid=0, **seen)) == [
        "an unknown holder: 40000 of 100000 MiB are to be had, and nvidia-smi lists nobody",
        "/dev/nvidia* is open in pid 20 (python3 hidden.py)",
        "largest: pid 20 (python3 hidden.py) 900 MiB",
    ]
    own = have(BARE, gpus=gpu(100_000), room=OWN, openers=())
    assert hidden(own) == [
        "an unknown holder has 42771 MiB of GPU 0",
        "nvidia sees only its own openers of /dev/nvidia*",
    ]
    assert hidden(have(gpus=H200, room=OWN)) == []
    assert hidden(have(room=ENOUGH)) == []


def test_a_real_look_has_no_unknown_holder() -> None:
    file = Path(__file__).parent / "data" / "nvidia-smi" / "580.159.04-look.json"
    seen = parse_look(json.loads(file.read_text()))
    found = Have(holders(seen), OWN)
    assert hidden(found) == []
    assert [(each.processes[0].pid, each.mib) for each in found.holders.held] == [
        (574, 12500),
        (580, 2592),
        (575, 1030),
    ]


def test_too_little_memory_is_told() -> None:
    assert still_short(SHORT) == ["too little memory: 40000 of 100000 MiB are to be had"]
    assert still_short(ENOUGH) == still_short(None) == []


@pytest.mark.parametrize(
    ("recorded", "changes", "pids"),
    [
        pytest.param({9: 900}, {}, [9], id="in no container any more"),
        pytest.param({9: 901}, {}, [], id="another process has its pid"),
        pytest.param({7: 700}, {}, [], id="its container runs"),
        pytest.param({7: 700}, {"running": frozenset()}, [7], id="its container is gone"),
        pytest.param({9: 900}, {"docker_error": "no"}, [], id="docker does not tell"),
        pytest.param({}, {}, [], id="nothing was written down"),
    ],
)
def test_outlived(recorded: dict[int, int], changes: dict[str, Any], pids: list[int]) -> None:
    seen = holders(look(CONTAINER, BARE), docked()).model_copy(update=changes)
    assert [each.pid for each in outlived(seen, recorded)] == pids
    assert outlived(seen, recorded, still_running=True) == ()

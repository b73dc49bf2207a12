"""Whose GPU memory is, who may be stopped for it, and whether there is too little of it."""

from typing import Any

import pytest

from blocks import Cluster
from tasks.containers import CLUSTER_LABEL
from tasks.gpu_looks import Gpu, Process, Row
from tasks.owners import group
from tasks.residue_policy import Room, family, room, verdict
from tests.unit.holders import (
    H200,
    ID,
    OTHER,
    SESSION,
    SLICE,
    UUID,
    docked,
    holders,
    look,
    process,
    row,
)
from tests.unit.specs import spec

USER_UNIT = "0::/user.slice/user-1000.slice/user@1000.service/app.slice"


@pytest.mark.parametrize(
    ("cgroup", "owner"),
    [
        pytest.param(
            f"0::/system.slice/docker-{ID}.scope",
            "container reranker (b9b5e01d4f6d, restart always)",
            id="docker on cgroup v2",
        ),
        pytest.param(
            f"9:name=systemd:/docker/{ID}\n1:cpu:/docker/{ID}",
            "container reranker (b9b5e01d4f6d, restart always)",
            id="docker on cgroup v1",
        ),
        pytest.param(
            f"0::/machine.slice/libpod-{OTHER}.scope",
            "container that docker does not know (cccccccccccc)",
            id="podman",
        ),
        pytest.param(f"{SLICE}/llm.service", "unit llm.service (restart always)", id="unit"),
        pytest.param(f"{SLICE}/system-a.slice/a@1.service", "unit a@1.service", id="instance"),
        pytest.param("0::/ml.slice/b.service/sub", "unit b.service", id="unit of another slice"),
        pytest.param(SESSION, "process of ada in session-7.scope", id="login"),
        pytest.param(
            f"{USER_UNIT}/app-code-12.scope", "process of ada in app-code-12.scope", id="desktop"
        ),
        pytest.param(
            f"{USER_UNIT}/notebook.service", "process of ada in notebook.service", id="user's unit"
        ),
        pytest.param("0::/", "process of ada", id="nothing"),
        pytest.param("0::/init.scope", "process of ada", id="of the first process"),
    ],
)
def test_owner(cgroup: str, owner: str) -> None:
    seen = look(process(7, cgroup=cgroup), units={"llm.service": "always"})
    [held] = group(seen, {ID: docked()})
    assert str(held) == f"{owner}: pid 7 (python3 job.py) holds 1000 MiB"


def test_a_container_that_we_are_in_ourselves_is_none() -> None:
    seen = look(process(7, cgroup=f"0::/docker/{OTHER}"), own_cgroup=f"0::/docker/{OTHER}/x")
    [held] = group(seen, {})
    assert str(held.owner) == "process of ada"


def test_rows_of_one_owner_are_one() -> None:
    inside = f"0::/docker/{ID}"
    seen = look(
        process(7, cgroup=inside),
        process(8, "VLLM::EngineCore", cgroup=inside),
        rows=(row(7, 5), row(8, 500), row(8, 600, gpu="GPU-2"), row(9, None, "[Not Found]")),
    )
    container, unknown = group(seen, {ID: docked(restart="no")})
    assert str(container) == (
        "container reranker (b9b5e01d4f6d): pid 7 (python3 job.py), pid 8 (VLLM::EngineCore) "
        "holds 1105 MiB"
    )
    assert str(unknown) == "an unknown holder: pid 9 ([Not Found]) holds an unknown amount"


def test_a_zombie_holds_nothing() -> None:
    assert group(look(process(7, state="Z")), {}) == ()


# --- verdicts ------------------------------------------------------------------------------------


def judged(held: Process, cluster: Cluster, *more: Process, **seen: Any) -> str:
    taken = look(held, *more, rows=(row(held.pid),), **seen)
    [only] = group(taken, {ID: docked(), OTHER: docked(OTHER, "x", labels={CLUSTER_LABEL: "pair"})})
    found = verdict(cluster, taken, only)
    return f"{'stop' if found.stop else 'leave'}: {found.why}"


def with_policy(policy: str, *listed: dict[str, str], excepted: Any = ()) -> Cluster:
    return spec(residue={"policy": policy, "listed": [*listed], "excepted": [*excepted]})


ADA = {"command": "python3 job*", "user": "ada"}
BARE = process(7)
MINE = process(7, user="nvidia")
CONTAINER = process(7, cgroup=f"0::/docker/{ID}", user="root")
UNIT = process(7, cgroup=f"{SLICE}/llm.service", user="root")
XORG = process(7, "/usr/lib/xorg/Xorg :0", user="root", name="Xorg")


@pytest.mark.parametrize(
    ("held", "cluster", "said"),
    [
        pytest.param(BARE, spec(), "leave: the policy is to report", id="report"),
        pytest.param(BARE, with_policy("stop-listed", ADA), "stop: listed", id="listed command"),
        pytest.param(
            process(7, user="bob"),
            with_policy("stop-listed", ADA),
            "leave: not listed",
            id="the same command of another user",
        ),
        pytest.param(
            process(7, "python3 other.py"),
            with_policy("stop-listed", ADA),
            "leave: not listed",
            id="another command of the same user",
        ),
        pytest.param(
            CONTAINER,
            with_policy("stop-listed", {"container": "reranker"}),
            "stop: listed",
            id="listed container",
        ),
        pytest.param(
            CONTAINER,
            with_policy(
                "stop-listed", {"container": "rerank"}, {"command": "python3*", "user": "root"}
            ),
            "leave: not listed",
            id="a command in a container is not the container",
        ),
        pytest.param(
            UNIT, with_policy("stop-listed", {"unit": "llm"}), "stop: listed", id="listed unit"
        ),
        pytest.param(
            XORG,
            with_policy("stop-listed", {"command": "*Xorg*", "user": "root"}),
            "leave: a display server",
            id="a display server, even if listed",
        ),
        pytest.param(
            process(7, "python3 /opt/x", cgroup=f"{SLICE}/nvidia-fabricmanager.service"),
            with_policy("stop-all-except"),
            "leave: a daemon of the driver",
            id="the fabric daemon's unit",
        ),
        pytest.param(
            process(7, "/usr/bin/nvidia-persistenced --user x", user="root"),
            with_policy("stop-all-except"),
            "leave: a daemon of the driver",
            id="the persistence daemon",
        ),
        pytest.param(
            process(7, "sshd: ada@pts/0"),
            with_policy("stop-all-except"),
            "leave: the system's",
            id="sshd",
        ),
        pytest.param(
            MINE, with_policy("stop-all-except"), "stop: not excepted", id="of the login's user"
        ),
        pytest.param(
            MINE,
            with_policy("stop-all-except", excepted=[{"command": "*job.py", "user": "nvidia"}]),
            "leave: excepted",
            id="excepted",
        ),
        pytest.param(
            CONTAINER,
            with_policy(
                "stop-listed", {"container": "reranker"}, excepted=[{"container": "reranker"}]
            ),
            "leave: excepted",
            id="listed and excepted",
        ),
        pytest.param(
            BARE,
            with_policy("stop-all-except"),
            "leave: of another user (ada), and not listed",
            id="of another user",
        ),
        pytest.param(
            BARE, with_policy("stop-all-except", ADA), "stop: listed", id="of another, but listed"
        ),
        pytest.param(
            CONTAINER, with_policy("stop-all-except"), "stop: not excepted", id="root's container"
        ),
        pytest.param(
            CONTAINER.model_copy(update={"user": "1005"}),
            with_policy("stop-all-except"),
            "stop: not excepted",
            id="a container of a user that the node does not know",
        ),
        pytest.param(
            CONTAINER.model_copy(update={"user": "ada"}),
            with_policy("stop-all-except"),
            "leave: of another user (ada), and not listed",
            id="another user's container",
        ),
        pytest.param(
            process(7, cgroup=f"0::/docker/{OTHER}", user="root"),
            with_policy("stop-all-except"),
            "leave: it serves the cluster pair, and is not listed",
            id="another cluster of ours",
        ),
        pytest.param(
            process(7, cgroup=f"0::/docker/{'d' * 64}", user="root"),
            with_policy("stop-all-except"),
            "leave: docker does not know its container",
            id="a container of another engine",
        ),
    ],
)
def test_verdict(held: Process, cluster: Cluster, said: str) -> None:
    assert judged(held, cluster) == said


def test_sparkrail_itself_is_never_stopped() -> None:
    cluster = with_policy("stop-listed", ADA)
    assert judged(BARE, cluster, own=(7, 3)) == "leave: it is sparkrail itself"


def test_a_row_without_a_process_is_left() -> None:
    taken = look(rows=(row(9, 12, "[Not Found]"),))
    [held] = group(taken, {})
    assert verdict(with_policy("stop-all-except"), taken, held).why == (
        "its process cannot be seen"
    )


def test_the_family_of_a_holder_is_ended_from_its_first_that_is_listed() -> None:
    """An engine core is named by its engine; what the user knows is the server that started it."""
    shell = process(3, "bash", parent=1)
    server = process(4, "python3 job.py serve", parent=3)
    middle = process(5, "python3 spawn", parent=4)
    core = process(6, "VLLM::EngineCore", parent=5)
    taken = look(shell, server, middle, core, rows=(row(6),))
    [held] = group(taken, {})
    cluster = with_policy("stop-listed", ADA)
    assert verdict(cluster, taken, held).why == "listed"
    assert family(cluster, taken, held) == (server, core)
    foreign = server.model_copy(update={"user": "bob"})
    taken = look(foreign, middle, core, rows=(row(6),))
    assert verdict(cluster, taken, held).why == "not listed"


# --- room ----------------------------------------------------------------------------------------


def two_gpus(*free: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=at, uuid=f"GPU-{at}", total_mib=1000, used_mib=1000 - each, free_mib=each)
        for at, each in enumerate(free)
    )


@pytest.mark.parametrize(
    ("changes", "seen", "found"),
    [
        pytest.param({}, {}, Room(108_900, 40_000, 20_000, unified=True), id="unified memory"),
        pytest.param(
            {"serve": {"arguments": ["--gpu-memory-utilization=0.5"]}},
            {},
            Room(60_500, 40_000, 20_000, unified=True),
            id="what vLLM is told to take",
        ),
        pytest.param(
            {"serve": {"arguments": ["--gpu-memory-utilization=most"]}},
            {},
            Room(108_900, 40_000, 20_000, unified=True),
            id="what vLLM will refuse",
        ),
        pytest.param(
            {"residue": {"free_mib": 30_000}},
            {},
            Room(30_000, 40_000, 20_000, unified=True),
            id="what the spec says",
        ),
        pytest.param(
            {},
            {"gpus": H200},
            Room(129_393, 143_161, 143_161, unified=False),
            id="memory of its own",
        ),
        pytest.param(
            {"head": {"gpus": 2}, "workers": [], "serve": {"tensor_parallel": 2}},
            {"gpus": two_gpus(950, 40)},
            Room(900, 40, 40, unified=False),
            id="the GPU that has least",
        ),
        pytest.param(
            {},
            {"gpus": two_gpus(950, 40)},
            Room(900, 950, 950, unified=False),
            id="only as many GPUs as the node has in the spec",
        ),
        pytest.param({}, {"gpus": ()}, None, id="nothing tells"),
        pytest.param(
            {"image": {"gpu_access": "none"}},
            {},
            Room(0, 40_000, 20_000, unified=True),
            id="an engine without GPUs",
        ),
    ],
)
def test_room(changes: dict[str, Any], seen: dict[str, Any], found: Room | None) -> None:
    cluster = spec(**changes)
    assert room(cluster, cluster.head, holders(look(**seen))) == found


def test_what_our_own_release_holds_will_be_free() -> None:
    """As in a dry run, where it still runs."""
    ours = docked(labels={CLUSTER_LABEL: "sparks"})
    seen = look(
        process(7, cgroup=f"0::/docker/{ID}"), rows=(Row(gpu=UUID, pid=7, name="", used_mib=9),)
    )
    cluster = spec(residue={"free_mib": 1})
    assert room(cluster, cluster.head, holders(seen, ours)) == Room(1, 40_009, 20_009, unified=True)


@pytest.mark.parametrize(
    ("has", "enough", "cached"),
    [
        pytest.param(Room(50, 60, 55, unified=True), True, 0, id="enough and free"),
        pytest.param(Room(50, 60, 10, unified=True), True, 40, id="page cache stands in the way"),
        pytest.param(Room(50, 30, 10, unified=True), False, 20, id="holders, and page cache too"),
        pytest.param(Room(50, 30, 30, unified=True), False, 0, id="holders"),
        pytest.param(Room(50, 30, 30, unified=False), False, 0, id="a GPU's own has no cache"),
    ],
)
def test_page_cache_is_told_from_holders(has: Room, enough: bool, cached: int) -> None:
    assert (has.enough, has.cached) == (enough, cached)

"""A chain of workers: who got the image, who failed, and who gets it in a further round."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from blocks import Cluster
from tasks import remote
from tasks.errors import Cancelled, CommandFailed, NodeUnreachable, SparkrailError
from tasks.image_chains import Round, judge
from tasks.image_deliveries import Delivered, Parcel, Turns, note, settle, store_of
from tasks.image_layers import Source, Target, layer_folders, leading, spare
from tasks.image_streams import Moved
from tests.unit.specs import spec, workers

LAYERS = ("a", "b", "a", "c")
CUT = "the machine before ended the connection"
WENT = Moved(read=9, bytes=9)
ONE, TWO, THREE = "worker1", "worker2", "worker3"


@pytest.fixture
def cluster() -> Cluster:
    return spec(**workers(3))


def ended(cluster: Cluster, **others: Moved | SparkrailError) -> Round:
    """The round in which all went well but for these."""
    every = {node.name: WENT for node in cluster.nodes} | others
    return judge(cluster.head, cluster.workers, every)


def outcome(found: Round) -> dict[str, list[str]]:
    every = {
        "loaded": [*found.loaded],
        "failed": [*found.failed],
        "refused": [*found.refused],
        "cut off": [*found.cut_off],
    }
    return {word: sorted(names) for word, names in every.items() if names}


DEAD = NodeUnreachable("connection lost", node=TWO)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param({}, {"loaded": [ONE, TWO, THREE]}, id="all went well"),
        pytest.param(
            {ONE: Moved(next_failed="reset"), TWO: DEAD, THREE: Moved(broken=CUT)},
            {"loaded": [ONE], "failed": [TWO], "cut off": [THREE]},
            id="the one in the middle died",
        ),
        pytest.param(
            {ONE: Moved(next_failed="reset"), TWO: Moved(broken=CUT), THREE: Moved(broken=CUT)},
            {"loaded": [ONE], "failed": [TWO], "cut off": [THREE]},
            id="the link of the one in the middle went down",
        ),
        pytest.param(
            {
                "head": Moved(next_failed="reset", source_code=-9),
                ONE: Moved(broken=CUT),
                TWO: Moved(broken=CUT),
                THREE: Moved(broken=CUT),
            },
            {"failed": [ONE], "cut off": [TWO, THREE]},
            id="the first one went",
        ),
        pytest.param(
            {TWO: Moved(load_code=1, load_said="no space left")},
            {"loaded": [ONE, THREE], "failed": [TWO]},
            id="a full disk in the middle",
        ),
        pytest.param(
            {
                "head": Moved(read=9, left_out=2),
                TWO: Moved(load_code=1, load_said="Error\nlayer.tar not found"),
            },
            {"loaded": [ONE, THREE], "refused": [TWO]},
            id="one takes no layers alone",
        ),
        pytest.param(
            {ONE: Moved(broken="x", load_code=-9)},
            {"loaded": [TWO, THREE], "cut off": [ONE]},
            id="broken, and nobody says why",
        ),
    ],
)
def test_judge(
    cluster: Cluster, others: Mapping[str, Moved | SparkrailError], expected: dict[str, list[str]]
) -> None:
    assert outcome(ended(cluster, **others)) == expected


def test_the_lost_one_is_named_with_the_way_to_it(cluster: Cluster) -> None:
    found = ended(cluster, worker1=Moved(next_failed="reset"), worker2=Moved(broken=CUT))
    assert str(found.failed[TWO]) == (
        "worker2: worker1 -> 10.77.0.3: the image did not get there over the fabric\n"
        f"reset; {CUT}\n"
        "Is the link up at both ends, and does no firewall keep them from each other there? "
        "Then run again."
    )


def test_nothing_comes_out_of_the_head(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed, match=r"^head: docker save ended with exit code 1 after 0"):
        ended(cluster, head=Moved(source_code=1, broken="docker save failed"))
    with pytest.raises(NodeUnreachable, match="connection lost"):
        ended(cluster, head=DEAD)


# --- the next round -------------------------------------------------------------------------------

TARGETS = {name: Target(node=name, has=2) for name in (ONE, TWO, THREE)}
PLATFORM = CommandFailed(
    "docker save", node="head", details=f"open blobs/sha256/{'0' * 64}: no such file"
)


@pytest.mark.parametrize(
    ("found", "again", "failed", "platform"),
    [
        pytest.param(Round(loaded={ONE: WENT}), {}, [], False, id="nothing left"),
        pytest.param(
            Round(loaded={ONE: WENT}, failed={TWO: DEAD}, cut_off={THREE: CUT}),
            {THREE: 2},
            [TWO],
            False,
            id="those behind the dead one",
        ),
        pytest.param(
            Round(loaded={ONE: WENT}, refused={TWO: "why"}), {TWO: 0}, [], False, id="all of it"
        ),
        pytest.param(
            Round(cut_off={ONE: CUT, TWO: CUT}), {}, [ONE, TWO], False, id="nobody to blame"
        ),
        pytest.param(
            Round(failed={ONE: PLATFORM}), {ONE: 2}, [], True, id="with the platform named"
        ),
    ],
)
def test_settle(found: Round, again: dict[str, int], failed: list[str], platform: bool) -> None:
    done = settle(found, TARGETS, with_platform=False)
    assert {name: target.has for name, target in done.again.items()} == again
    assert sorted(done.failed) == failed
    assert done.with_platform is platform


def test_the_platform_is_named_once() -> None:
    done = settle(Round(failed={ONE: PLATFORM}), TARGETS, with_platform=True)
    assert (sorted(done.failed), done.again) == ([ONE], {})


@pytest.mark.parametrize(
    ("moved", "targets", "refused", "said"),
    [
        pytest.param(Moved(left_out=2), TARGETS, {}, "", id="a part"),
        pytest.param(
            Moved(sent_anyway=2, legacy=True),
            {**TARGETS, TWO: Target(node=TWO, containerd=True)},
            {},
            "all of it, since the image store of worker2 takes no layers alone from an engine "
            "before version 25",
            id="another store and an old engine",
        ),
        pytest.param(
            Moved(),
            TARGETS,
            {TWO: "not found"},
            "all of it, since docker load on worker2 refused the missing layers alone (not found)",
            id="refused",
        ),
        pytest.param(
            Moved(sent_anyway=1),
            TARGETS,
            {},
            "1 layers of it were there, but could not be told apart",
            id="unknown blobs",
        ),
    ],
)
def test_note(
    moved: Moved, targets: Mapping[str, Target], refused: Mapping[str, str], said: str
) -> None:
    assert note(moved, targets, refused) == said
    both = "; ".join(filter(None, (said, "by docker save: no container can read")))
    assert note(moved, targets, refused, "no container can read") == both


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "count"),
    [((), 0), (("b",), 0), (("a", "b"), 2), (LAYERS, 4), ((*LAYERS, "d"), 4), (("a", "x"), 1)],
)
def test_leading(other: tuple[str, ...], count: int) -> None:
    assert leading(LAYERS, other) == count


@pytest.mark.parametrize(
    ("has", "left_out"),
    [
        pytest.param([4], {"a", "b", "c"}, id="only the config differs"),
        pytest.param([3], {"a", "b"}, id="the top one is missing"),
        pytest.param([2], {"b"}, id="one is needed again further up"),
        pytest.param([3, 2], {"b"}, id="what one of them lacks"),
        pytest.param([3, 0], set(), id="one has nothing"),
        pytest.param([], set(), id="nobody"),
    ],
)
def test_spare(has: list[int], left_out: set[str]) -> None:
    assert spare(LAYERS, [Target(node="n", has=each) for each in has]) == left_out


@pytest.mark.parametrize(
    ("driver", "containerd", "read"),
    [
        pytest.param("overlay2", False, True, id="both ends have the classic store"),
        pytest.param("overlay2", True, False, id="one of them wants the newer layout"),
        pytest.param("btrfs", False, False, id="the head keeps layers in another way"),
        pytest.param("overlayfs", False, False, id="the head has the containerd store"),
    ],
)
def test_when_the_folder_of_the_engine_is_read(driver: str, containerd: bool, read: bool) -> None:
    source = Source(driver=driver, root="/var/lib/docker", containerd=driver == "overlayfs")
    parcel = Parcel(name="app:1", id="sha256:1", layers=LAYERS, platform="linux/arm64", size=1)
    targets = [Target(node=ONE), Target(node=TWO, containerd=containerd)]
    place = {"root": "/var/lib/docker", "id": "sha256:1", "name": "app:1"}
    assert store_of(source, parcel, targets) == (place if read else None)


@pytest.mark.parametrize(
    ("told", "folders"),
    [
        pytest.param(
            {"Data": {"LowerDir": "/d/overlay2/b/diff:/d/overlay2/a/diff", "UpperDir": "/d/c"}},
            ("/d/overlay2/a/diff", "/d/overlay2/b/diff", "/d/c"),
            id="several layers",
        ),
        pytest.param({"Data": {"UpperDir": "/d/a"}}, ("/d/a",), id="one layer"),
        pytest.param({"Data": None}, (), id="the containerd store"),
        pytest.param(None, (), id="a later engine"),
    ],
)
def test_where_the_layers_lie(told: Mapping[str, Any] | None, folders: tuple[str, ...]) -> None:
    assert layer_folders({"GraphDriver": told}) == folders


# --- the steps of several workers -----------------------------------------------------------------


def test_one_sends_for_all(cluster: Cluster) -> None:
    turns, sent = Turns(), []
    both = threading.Barrier(2)

    def send() -> Mapping[str, Delivered]:
        sent.append(1)
        return {ONE: WENT, TWO: DEAD, THREE: WENT}

    found: dict[str, object] = {}

    def ask(place: int) -> None:
        node = cluster.workers[place]
        both.wait(10)
        try:
            found[node.name] = turns.get(cluster, "run", node, send)
        except NodeUnreachable as error:
            found[node.name] = error

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {ONE: WENT, TWO: DEAD}
    assert sent == [1]
    assert turns.take(cluster, "another run", cluster.workers[2]) is None
    assert turns.take(cluster, "run", cluster.workers[2]) == WENT
    assert turns.take(cluster, "run", cluster.workers[2]) is None


def test_waiting_for_another_step_ends_when_cancelled(cluster: Cluster) -> None:
    turns = Turns()

    def send() -> Mapping[str, Delivered]:
        remote.STOP.set()
        with pytest.raises(Cancelled):
            turns.get(cluster, "run", cluster.workers[1], dict)
        return {ONE: WENT}

    try:
        assert turns.get(cluster, "run", cluster.workers[0], send) == WENT
    finally:
        remote.STOP.clear()

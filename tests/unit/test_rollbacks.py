"""Going back: which release is meant, whether it is whole, and what is put back."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tasks.containers import DIGEST_LABEL, Container
from tasks.converge import Outcome
from tasks.errors import NotReady
from tasks.records import Release
from tasks.rollbacks import (
    KEY_OF,
    RESTORE,
    choose,
    found,
    has_ray_of,
    plan_clear,
    problem_with,
    refuse_gone,
    runs,
)
from tasks.scripts import File
from tasks.topology import files
from tests.unit.releases import FABRIC, release
from tests.unit.specs import spec

CLUSTER = spec()
RELEASE = release()
RAY, SERVE = "sparkrail-sparks-ray", "sparkrail-sparks-serve"


def kept(node: str) -> dict[str, File]:
    """What a node keeps of the release."""
    mine = next(each for each in CLUSTER.nodes if each.name == node)
    return {
        name: File(mode=mode, sha256=hashlib.sha256(content).hexdigest())
        for name, content, mode in files(CLUSTER, mine, FABRIC).items()
    }


def test_files_as_they_were_are_no_problem() -> None:
    for node in ("head", "worker1"):
        assert problem_with(RELEASE, node, kept(node)) == ""


@pytest.mark.parametrize(
    ("node", "name", "why"),
    [
        pytest.param("head", "serve.args", "its serve.args is not kept", id="arguments"),
        pytest.param("worker1", "launch", "its launch is not kept", id="script"),
    ],
)
def test_a_file_that_is_gone(node: str, name: str, why: str) -> None:
    have = {each: file for each, file in kept(node).items() if each != name}
    assert problem_with(RELEASE, node, have) == why


def test_a_file_that_was_changed() -> None:
    have = kept("head") | {"node.env": File(mode=0o600, sha256="0" * 64)}
    assert problem_with(RELEASE, "head", have) == "its node.env was changed"


def held(node: str, why: str = "") -> Outcome:
    data = {"found_as": f"name-on-{node}", "boot": f"boot-of-{node}", "why": why}
    return Outcome(step="hold", node=node, status="unchanged", data=data)


def test_each_node_has_the_image_by_its_own_name_and_the_digest_stays() -> None:
    specs = found(RELEASE, [held("head"), held("worker1")])
    assert [each.found_as for each in specs["head"]] == ["name-on-head"] * 2
    assert [each.boot for each in specs["head"]] == ["boot-of-head"] * 2
    for node, mine in specs.items():
        assert [x.digest for x in mine] == [x.digest for x in RELEASE.containers[node]]


def test_all_nodes_that_lack_something_are_named() -> None:
    refuse_gone(RELEASE, [held("head"), held("worker1")])
    with pytest.raises(NotReady) as caught:
        refuse_gone(RELEASE, [held("head", "its image is gone"), held("worker1", "its launch")])
    assert str(caught.value) == (
        f"release {RELEASE.digest} of 2026-11-30T04:00:00+0100 cannot be started again\n"
        "head: its image is gone\nworker1: its launch\n"
        "Nothing was stopped. `sparkrail releases` lists the others."
    )


def containers(state: str = "running") -> dict[str, dict[str, Container]]:
    return {
        node: {
            each.name: Container(
                id=each.name, name=each.name, state=state, labels={DIGEST_LABEL: each.digest}
            )
            for each in specs
        }
        for node, specs in RELEASE.containers.items()
    }


def test_whether_a_release_runs() -> None:
    assert runs(RELEASE, containers())
    assert not runs(RELEASE, containers("exited"))
    assert not runs(RELEASE, containers() | {"worker1": {}})
    other = release(spec(environment={"A": "1"}))
    assert not runs(other, containers())


def test_whether_ray_may_stay_for_a_release() -> None:
    """The server does not matter, and every node does."""
    have = containers()
    assert has_ray_of(RELEASE, have | {"head": {RAY: have["head"][RAY]}})
    assert not has_ray_of(RELEASE, containers("exited"))
    assert not has_ray_of(RELEASE, have | {"worker1": {}})
    assert not has_ray_of(release(containers={}), have)
    assert not has_ray_of(release(spec(environment={"OTHER": "1"})), have)


ROWS = [release(digest="aa1"), release(digest="ab2"), release(digest="c3")]


@pytest.mark.parametrize(
    ("wanted", "running", "chosen"),
    [
        pytest.param("", ROWS[:1], "ab2", id="the one before"),
        pytest.param("", [], "aa1", id="nothing runs: the newest"),
        pytest.param("c", ROWS[:1], "c3", id="by its beginning"),
        pytest.param("aa1", ROWS[:1], "aa1", id="the one that runs"),
    ],
)
def test_choose(wanted: str, running: list[Release], chosen: str) -> None:
    assert choose("sparks", ROWS, wanted, running).digest == chosen


@pytest.mark.parametrize(
    ("rows", "wanted", "said"),
    [
        pytest.param(ROWS, "a", "a may be any of 2 releases", id="two of them"),
        pytest.param(ROWS, "x", "there is no release x", id="none of them"),
        pytest.param([], "", "there is no release to go back to", id="an empty record"),
    ],
)
def test_choose_nothing(rows: list[Release], wanted: str, said: str) -> None:
    with pytest.raises(NotReady, match=said):
        choose("sparks", rows, wanted, [])


def test_the_server_goes_before_ray() -> None:
    assert [step.container.name for step in plan_clear(CLUSTER, containers()["head"])] == [
        SERVE,
        RAY,
    ]
    staying = plan_clear(CLUSTER, containers()["head"], keep=RAY)
    assert [step.container.name for step in staying] == [SERVE]


def test_files_are_put_back_and_what_the_release_had_not_goes(tmp_path: Path) -> None:
    folder = tmp_path / ".sparkrail" / "sparks"
    old, run = folder / "releases" / "old", folder / "run"
    old.mkdir(parents=True)
    run.mkdir()
    (old / "launch").write_text("old script")
    (old / "node.env").write_text("old secret")
    (old / "node.env").chmod(0o600)
    for name in ("launch", "node.env", "serve.args"):
        (run / name).write_text("new")
        (run / name).chmod(0o644)
    argv = ("sh", "-ec", RESTORE, "sh", "sparks", "old")
    subprocess.run(argv, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    assert sorted(path.name for path in run.iterdir()) == ["launch", "node.env"]
    assert (run / "launch").read_text() == "old script"
    assert (run / "node.env").stat().st_mode & 0o777 == 0o600


def test_the_key_that_a_release_was_started_with(tmp_path: Path) -> None:
    kept = tmp_path / ".sparkrail" / "sparks" / "releases"
    for digest, line in (("old", "export VLLM_API_KEY='an old key'\n"), ("open", "")):
        (kept / digest).mkdir(parents=True)
        (kept / digest / "node.env").write_text(f"export VLLM_HOST_IP=10.77.0.1\n{line}")

    def key(digest: str) -> str:
        argv = ("sh", "-c", KEY_OF, "sh", "sparks", digest)
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            argv, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert [key(each) for each in ("old", "open", "gone")] == ["key=an old key", "key=", ""]

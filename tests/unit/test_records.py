"""The record of releases: what it holds, and the steps that keep it."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks import hidden, records
from tasks.record_keeping import DROP, KEEP, LOOK, Have, Write, plan
from tasks.records import READ, Release, as_text, parse_releases, renewed
from tests.unit.releases import release
from tests.unit.specs import spec

NEW = release()
OLD = release(digest="old", at="2026-11-29T04:00:00+0100")


def named(*digests: str) -> list[Release]:
    return [release(digest=digest) for digest in digests]


@pytest.mark.parametrize(
    ("text", "digests"),
    [
        pytest.param("", [], id="absent"),
        pytest.param("\n", [], id="empty"),
        pytest.param(as_text(named("a", "b")).decode(), ["a", "b"], id="newest first"),
        pytest.param('[{"digest": "a"}, 7]', [], id="rows that are none"),
        pytest.param('[{"digest": "a"', [], id="cut off"),
        pytest.param('{"digest": "a"}', [], id="no list"),
    ],
)
def test_parse_releases(text: str, digests: list[str]) -> None:
    assert [row.digest for row in parse_releases(text)] == digests


def test_a_row_of_an_older_sparkrail_is_listed_but_not_restorable() -> None:
    row = {
        "digest": "a",
        "image": "engine:1",
        "image_content": "sha256:1",
        "weights": "w",
        "arguments": ["serve"],
        "versions": {},
        "run": "run-1",
        "at": "2026-11-30T04:00:00+0100",
    }
    [found] = parse_releases(json.dumps([row]))
    assert (found.digest, found.restorable) == ("a", False)
    assert NEW.restorable


def test_a_row_whose_spec_is_none_any_more_is_as_one_of_an_older_sparkrail() -> None:
    """Else no deploy could begin, and none could put another row on top."""
    gone = release(spec={**NEW.spec, "option_of_then": 1})
    [found] = parse_releases(as_text([gone]).decode())
    assert (found.digest, found.restorable) == (NEW.digest, False)
    [renewed_row] = renewed([found], NEW.model_copy(update={"started": ""}))
    assert renewed_row.restorable


def test_a_release_survives_the_record() -> None:
    assert parse_releases(as_text([NEW]).decode()) == [NEW]


def test_no_secret_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "_values", {"s3cr3t-value"})
    text = as_text([release(arguments=("serve", "--api=s3cr3t-value"))]).decode()
    assert "s3cr3t" not in text
    assert "--api=***" in text


def test_a_release_that_names_a_secret_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "_values", {"s3cr3t-value"})
    new = release(arguments=("serve", "--api=s3cr3t-value"))
    both = {"head": True, "worker1": True}
    have = Have((OLD,), both, {"head": (), "worker1": ()})
    [write] = plan(spec(), new, have)
    assert isinstance(write, Write)
    read = tuple(parse_releases(as_text(write.rows).decode()))
    assert plan(spec(), new, Have(read, both, have.others)) == []


@pytest.mark.parametrize(
    ("rows", "new", "digests", "ats"),
    [
        pytest.param([], NEW, [NEW.digest], [NEW.at], id="the first"),
        pytest.param([OLD], NEW, [NEW.digest, "old"], [NEW.at, OLD.at], id="another"),
        pytest.param(
            [OLD], release(digest="old", at="later"), ["old"], [OLD.at], id="the same, started anew"
        ),
        pytest.param(
            named("a", "b", "c", "d", "e"), NEW, [NEW.digest, "a", "b", "c", "d"], None, id="five"
        ),
        pytest.param(
            named("a", "b"), release(digest="b"), ["b", "a"], None, id="one of before: on top"
        ),
    ],
)
def test_renewed(
    rows: list[Release], new: Release, digests: list[str], ats: list[str] | None
) -> None:
    found = renewed(rows, new)
    assert [row.digest for row in found] == digests
    assert ats is None or [row.at for row in found] == ats


def test_what_was_measured_stays_when_nothing_was_started() -> None:
    unstarted = NEW.model_copy(update={"started": "", "canary": None, "versions": {}})
    assert renewed([NEW], unstarted) == [NEW]


def test_a_row_of_an_older_sparkrail_is_completed_by_the_next_deploy() -> None:
    old = release(spec={}, containers={}, canary=None, at="then")
    [found] = renewed([old], NEW.model_copy(update={"started": "", "versions": {}}))
    assert (found.restorable, found.at, found.versions) == (True, "then", NEW.versions)


CLUSTER = spec()


def told(have: Have) -> list[str]:
    return [str(step) for step in plan(CLUSTER, NEW, have)]


@pytest.mark.parametrize(
    ("rows", "kept", "others", "steps"),
    [
        pytest.param(
            (),
            (False, False),
            ((), ()),
            [
                f"keep the files of {NEW.digest} on head",
                f"keep the files of {NEW.digest} on worker1",
                f"record {NEW.digest}",
            ],
            id="the first: files before the record",
        ),
        pytest.param((NEW,), (True, True), ((), ()), [], id="as wanted"),
        pytest.param(
            (NEW,),
            (True, False),
            ((), ()),
            [f"keep the files of {NEW.digest} on worker1"],
            id="a node lost its files",
        ),
        pytest.param(
            (NEW, OLD),
            (True, True),
            (("releases/old",), ("releases/older", "releases/new.tmp")),
            ["drop releases/older on worker1", "drop releases/new.tmp on worker1"],
            id="what is not on record any more",
        ),
    ],
)
def test_plan(
    rows: tuple[Release, ...],
    kept: tuple[bool, bool],
    others: tuple[tuple[str, ...], tuple[str, ...]],
    steps: list[str],
) -> None:
    names = ("head", "worker1")
    have = Have(rows, dict(zip(names, kept, strict=True)), dict(zip(names, others, strict=True)))
    assert told(have) == steps


def test_the_spec_of_a_release_is_reached_as_nodes_are_now() -> None:
    moved = spec(
        head={"address": "10.88.0.9", "gpus": 1, "proxy_command": "dial %h"},
        serve={"port": 8001},
        ssh={"known_hosts": "~/other"},
    )
    then = NEW.cluster(moved)
    assert (then.head.address, then.head.proxy_command) == ("10.88.0.9", "dial %h")
    assert then.ssh == moved.ssh
    assert then.serve.port == 8000
    assert NEW.cluster(spec()) == spec()


# --- what runs on the nodes -----------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    run = tmp_path / ".sparkrail" / "sparks" / "run"
    run.mkdir(parents=True)
    (run / "launch").write_text("script")
    (run / "node.env").write_text("secret")
    (run / "node.env").chmod(0o600)
    return tmp_path


def sh(home: Path, script: str, *arguments: str) -> str:
    argv: Sequence[str] = ("sh", "-ec", script, "sh", "sparks", *arguments)
    done = subprocess.run(
        argv, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_files_are_kept_looked_at_and_dropped(home: Path) -> None:
    folder = home / ".sparkrail" / "sparks"
    assert sh(home, LOOK, "new") == ""
    sh(home, KEEP, "old")
    sh(home, KEEP, "new")
    assert sorted(sh(home, LOOK, "new").split()) == ["releases/old", "same"]
    assert (folder / "releases").stat().st_mode & 0o777 == 0o700
    kept = folder / "releases" / "new" / "node.env"
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("secret", 0o600)

    (folder / "run" / "launch").write_text("edited")
    assert sh(home, LOOK, "new").split() == ["releases/old"]
    sh(home, KEEP, "new")
    assert (folder / "releases" / "new" / "launch").read_text() == "edited"
    sh(home, DROP, "releases/old")
    assert sh(home, LOOK, "new").split() == ["same"]


def test_a_record_that_is_not_there_is_empty(home: Path) -> None:
    assert sh(home, READ, "releases.json") == ""
    (home / ".sparkrail" / "sparks" / "releases.json").write_text("[]\n")
    assert sh(home, READ, "releases.json") == "[]\n"
    assert records.KEPT == 5

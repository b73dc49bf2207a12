"""The circuit breaker: what is refused, and in which words."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from blocks import Cluster, Node
from tasks import failed_releases
from tasks.converge import Run
from tasks.failed_releases import Failed, FailedRelease, failure, parse_failed, refusal
from tests.unit.specs import RUN, spec

FAILED = FailedRelease(
    digest="bad",
    ending="broken",
    run="run-0",
    at="2026-11-30T04:00:00+0100",
    cause="vLLM serve on head: out of memory",
    second="worker join on worker1: no connection",
)
BOTH = Failed(releases=(FAILED, FAILED.model_copy(update={"digest": "worse", "ending": "by-hand"})))
FORCED = Run(id="run-1", who="ada", force=True)
NIGHT = Run(id="run-1", who="ada", attended=False)
AGAIN = Failed(releases=(FAILED.model_copy(update={"times": 2}),))


@pytest.mark.parametrize(
    ("failed", "digest", "run", "refused"),
    [
        pytest.param(Failed(), "bad", RUN, False, id="none failed"),
        pytest.param(BOTH, "bad", NIGHT, True, id="at night: the newest"),
        pytest.param(BOTH, "worse", NIGHT, True, id="at night: one before"),
        pytest.param(BOTH, "other", NIGHT, False, id="at night: another"),
        pytest.param(BOTH, "bad", RUN, False, id="by a person: once more"),
        pytest.param(AGAIN, "bad", RUN, True, id="by a person: twice is enough"),
        pytest.param(BOTH, "worse", RUN, True, id="by a person: it was left by hand"),
        pytest.param(AGAIN, "bad", FORCED, False, id="twice, by force"),
        pytest.param(BOTH, "bad", FORCED, False, id="the newest, by force"),
    ],
)
def test_refusal(failed: Failed, digest: str, run: Run, refused: bool) -> None:
    assert (refusal(failed, digest, run) is not None) == refused


def test_what_is_told() -> None:
    assert str(refusal(BOTH, "bad", NIGHT)) == (
        "release bad is not tried again: its rollback failed too, and everything was stopped at "
        "2026-11-30T04:00:00+0100 by run run-0\n"
        "It failed by: vLLM serve on head: out of memory\n"
        "The rollback failed by: worker join on worker1: no connection\n"
        "Nothing was touched. Change the spec, the image or the model; or, when the cause is "
        "mended, deploy yourself."
    )
    again = str(refusal(AGAIN, "bad", RUN))
    assert "not tried again: it failed 2 times; its rollback failed too, " in again
    assert again.endswith("deploy with --force.")


@pytest.mark.parametrize(
    "text", ["", "\n", "{", '{"releases": 7}', '["bad"]'], ids=["absent", *"abcd"]
)
def test_what_cannot_be_read_keeps_nobody_from_trying(text: str) -> None:
    assert parse_failed(text) == Failed()


def test_a_failure_survives_its_file() -> None:
    made = failure("bad", RUN, "rolled-back", "why")
    assert (made.cause, made.second, made.run) == ("why", "", "run-1")
    noted = BOTH.noted(made)
    assert noted.releases == (made.model_copy(update={"times": 2}), BOTH.releases[1])
    assert parse_failed(noted.model_dump_json(indent=2)) == noted


def test_a_release_that_a_person_went_back_to_counts_as_failed_no_more() -> None:
    """Else each night would end with: it was rolled back by hand; and that is what runs."""
    worse = BOTH.releases[1]
    assert BOTH.rolled_back_to("bad").releases == (worse,)
    other = BOTH.rolled_back_to("good")
    assert [(each.digest, each.ending) for each in other.releases] == [
        ("bad", "by-hand"),
        ("worse", "by-hand"),
    ]
    back_and_forth = Failed(releases=(worse,)).rolled_back_to("worse")
    assert back_and_forth == Failed()
    assert Failed().rolled_back_to("bad") == Failed()


def test_only_the_last_rollback_tells_whether_something_runs() -> None:
    assert BOTH.is_broken
    assert not Failed(releases=BOTH.releases[::-1]).is_broken
    assert not Failed().is_broken
    errors = [
        refusal(Failed(releases=each), "bad", NIGHT)
        for each in (BOTH.releases, BOTH.releases[::-1])
    ]
    assert [error and error.heals for error in errors] == [False, True]


class Docker:
    """The images of an engine: a name can be given to another, and one without any is gone."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.images = self
        self.api = SimpleNamespace(containers=lambda **_: [])

    def get(self, name: str) -> Any:
        if name not in self.names:
            raise ImageNotFound(name)
        image_id = self.names[name]

        def tag(repository: str, tag: str) -> None:
            self.names[f"{repository}:{tag}"] = image_id

        tags = [each for each, found in self.names.items() if found == image_id]
        layers = {"Type": "layers", "Layers": [image_id]}
        attrs = {"Id": image_id, "Architecture": "arm64", "Os": "linux", "RootFS": layers}
        return SimpleNamespace(id=image_id, short_id=image_id, tags=tags, tag=tag, attrs=attrs)

    def list(self, filters: dict[str, str]) -> list[Any]:
        mine = [name for name in self.names if name.startswith(f"{filters['reference']}:")]
        return [self.get(name) for name in mine]

    def remove(self, name: str) -> None:
        del self.names[name]


def test_of_many_images_that_failed_in_a_row_the_last_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each night with another bad image would leave one on the head."""
    docker = Docker()

    @contextlib.contextmanager
    def engine(_cluster: Cluster, _node: Node) -> Iterator[Docker]:
        yield docker

    monkeypatch.setattr(failed_releases, "engine", engine)
    monkeypatch.setattr(failed_releases, "read_failed", lambda _: Failed())
    monkeypatch.setattr(failed_releases, "write_failed", lambda *_: None)
    cluster = spec()
    for night in range(1, 4):
        docker.names["engine:1"] = f"sha256:{night}"  # By its owner, who has pulled another.
        failed_releases.note_failure.fn(
            cluster, cluster.head, RUN, failure(f"bad{night}", RUN, "rolled-back"), "good"
        )
    assert docker.names == {"engine:1": "sha256:3", "sparkrail/sparks-failed:3": "sha256:3"}

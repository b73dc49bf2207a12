"""What `destroy` takes away, in which order."""

import pytest

from tasks.containers import Container
from tasks.removal import Left, plan
from tests.unit.specs import spec


def container(name: str) -> Container:
    return Container(id=f"id of {name}", name=name, state="running")


RAY, SERVE = container("sparkrail-sparks-ray"), container("sparkrail-sparks-serve")
FOLDER = "/root/.sparkrail/sparks"


@pytest.mark.parametrize(
    ("left", "steps"),
    [
        pytest.param(Left(), [], id="nothing"),
        pytest.param(
            Left(containers=(RAY, SERVE), folder=FOLDER),
            [
                "remove sparkrail-sparks-serve (destroy)",
                "remove sparkrail-sparks-ray (destroy)",
                "remove /root/.sparkrail/sparks",
            ],
            id="everything: the server before Ray, files last",
        ),
        pytest.param(
            Left(containers=(RAY,)), ["remove sparkrail-sparks-ray (destroy)"], id="a worker's Ray"
        ),
        pytest.param(Left(folder=FOLDER), [f"remove {FOLDER}"], id="only files"),
    ],
)
def test_plan(left: Left, steps: list[str]) -> None:
    assert [str(step) for step in plan(spec(), left)] == steps

"""A dry run and a check change nothing, whatever they find: all of both nodes is compared."""

import pytest

from tests.lab import snapshots
from tests.lab.product import DONE, Product

pytestmark = pytest.mark.lab


def changes_nothing(stub: Product, *outcomes: str) -> list[set[str]]:
    """Deploy and destroy, both dry; the rows that each would change."""
    before = snapshots.take(stub)
    told = [stub.run(verb, "--dry-run") for verb in ("deploy", "destroy")]
    assert snapshots.differences(before, snapshots.take(stub)) == []
    for said, outcome in zip(told, outcomes, strict=True):
        assert (said.code, said.outcome) == (DONE, outcome), said.error
        assert "changed" not in {row["outcome"] for row in said.document["steps"]}
    return [said.changed for said in told]


def test_three_states(stub: Product) -> None:
    started = {
        "Ray head start on head",
        "worker join on worker1",
        "cluster verification on head",
        "vLLM serve on head",
        "canary on head",
        "record on head",
    }
    relayed = {"script relay on head", "script relay on worker1"}
    stub.destroy()
    stub.on("worker1", "rm -rf /models/tiny")
    deploy, destroy = changes_nothing(stub, "planned", "unchanged")
    assert deploy == {
        "weights sync on worker1",
        "engine verdict on head",
        *relayed,
        *started,
    }
    assert destroy == set()

    stub.deploy()
    deploy, destroy = changes_nothing(stub, "unchanged", "planned")
    assert deploy == set()
    assert destroy == {"remove on head", "remove on worker1"}

    stub.on("worker1", f"docker rm --force --volumes {stub.ray}")
    stub.on("worker1", f"echo '# edited' >> /root/.sparkrail/{stub.name}/run/launch")
    deploy, destroy = changes_nothing(stub, "planned", "planned")
    assert deploy == {
        "script relay on worker1",
        "stop on head",
        *started - {"Ray head start on head"},
    }

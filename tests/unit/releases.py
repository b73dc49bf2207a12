"""A release of the two-node spec, as the record has it."""

from typing import Any

from blocks import Cluster
from tasks.records import Figures, OnNode, Release, spec_digest
from tasks.releases import Wanted
from tasks.topology import Fabric, arguments, containers, files
from tests.unit.specs import spec

FABRIC = Fabric(interface="eth1")


def wanted(cluster: Cluster, content: str = "sha256:1", weights: str = "w") -> Wanted:
    return Wanted(
        nodes={
            node.name: containers(
                cluster, node, "/root", FABRIC, files(cluster, node, FABRIC), content, weights
            )
            for node in cluster.nodes
        },
        arguments=arguments(cluster),
        environment={node.name: dict(cluster.environment) for node in cluster.nodes},
    )


def release(cluster: Cluster | None = None, **changes: Any) -> Release:
    cluster = cluster or spec()
    want = wanted(cluster)
    made = Release(
        digest=want.digest,
        at="2026-11-30T04:00:00+0100",
        run="run-1",
        image=cluster.image.name,
        image_content="sha256:1",
        weights="w",
        arguments=want.arguments,
        versions={"vllm": "0.32.0", "ray": "2.60.0"},
        canary=Figures(seconds=0.5, tokens_per_second=20),
        started="2026-11-30T04:00:00+0100",
        nodes={
            node.name: OnNode(interface="eth1", boot_id="boot-1", environment=cluster.environment)
            for node in cluster.nodes
        },
        spec_digest=spec_digest(cluster),
        spec=cluster.model_dump(mode="json"),
        containers=want.nodes,
    )
    return made.model_copy(update=changes)

"""The two-node spec that most tests of the steps start from."""

from collections.abc import Mapping
from typing import Any

from blocks import Cluster
from tasks.converge import Run

RUN = Run(id="run-1", who="ada@control")

DOCUMENT: dict[str, Any] = {
    "name": "sparks",
    "head": {"name": "head", "address": "10.88.0.1", "fabric_address": "10.77.0.1"},
    "workers": [{"name": "worker1", "fabric_address": "10.77.0.2"}],
    "image": {"name": "engine:1"},
    "model": {"name": "tiny", "path": "/models/tiny"},
    "serve": {"tensor_parallel": 2},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[key] = merged(inner or {}, value) if both else value
    return result


def spec(**changes: Any) -> Cluster:
    """The two nodes, with some parts changed."""
    return Cluster.model_validate(merged(DOCUMENT, changes))


def workers(count: int) -> dict[str, Any]:
    """Changes for a spec with so many workers."""
    nodes = [
        {"name": f"worker{number}", "fabric_address": f"10.77.0.{number + 1}"}
        for number in range(1, count + 1)
    ]
    return {"workers": nodes, "serve": {"tensor_parallel": count + 1}}

"""Cluster specs as files: `deployments/clusters/NAME.yaml`, or a path."""

from pathlib import Path

import yaml

from blocks import Cluster

CLUSTERS = Path(__file__).resolve().parents[1] / "deployments" / "clusters"


def load_cluster(name_or_path: str) -> Cluster:
    """The spec of that name."""
    path = CLUSTERS / f"{name_or_path}.yaml"
    return Cluster.model_validate(yaml.safe_load(path.read_text()))

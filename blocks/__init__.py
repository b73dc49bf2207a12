"""The nouns that a user writes: the cluster spec, and the blocks for secrets."""

from blocks.cluster import (
    Cluster,
    Head,
    Image,
    Model,
    Nightly,
    Node,
    Proof,
    Ray,
    Serve,
    Ssh,
    Worker,
)
from blocks.residue import Holder, Residue
from blocks.watching import Canary, Watch

__all__ = [
    "Canary",
    "Cluster",
    "Head",
    "Holder",
    "Image",
    "Model",
    "Nightly",
    "Node",
    "Proof",
    "Ray",
    "Residue",
    "Serve",
    "Ssh",
    "Watch",
    "Worker",
]

"""The page cache of the model's files: on unified memory it takes what the GPU needs."""

from pydantic import BaseModel

from blocks import Cluster, Node
from tasks.converge import log
from tasks.programs import run_program
from tasks.remote import connect

TIMEOUT = 600.0
MIB = 2**20


class Released(BaseModel, frozen=True):
    """How much of the files was cached before and after, in bytes; and what was free of all."""

    files: int
    unknown: int  # Files of other users, of which the kernel does not tell.
    before: int
    after: int
    free_before: int
    free_after: int

    def __str__(self) -> str:
        if self.before < MIB:
            return ""
        kept = f", {self.after // MIB} MiB stay (in use)" if self.after >= MIB else ""
        return (
            f"page cache of the model: {(self.before - self.after) // MIB} of "
            f"{self.before // MIB} MiB released{kept}, "
            f"free memory {self.free_before // MIB} -> {self.free_after // MIB} MiB"
        )


def release_page_cache(cluster: Cluster, node: Node, *, dry_run: bool = False) -> Released:
    """Give up what is cached of the model's files, which needs no root; tells the effect."""
    said = run_program(
        connect(cluster, node),
        "page_cache",
        "look" if dry_run else "release",
        cluster.model.path,
        timeout=TIMEOUT,
    )
    released = Released.model_validate(said)
    if str(released):
        log.info("%s: %s", node.name, released)
    return released

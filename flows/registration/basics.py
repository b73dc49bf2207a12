"""What every cluster on a Prefect server shares: the types of our blocks, and the work pool."""

from collections.abc import Iterator
from typing import Any

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from blocks.secrets import EngineSecrets, SSHCredentials
from flows.registration.changes import Change, Outcome
from tasks.errors import SparkrailError

BLOCKS: tuple[type[Block], ...] = (SSHCredentials, EngineSecrets)


def ensure_block_types(client: SyncPrefectClient) -> Iterator[Change]:
    """Prefect's own registration is idempotent; looking before and after tells what it did."""
    for block in BLOCKS:
        before = _block_type(client, block)
        register: Any = block.register_type_and_schema
        register()
        after = _block_type(client, block)
        outcome: Outcome = "updated" if before else "created"
        yield Change(
            kind="block type",
            name=block.get_block_type_slug(),
            outcome="unchanged" if before == after else outcome,
        )


def ensure_pool(client: SyncPrefectClient, name: str) -> Change:
    """A work pool whose Prefect workers run flows as processes, in this checkout."""
    try:
        have = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=name, type=ProcessWorker.type, base_job_template=template)
        )
        return Change(kind="work pool", name=name, outcome="created")
    if have.type != ProcessWorker.type:
        raise SparkrailError(
            f"work pool {name}: its type is {have.type}, and ours must be {ProcessWorker.type}",
            remedy=f"Delete it, or name another one than {name} in deployments/prefect.yaml.",
        )
    return Change(kind="work pool", name=name, outcome="unchanged")


def _block_type(client: SyncPrefectClient, block: type[Block]) -> object:
    """What of a block type a registration may change; None when there is none."""
    try:
        have = client.read_block_type_by_slug(block.get_block_type_slug())
    except ObjectNotFound:
        return None
    try:
        schema = client.read_block_schema_by_checksum(
            block._calculate_schema_checksum(), version=block.get_block_schema_version()
        )
    except ObjectNotFound:
        schema = None
    return have.model_dump(exclude={"created", "updated"}), schema and schema.id

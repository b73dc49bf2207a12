"""The automations of one cluster: what `deployments/automations.yaml` wants, and what is there."""

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from flows.registration.changes import Change
from flows.registration.templates import AUTOMATIONS, filled_in
from tasks.errors import SparkrailError

NOTIFY = "SPARKRAIL_NOTIFY"
NOBODY = UUID(int=0)  # Stands for the block where there is none; never sent.


def notification_block(client: SyncPrefectClient, reference: str) -> UUID:
    """The id of the block that notifications go to, `TYPE/NAME` as the Prefect UI shows it."""
    kind, _, name = reference.partition("/")
    try:
        document = client.read_block_document_by_name(name, kind, include_secrets=False)
    except ObjectNotFound as error:
        raise SparkrailError(
            f"--notify {reference}: there is no such block",
            remedy="Create it in the Prefect UI (Blocks), of a type such as custom-webhook or "
            "slack-webhook, and give it as TYPE/NAME.",
        ) from error
    schema = document.block_schema
    if schema is None or "notify" not in schema.capabilities:
        raise SparkrailError(
            f"--notify {reference}: a block of the type {kind} cannot notify",
            remedy="Take one that can, such as custom-webhook/NAME or slack-webhook/NAME.",
        )
    return document.id


def ensure_automations(
    client: SyncPrefectClient, variables: Mapping[str, str], block: UUID | None
) -> Iterator[Change]:
    """By name: created, or changed in place; one that a person has switched off stays off.

    Without a block, those that send notifications are left as they are.
    """
    document = filled_in(AUTOMATIONS, {**variables, NOTIFY: str(block or NOBODY)})
    for each in document["automations"]:
        want = AutomationCore.model_validate(each)
        if block is None and _notifies(each):
            if client.read_automations_by_name(want.name):
                why = "made with --notify; give it again to change it"
                yield Change(kind="automation", name=want.name, outcome="left", detail=why)
            continue
        yield _ensure(client, want)


def _notifies(automation: Mapping[str, Any]) -> bool:
    return any(action["type"] == "send-notification" for action in automation["actions"])


def _ensure(client: SyncPrefectClient, want: AutomationCore) -> Change:
    have = client.read_automations_by_name(want.name)
    if not have:
        client.create_automation(want)
        return Change(kind="automation", name=want.name, outcome="created")
    want = want.model_copy(update={"enabled": have[0].enabled})
    detail = "" if want.enabled else "switched off"
    if want.model_dump() == have[0].model_dump(include=set(AutomationCore.model_fields)):
        return Change(kind="automation", name=want.name, outcome="unchanged", detail=detail)
    client.update_automation(have[0].id, want)
    return Change(kind="automation", name=want.name, outcome="updated", detail=detail)

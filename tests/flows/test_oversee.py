"""Which deployment the watch starts, on a real Prefect server."""

from typing import Any

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient

from flows.oversee import _on_demand
from tests.flows.clusters import Spec


def test_the_watch_deploys_by_the_cluster_s_own_deployment(
    first: Spec, client: SyncPrefectClient
) -> None:
    @flow
    def asking(cluster: str) -> Any:
        return str(_on_demand(cluster))

    wanted = client.read_deployment_by_name("deploy/on-demand")
    assert asking(first.name) == str(wanted.id)
    assert asking("another") == "None"
    assert _on_demand(first.name) is None

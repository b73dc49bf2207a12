"""Which releases the head has on record."""

from typing import Any

from prefect import flow

from flows.steps import Steps, as_state, conduct, named
from tasks.failed_releases import not_tried
from tasks.records import Release
from tasks.rollbacks import recorded


@flow(name="releases", flow_run_name=named("releases"), persist_result=False)
def releases(cluster: str) -> Any:
    """List what was deployed, newest first; changes nothing.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, list_releases, dry_run=True))


def list_releases(steps: Steps) -> None:
    """The record, and the release that failed last, if the breaker keeps it from being tried."""
    rows = steps.one(recorded).data
    steps.tables["releases"] = [as_row(each) for each in rows]
    steps.tables |= not_tried(steps.cluster)


def as_row(release: Release) -> dict[str, str]:
    """A release for people."""
    canary = release.canary
    return {
        "release": release.digest,
        "deployed": release.at,
        "run": release.run,
        "image": f"{release.image} ({release.image_content[:12]})",
        "weights": release.weights[:12],
        "arguments": " ".join(release.arguments[2:]),
        "vLLM": release.versions.get("vllm", ""),
        "Ray": release.versions.get("ray", ""),
        "answers in": f"{canary.seconds:.2f} s" if canary else "",
        "tokens/s": f"{canary.tokens_per_second:.1f}" if canary else "",
    }

"""How fast the running model is, and how fast it was."""

from typing import Any

from prefect import flow

from flows.steps import Steps, as_state, conduct, named
from tasks.benchmarks import Benchmark, chart, run_benchmark
from tasks.secret_values import load_secrets
from tasks.topology import endpoint_of

SHOWN = 15


@flow(name="bench", flow_run_name=named("bench"), persist_result=False)
def bench(cluster: str) -> Any:
    """Measure the running model by one request and by eight at once; keeps the history.

    Args:
        cluster: Name of a file in deployments/clusters, or a path.
    """
    return as_state(conduct(cluster, measure))


def measure(steps: Steps) -> None:
    """No lock: it changes nothing but its own history."""
    load_secrets(steps.cluster)
    steps.endpoint = endpoint_of(steps.cluster)
    history: list[Benchmark] = steps.one(run_benchmark).data[-SHOWN:]
    steps.tables["benchmarks"] = [as_row(each) for each in history]
    steps.chart = chart(history)


def as_row(each: Benchmark) -> dict[str, str]:
    """A benchmark for people."""
    return {
        "at": each.at,
        "release": each.release,
        "tokens/s": f"{each.single:.1f}",
        "tokens/s by eight": f"{each.eight:.1f}",
        "first token": f"{each.first_token:.3f} s",
        "first token of eight": f"{each.first_token_of_eight:.3f} s",
        "served others": "yes" if each.busy else "",
    }

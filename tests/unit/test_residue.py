"""Who else holds GPU memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.containers import CLUSTER_LABEL, Container
from tasks.converge import Ready, Waiting
from tasks.node_facts import DockerFacts, GpuHolder, NodeFacts, Process
from tasks.residue import describe, judge, strangers
from tests.unit.specs import spec

FACTS = NodeFacts.model_validate_json(
    (Path(__file__).parent / "data" / "facts" / "lab-head.json").read_text()
)
OURS, THEIRS = "a" * 64, "b" * 64


def holder(pid: int, *, container: str = "", known: bool = True, **more: Any) -> GpuHolder:
    process = Process(
        pid=pid, pgid=pid, user="root", command="python3", started=1.0, container=container
    )
    values = {"name": "VLLM::Worker_TP0", "used_mib": 95245, "process": process if known else None}
    return GpuHolder(pid=pid, **values | more)


def facts(*holders: GpuHolder, docker: bool = True) -> NodeFacts:
    containers = tuple(
        Container(id=id, name=f"c{id[0]}", state="running", labels={CLUSTER_LABEL: cluster})
        for id, cluster in ((OURS, "sparks"), (THEIRS, "other"))
    )
    engine = DockerFacts(
        version="28.5.2",
        api_version="1.51",
        root="/var/lib/docker",
        store="classic",
        storage_driver="overlay2",
        runtimes=("runc",),
        architecture="x86_64",
        image=None,
        containers=containers,
    )
    changes = {"gpu_holders": holders, "docker": engine if docker else None}
    return FACTS.model_copy(update=changes)


@pytest.mark.parametrize(
    ("found", "pids"),
    [
        pytest.param(facts(), [], id="nobody"),
        pytest.param(facts(holder(1, container=OURS)), [], id="a container of ours"),
        pytest.param(facts(holder(2, container=THEIRS)), [2], id="another cluster's container"),
        pytest.param(facts(holder(3)), [3], id="a process of the node"),
        pytest.param(facts(holder(4, known=False)), [4], id="a process that we cannot see"),
        pytest.param(
            facts(holder(5, container=OURS), docker=False), [5], id="docker does not tell"
        ),
        pytest.param(facts(holder(6, container=OURS), holder(7, container=THEIRS)), [7], id="both"),
    ],
)
def test_strangers(found: NodeFacts, pids: list[int]) -> None:
    assert [each.pid for each in strangers(spec(), found)] == pids


def test_describe() -> None:
    desktop = holder(9, name="/usr/lib/xorg/Xorg", used_mib=None)
    assert describe([holder(8), desktop]) == (
        "pid 8 (VLLM::Worker_TP0) holds 95245 MiB; "
        "pid 9 (/usr/lib/xorg/Xorg) holds an unknown amount"
    )
    assert describe([]) == ""


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        pytest.param(facts(), Ready([]), id="nobody"),
        pytest.param(facts(holder(3)), Ready([holder(3)]), id="a stranger is reported"),
        pytest.param(
            facts(holder(4, known=False, name="[Not Found]")),
            Waiting("ended processes still hold memory: pid 4 ([Not Found]) holds 95245 MiB"),
            id="the driver still lists a process that has ended",
        ),
        pytest.param(
            facts(holder(5, known=False)),
            Ready([holder(5, known=False)]),
            id="a process in another PID namespace",
        ),
    ],
)
def test_whether_the_memory_is_back(found: NodeFacts, answer: Ready | Waiting) -> None:
    assert judge(spec(), found) == answer


def test_the_facts_used_here_are_a_captured_answer() -> None:
    assert json.loads(FACTS.model_dump_json())["hostname"] == "head"

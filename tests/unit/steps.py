"""Steps for tests of how steps are run; what each does is told by its arguments."""

from collections.abc import Callable

from blocks import Cluster, Node
from flows.runners import Call, call
from tasks.converge import Outcome, Run, Status, step

Do = Callable[[Node], Status]


@step("lift")
def lift(cluster: Cluster, node: Node, run: Run, do: Do) -> Outcome:  # noqa: ARG001
    """Lift something on a node."""
    return Outcome(
        step="lift", node=node.name, status=do(node), detail="by hand", data={"of": "it"}
    )


@step("carry")
def carry(cluster: Cluster, node: Node, run: Run, do: Do) -> Outcome:  # noqa: ARG001
    """Carry something to a node."""
    return Outcome(step="carry", node=node.name, status=do(node))


def unchanged(_node: Node) -> Status:
    return "unchanged"


def changed(_node: Node) -> Status:
    return "changed"


def planned(_node: Node) -> Status:
    return "planned"


def raising(error: Exception) -> Do:
    def do(_node: Node) -> Status:
        raise error

    return do


def lifts(cluster: Cluster, *todo: Do) -> list[Call]:
    """One step per node, in the nodes' order."""
    return [call(lift, node=node, do=do) for node, do in zip(cluster.nodes, todo, strict=True)]

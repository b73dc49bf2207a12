"""Lists the nodes of a Ray cluster; runs inside the head's container, prints one JSON document.

Argument: {"gcs": address, "wanted": [addresses that must be alive], "timeout": seconds to wait for
them, "excess": seconds to wait for others to go, "bundles": a placement group to ask for, or none}.
Answers as soon as exactly the wanted ones are alive in two looks in a row, else at the deadline.
Asks the GCS itself: `ray.init` would start a driver (slower by seconds), and `ray status` prints a
snapshot that is up to five seconds old.
"""

import json
import os
import signal
import socket
import sys
import time
from typing import Any

# The GCS client itself waits much longer for a head that is dead (41 s in Ray 2.60).
QUICK = {"RAY_py_gcs_connect_timeout_s": "2", "RAY_gcs_rpc_server_connect_timeout_s": "1"}
CONNECT_SECONDS = 5
GRANT_SECONDS = 10
DRIVER_SECONDS = 30


def main(asked: Any) -> None:
    host, _, port = asked["gcs"].rpartition(":")
    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    signal.alarm(int(asked["timeout"]) + 15 + DRIVER_SECONDS)
    os.environ.update(QUICK)
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(
        GcsClientOptions.create(
            asked["gcs"], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
        )
    )
    nodes, settled = wait(state, asked)
    document: dict[str, Any] = {"nodes": nodes}
    if settled and asked.get("bundles"):
        document["placement"] = place(asked["gcs"], asked["bundles"], state)
    print(json.dumps(document), flush=True)
    # Not sys.exit: Ray's threads would keep the process for another second.
    os._exit(0)


def wait(state: Any, asked: Any) -> "tuple[list[dict[str, Any]], bool]":
    """The table, and whether it holds exactly the wanted nodes."""
    wanted = sorted(asked["wanted"])
    began = time.monotonic()
    before = None
    while True:
        nodes = [trim(row) for row in state.node_table()]
        alive = sorted(str(row["address"]) for row in nodes if row["alive"])
        passed = time.monotonic() - began
        if alive == before and alive == wanted:
            return nodes, True
        # A node that was killed stays in the table for up to 15 s; who stays longer lives.
        limit = asked["timeout"] if set(wanted) - set(alive) else asked["excess"]
        if passed > min(limit, asked["timeout"]):
            return nodes, False
        before = alive
        time.sleep(0.3)


def trim(row: "dict[str, Any]") -> "dict[str, Any]":
    return {
        "id": row["NodeID"],
        "alive": row["Alive"],
        "address": row["NodeManagerAddress"],
        "resources": row.get("Resources", {}),
    }


def place(gcs: str, bundles: "list[dict[str, float]]", state: Any) -> "dict[str, Any]":
    """Whether Ray grants the placement group that the engine will ask for; given back at once."""
    import ray
    from ray.util import placement_group, remove_placement_group

    began = time.monotonic()
    ray.init(address=gcs, log_to_driver=False, configure_logging=False, logging_level=40)
    group = placement_group(bundles, strategy="PACK")
    granted = bool(group.wait(GRANT_SECONDS))
    free = state.available_resources_per_node() if not granted else {}
    remove_placement_group(group)
    ray.shutdown()
    return {
        "granted": granted,
        "free_gpus": {node: found.get("GPU", 0.0) for node, found in free.items()},
        "seconds": round(time.monotonic() - began, 2),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

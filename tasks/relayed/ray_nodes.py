"""Lists the nodes of a Ray cluster; runs inside the head's container, prints one JSON document.

Arguments: GCS address, the addresses that must be alive (comma separated), seconds to wait for
them. Answers as soon as exactly these are alive in two looks in a row, else at the deadline.
Asks the GCS itself: `ray.init` would start a driver (slower by seconds), and `ray status` prints a
snapshot that is up to five seconds old.
"""

import json
import os
import signal
import sys
import time


def main(address: str, wanted: str, timeout: str) -> None:
    # The GCS client itself waits much longer for a head that is dead (41 s in Ray 2.60).
    signal.alarm(int(float(timeout)) + 15)
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(
        GcsClientOptions.create(
            address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
        )
    )
    deadline = time.monotonic() + float(timeout)
    before = None
    while True:
        nodes = [trim(row) for row in state.node_table()]
        alive = sorted(str(row["address"]) for row in nodes if row["alive"])
        settled = alive == before and alive == sorted(wanted.split(","))
        if settled or time.monotonic() > deadline:
            print(json.dumps({"nodes": nodes}), flush=True)
            # Not sys.exit: Ray's threads would keep the process for another second.
            os._exit(0)
        before = alive
        time.sleep(0.3)


def trim(row: dict[str, object]) -> dict[str, object]:
    return {
        "id": row["NodeID"],
        "alive": row["Alive"],
        "address": row["NodeManagerAddress"],
        "resources": row.get("Resources", {}),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

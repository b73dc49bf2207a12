"""docker's engine on a node: ended and started again."""

from tests.lab.product import Product

END = """
pid=$(pgrep -x dockerd)
mapfile -d '' -t argv < /proc/$pid/cmdline
kill "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
"""
BEGIN = """
setsid "${argv[@]}" </dev/null >>/var/log/dockerd.log 2>&1 &
for _ in $(seq 600); do docker version >/dev/null 2>&1 && exit 0; sleep 0.1; done
exit 1
"""
CUT_SHORT = """
import json, sys
with open(sys.argv[1], "r+") as file:
    container = json.load(file)
    container["State"].update(RemovalInProgress=True, Running=False, Pid=0)
    file.seek(0)
    json.dump(container, file)
    file.truncate()
"""


def restart(product: Product, node: str) -> None:
    """As `systemctl restart docker` does it."""
    product.on(node, f"{END}{BEGIN}")


def cut_removal_short(product: Product, node: str, container: str) -> None:
    """As a power cut in the middle of `docker rm`: the container is there, and dead."""
    product.on(
        node,
        f"""
        file=$(docker info --format '{{{{.DockerRootDir}}}}')/containers/$(
            docker inspect --format '{{{{.Id}}}}' {container})/config.v2.json
        docker kill {container}
        {END}
        python3 -c '{CUT_SHORT}' "$file"
        {BEGIN}
        """,
    )

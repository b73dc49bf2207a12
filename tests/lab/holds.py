"""Programs on the nodes that wait, so that a test meets a deploy in the act."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.product import Product, poll

# Before /usr/bin on the PATH. Of its calls all but those that are like `passed` wait.
PROGRAM = """\
#!/bin/sh
case "$*" in {passed}) exec /usr/bin/{name} "$@";; esac
while [ -e /run/held ]; do sleep 0.1; done
exec /usr/bin/{name} "$@"
"""

# Another process takes the server's port on a node, and gives it back.
OCCUPY = "nohup python3 -m http.server 8000 >/dev/null 2>&1 & echo $! > /run/occupied.pid"
FREE = "[ ! -e /run/occupied.pid ] || { kill $(cat /run/occupied.pid); rm /run/occupied.pid; }"


class Hold:
    """A program that waits on some nodes until it is let go."""

    def __init__(self, product: Product, name: str, nodes: list[str], passed: str) -> None:
        self._product, self._nodes = product, nodes
        self._place = f"/usr/local/bin/{name}"
        program = PROGRAM.format(name=name, passed=passed)
        for node in nodes:
            product.on(node, f"touch /run/held; cat > {self._place}", program.encode())
            product.on(node, f"chmod 755 {self._place}")

    def reached(self) -> bool:
        """Whether it waits on all of these nodes, for a run of sparkrail."""
        waiting = [text for text in self._product.of_runs().values() if self._place in text]
        return all(any(text.startswith(f"{node}: ") for text in waiting) for node in self._nodes)

    def wait(self, timeout: float = 120) -> None:
        poll(self.reached, timeout, what=self._product.of_runs)

    def let_go(self) -> None:
        for node in self._nodes:
            self._product.on(node, f"rm -f /run/held {self._place}")


@contextmanager
def held_facts(product: Product) -> Iterator[Hold]:
    """The next deploy hangs in `facts` on every node for half a minute, as with a bad disk."""
    # The lock is held by a program of python3 too.
    hold = Hold(product, "python3", product.nodes, passed="*answer_beats*")
    try:
        yield hold
    finally:
        hold.let_go()


@contextmanager
def held_weights(product: Product) -> Iterator[Hold]:
    """The next deploy by rsync hangs in `weights sync`: a file is to be sent, and it waits."""
    assert product.document["weights"]["transport"] == "rsync"
    product.on("worker1", f"rm -f {product.document['model']['path']}/config.json")
    hold = Hold(product, "rsync", ["head"], passed="--version")
    try:
        yield hold
    finally:
        hold.let_go()


@contextmanager
def held_load(product: Product) -> Iterator[Hold]:
    """The next deploy that sends worker1 an image hangs there in `docker load`."""
    hold = Hold(product, "docker", ["worker1"], passed="system*|ps*|tag*|image*")
    try:
        yield hold
    finally:
        hold.let_go()

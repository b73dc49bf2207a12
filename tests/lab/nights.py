"""Nights in a row, as they may come: `python -m tests.lab.nights SPEC-FOLDER` on a lab that is up.

Each night something happens, by a seed, then one plain deploy runs. Whatever it was: in the morning
the model answers, a night that failed is rolled back, nothing of any run is left, and the nodes
hold no more than before.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import engine_image, spec
from tests.lab.layout import Lab, Shape, cache_home
from tests.lab.product import (
    DONE,
    FAILED,
    STUB,
    STUB_TAG,
    Product,
    Said,
    lab_command,
    load_stub,
    poll,
    preload,
    use_stub,
)

ENDS_AT_ONCE = b"#!/bin/sh\necho 'RuntimeError: this image is no good' >&2\nexit 1\n"
DAMAGE = """
file=$(ls /models/tiny/*.safetensors | head -n 1)
printf %s "$1" | dd of="$file" bs=1 seek=5000 conv=notrunc status=none
"""
USE = """\
docker image ls --all --quiet | sort -u | wc -l
docker volume ls --quiet | wc -l
du -sm /var/lib/docker /root/.sparkrail | cut -f1 | paste -sd' '"""


@dataclass
class World:
    """What there is at the moment: the spec's arguments, and the engine on the head."""

    product: Product
    length: int = 1024
    image: int = 0
    tried: list[str] = field(default_factory=list)

    def spec(self, *arguments: str) -> Product:
        wanted = arguments or (f"--max-model-len={self.length}",)
        return self.product.but(
            self.product.folder, lambda document: document["serve"].update(arguments=[*wanted])
        )

    def load(self, vllm: bytes) -> None:
        """Another engine under the image's name on the head."""
        files = {"usr/local/bin/vllm": vllm, "etc/night": str(self.image).encode()}
        archive = engine_image.variant(cache_home(), STUB_TAG, top_files=files, complete=False)
        self.product.on("head", "docker load", stdin=archive.read_bytes())


@dataclass(frozen=True)
class Night:
    """What happened in a night, and what the morning found."""

    number: int
    event: str
    code: int
    outcome: str
    seconds: float
    outage: float
    error: str
    wrong: tuple[str, ...]
    use: dict[str, list[int]]


def unchanged(world: World) -> Product:
    return world.spec()


def new_argument(world: World) -> Product:
    world.length += 1
    return world.spec()


def new_image(world: World) -> Product:
    world.image += 1
    world.load(STUB.read_bytes())
    return world.spec()


def bad_image(world: World) -> Product:
    world.load(ENDS_AT_ONCE + f"# {len(world.tried)}\n".encode())
    return world.spec()


def bad_argument(world: World) -> Product:
    return world.spec(f"--max-model-len={900000 + len(world.tried)}")


def node_rebooted(world: World) -> Product:
    node = world.product.nodes[len(world.tried) % len(world.product.nodes)]
    lab_command(world.product.lab, "break", node, "kill")
    lab_command(world.product.lab, "break", node, "boot")
    return world.spec()


def weights_damaged(world: World) -> Product:
    world.product.on("worker1", DAMAGE.replace("$1", str(len(world.tried) % 10)))
    return world.spec()


Event = Callable[[World], Product]
# What happens, of how many nights of thirty, and how the deploy ends then. Images are seldom: on
# the lab, sending one takes longer than all else.
EVENTS: dict[str, tuple[Event, int, int, tuple[str, ...]]] = {
    "unchanged": (unchanged, 6, DONE, ("unchanged",)),
    "new argument": (new_argument, 6, DONE, ("changed",)),
    "new image": (new_image, 2, DONE, ("changed",)),
    "bad image": (bad_image, 2, FAILED, ("rolled-back",)),
    "bad argument": (bad_argument, 6, FAILED, ("rolled-back",)),
    "node rebooted": (node_rebooted, 4, DONE, ("changed",)),
    # It may by chance be damaged to what it was.
    "weights damaged": (weights_damaged, 4, DONE, ("changed", "unchanged")),
}


def plan(seed: int, count: int) -> list[str]:
    """The nights in an order by the seed; of thirty, every event as often as it says."""
    events = [name for name, (_, times, _, _) in EVENTS.items() for _ in range(times)]
    chance = random.Random(seed)
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += chance.sample(events, len(events))
    return chosen[:count]


def use(product: Product) -> dict[str, list[int]]:
    """Images, volumes, MiB of docker and of our folder, and processes of Ray and vLLM, by node."""
    found = {}
    for name in product.nodes:
        numbers = [int(word) for word in product.on(name, USE).split()]
        commands = ("raylet", "gcs_server", "vllm", "python3")
        found[name] = [*numbers, *(len(product.named(name, each)) for each in commands)]
    return found


def wrong(product: Product, said: Said, event: str, before: str) -> list[str]:
    """What is not as it should be in the morning, after the event of the night before."""
    _, _, code, outcomes = EVENTS[event]
    if before and EVENTS[before][2] == FAILED:
        # The breaker is closed again; a good image that is back goes to the worker.
        outcomes = (*outcomes, "changed")
    found = []
    if event == "unchanged" and said.document.get("outage_seconds"):
        found.append("it was stopped for nothing")
    if (said.code, said.outcome in outcomes) != (code, True):
        found.append(f"code {said.code}, {said.outcome}: {said.error}")
    if product.answer() != " of the stub":
        found.append("the model does not answer")
    wanted = {"head": {product.ray, product.server}, "worker1": {product.ray}}
    have = {name: set(product.containers(name, "--all")) for name in product.nodes}
    if have != wanted:
        found.append(f"containers: {have}")
    if left := product.of_runs():
        found.append(f"of runs: {left}")
    if owner := product.lock_owner():
        found.append(f"the lock: {owner}")
    return found


def live(world: World, number: int, event: str) -> Night:
    """One night: what happens, the deploy, and the morning after."""
    before = world.tried[-1] if world.tried else ""
    if before == "bad image" and event not in ("bad image", "new image"):
        # A person has put the good image back.
        world.load(STUB.read_bytes())
    product = EVENTS[event][0](world)
    said = product.run("deploy")
    poll(lambda: not product.of_runs() and not product.lock_owner(), 30)
    world.tried.append(event)
    return Night(
        number=number,
        event=event,
        code=said.code,
        outcome=said.outcome,
        seconds=round(said.seconds, 1),
        outage=float(said.document.get("outage_seconds", 0)),
        error=said.document["error"] or "",
        wrong=tuple(wrong(product, said, event, before)),
        use=use(product),
    )


def shown(night: Night) -> str:
    error = night.error.splitlines()[0] if night.error else ""
    return (
        f"{night.number:3} {night.event:<16} {night.outcome:<12} {night.seconds:6.1f} s, outage "
        f"{night.outage:5.1f} s  {night.use}  {error}  {'; '.join(night.wrong)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.nights", description=__doc__)
    parser.add_argument("folder", type=Path, help="where specs and results are kept")
    parser.add_argument("--name", default="lab", help="the lab, which must be up")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--nights", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1e9, help="go on later after so long")
    options = parser.parse_args()
    return run(options)


def run(options: argparse.Namespace) -> int:
    """From where an earlier call stopped."""
    until = time.monotonic() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "nights.json"
    document: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    where, shape = Lab(options.name), Shape(workers=1)
    made = spec.document(where, shape)
    use_stub(made)
    world = World(Product(where, shape, options.folder, made), **document.get("world", {}))
    nights = document.get("nights", [])
    if not nights:
        preload(where, shape)
        load_stub(world.product)
        world.load(STUB.read_bytes())
        world.spec().deploy()
    events = plan(options.seed, options.nights)
    for number in range(len(nights) + 1, options.nights + 1):
        if time.monotonic() > until:
            break
        night = live(world, number, events[number - 1])
        print(shown(night), flush=True)
        nights.append(asdict(night))
        state = {"length": world.length, "image": world.image, "tried": world.tried}
        kept.write_text(json.dumps({"world": state, "nights": nights}, indent=1))
    bad = sum(bool(night["wrong"]) for night in nights)
    print(f"{len(nights)} nights, {bad} of them wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

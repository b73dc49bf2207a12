"""One machine of a chain that passes an image on: from `docker save`, or from the machine before,
into its own `docker load` and to the machine behind, all at once.

Relayed to the node; standard library of Python 3.8 only. Told by one JSON document:
{"save": the command, "layers", "spare", "blobs", "legacy": for the filter, "store": {"root", "id",
"name"} of the image, where it may be read from docker's folder, "reader": {"command", "program"} of
a container that may read there, if we may not} or {"listen": address, "token", "wait": seconds};
and {"load": a command, or none, "next": {"address", "port", "token"}, or none, "stall": the seconds
without a byte after which a command is given up}.
Says where it listens and how far it is, and last how it all ended, each in a line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tasks.relayed.image_archive import LayerFilter
from tasks.relayed.image_contained import Contained
from tasks.relayed.image_store import Layer, archive, stored
from tasks.relayed.stream_ends import EVERY, Broken, Idle, Load, Side, say
from tasks.relayed.stream_links import Next, Received

BLOCK = 1 << 20


class Saved(Idle):
    """The image as `docker save` writes it, without the layers that no machine lacks."""

    def __init__(self, orders: dict[str, Any], unread: str) -> None:
        super().__init__(orders["stall"])
        self.unread = unread
        self.side = Side(orders["save"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self.filter = LayerFilter(
            orders["layers"],
            orders["spare"],
            blobs=orders["blobs"],
            legacy=orders["legacy"],
        )
        self.read = 0

    def blocks(self) -> Iterator[bytes]:
        process = self.side.process
        if process and process.stdout:
            while True:
                # Older engines gather the whole image before the first byte: that is no stall.
                if self.read:
                    self.begin()
                block = os.read(process.stdout.fileno(), BLOCK)
                self.over()
                if not block:
                    break
                self.read += len(block)
                for part in self.filter.feed(block):
                    yield bytes(part)
        if self.side.end() != 0 or not self.read:
            raise Broken("docker save failed")
        if not self.filter.whole:
            raise Broken("docker save ended in the midst of a file")

    def end(self) -> None:
        self.side.kill()

    def report(self) -> dict[str, Any]:
        self.side.kill()
        return {
            "source_code": self.side.end(),
            "source_said": self.side.said(),
            "source_stalled": self.passed,
            "read": self.read,
            "legacy": self.filter.is_legacy,
            "left_out": len(self.filter.left_out),
            "sent_anyway": self.filter.sent_anyway,
            "unread": self.unread,
        }


class Kept(Idle):
    """The image as the engine of this machine keeps it, as far as some machine lacks it."""

    def __init__(self, orders: dict[str, Any], config: bytes, layers: list[Layer]) -> None:
        super().__init__(orders["stall"])
        self.orders = orders
        self.config = config
        self.layers = layers
        self.read = 0

    def blocks(self) -> Iterator[bytes]:
        name, layers = self.orders["store"]["name"], self.orders["layers"]
        try:
            for block in archive(name, self.config, layers, self.layers):
                self.read += len(block)
                yield block
        except (OSError, ValueError) as error:
            raise Broken(f"reading the image from docker's folder: {error}") from None

    def end(self) -> None:
        """Nothing to be ended: who reads a file cannot be interrupted."""

    def report(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "legacy": True,
            "left_out": len(set(self.orders["layers"])) - len(self.layers),
            "from_store": True,
        }


def source_of(orders: dict[str, Any]) -> Saved | Kept | Contained | Received:
    """Docker's folder where we may read it, or else a container may; `docker save` is the last."""
    if "save" not in orders:
        return Received(orders)
    unread = ""
    if orders.get("store"):
        lacking = set(orders["layers"]) - set(orders["spare"])
        place = orders["store"]
        found = stored(place["root"], place["id"], orders["layers"], lacking)
        if found:
            return Kept(orders, *found)
        if orders.get("reader"):
            contained = Contained(orders)
            unread = contained.why_not()
            if not unread:
                return contained
    return Saved(orders, unread)


class Chain:
    """The part of a chain that is on this machine."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.source = source_of(orders)
        load = Load(orders["load"], orders["stall"]) if orders.get("load") else None
        next_one = Next(orders["next"]) if orders.get("next") else None
        self.outlets = [outlet for outlet in (load, next_one) if outlet]
        self.bytes = 0
        self.over = threading.Event()
        self.lost = False

    def run(self) -> dict[str, Any]:
        threading.Thread(target=self.watch, daemon=True).start()
        broken = ""
        try:
            for block in self.source.blocks():
                if not block:
                    continue  # On its way it would look like the end.
                for outlet in self.outlets:
                    outlet.put(block)
                self.bytes += len(block)
                if all(outlet.failed for outlet in self.outlets):
                    break
        except Broken as error:
            broken = str(error)
        if self.lost and not broken:
            broken = "the machine before is gone"
        report: dict[str, Any] = {"bytes": self.bytes, "broken": broken}
        # Both at once: an engine may take long to unpack what it has.
        closing = [
            threading.Thread(target=lambda each=outlet: report.update(each.close(not broken)))
            for outlet in self.outlets
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self.over.set()
        return {**report, **self.source.report()}

    def watch(self) -> None:
        """Tell the progress; give up what does not move any more."""
        told = 0.0
        while not self.over.wait(0.2):
            parts = (self.source, *self.outlets)
            for each in parts:
                each.check()
            if self.source.lost():
                self.lost = True
                for outlet in self.outlets:
                    outlet.abandon()
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                say({"progress": {"bytes": self.bytes}})
                for each in parts:
                    each.tell()


def main(_program: str, orders: str) -> None:
    began = time.monotonic()
    report = Chain(json.loads(orders)).run()
    say({**report, "seconds": time.monotonic() - began})


if __name__ == "__main__":
    main(*sys.argv[1:])

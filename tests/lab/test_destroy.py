"""The inverse of deploy, and who may talk to whom meanwhile."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab import lab, snapshots
from tests.lab.layout import CONTROL_INTERFACE, HEAD_ADDRESS
from tests.lab.product import STUB_TAG, Product

pytestmark = pytest.mark.lab

# Counts the packets that leave the control, by where they go; ends with its standard input.
SNIFFER = """
import collections, json, select, socket, sys
ARP, IP = 0x0806, 0x0800
heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
heard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
print("listening", flush=True)
sent = collections.Counter()
while sys.stdin not in select.select([heard, sys.stdin], [], [])[0]:
    frame, (interface, kind, direction, *_) = heard.recvfrom(128)
    if direction != socket.PACKET_OUTGOING:
        continue
    place = {ARP: slice(38, 42), IP: slice(30, 34)}.get(kind)
    target = socket.inet_ntoa(frame[place]) if place else hex(kind)
    sent[f"{interface} {target}"] += 1
print(json.dumps(sent))
"""


@contextmanager
def listening(product: Product, sent: dict[str, int]) -> Iterator[None]:
    argv = lab.command_line(product.lab, "control", [sys.executable, "-c", SNIFFER])
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        assert found.stdout.readline() == "listening\n"
        yield
        sent.update(json.loads(found.communicate(timeout=10)[0]))


def test_nothing_is_left(stub: Product) -> None:
    foreign = stub.on("head", f"docker create --name=foreign --entrypoint=true {STUB_TAG}")
    try:
        stub.destroy()
        before = snapshots.take(stub)
        sent: dict[str, int] = {}
        with listening(stub, sent):
            stub.deploy()
            said = stub.destroy()
        assert said.changed == {"remove on head", "remove on worker1"}
        after = snapshots.take(stub)
        differences = snapshots.differences(before, after)
        assert [line for line in differences if "files: + /models/tiny" not in line] == []
        assert any(foreign in line for line in after["head"]["containers"])
        assert "/models/tiny/config.json" in after["worker1"]["files"]

        again = stub.destroy()
        assert (again.outcome, again.changed) == ("unchanged", set())
        assert snapshots.differences(after, snapshots.take(stub)) == []
    finally:
        stub.on("head", f"docker rm --force {foreign}")

    # All that ever left the control went to the head's own address.
    targets = {line.split()[1] for line in sent}
    assert {target for target in targets if not target.startswith("0x")} == {HEAD_ADDRESS}
    assert sent[f"{CONTROL_INTERFACE} {HEAD_ADDRESS}"] > 100

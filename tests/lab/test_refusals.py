"""What sparkrail refuses: with which exit code, in which words, and before anything is touched."""

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import snapshots
from tests.lab.identity import make_key
from tests.lab.layout import HEAD_ADDRESS
from tests.lab.product import BLOCKED, DONE, FAILED, STUB_TAG, Product, Said, lab_command, poll

pytestmark = pytest.mark.lab


@pytest.fixture
def untouched(stub: Product) -> Iterator[Product]:
    """The nodes are after the test as they were before it."""
    before = snapshots.take(stub)
    yield stub
    assert snapshots.differences(before, snapshots.take(stub)) == []


def blocked(said: Said) -> dict[tuple[str, str], dict[str, str]]:
    """The problems that block, by node and check."""
    assert said.code == BLOCKED, said.error
    assert said.document["state"] == "failed"
    rows = [row for row in said.document["problems"] if row["verdict"] == "blocked"]
    return {(row["node"], row["check"]): row for row in rows}


# --- blocked by preflight ---------------------------------------------------------------------


def test_a_foreign_container_under_our_name(stub: Product) -> None:
    stub.destroy()
    id = stub.on("worker1", f"docker create --name={stub.ray} --entrypoint=sleep {STUB_TAG} 1000")
    try:
        before = snapshots.take(stub)
        for verb in ("check", "deploy"):
            found = blocked(stub.run(verb))
            assert set(found) == {("worker1", "container names")}
            [row] = found.values()
            assert f"{stub.ray} ({id[:12]}, created" in row["detail"]
            assert f"docker rm -f {stub.ray}" in row["remedy"]
        # It bears no label of ours: there is nothing that destroy would take.
        assert stub.destroy().outcome == "unchanged"
        assert snapshots.differences(before, snapshots.take(stub)) == []
    finally:
        stub.on("worker1", f"docker rm --force {id}")


def test_a_stranger_on_our_port(stub: Product) -> None:
    pid = stub.on("head", "python3 -m http.server 8000 >/dev/null 2>&1 & echo $!")
    try:
        poll(lambda: stub.on("head", "ss -Hltn 'sport = :8000'"))
        before = snapshots.take(stub)
        found = blocked(stub.run("check"))
        assert set(found) == {("head", "ports")}
        [row] = found.values()
        assert "8000 (serve.port) is held by pid" in row["detail"]
        assert f"pid {pid} of root (python3 -m http.server 8000)" in row["detail"]
        assert f"kill {pid}" in row["remedy"]
        assert snapshots.differences(before, snapshots.take(stub)) == []
    finally:
        stub.on("head", f"kill {pid}")


def test_a_worker_that_is_down(stub: Product) -> None:
    lab_command(stub.lab, "break", "worker1", "kill")
    try:
        said = stub.run("check")
    finally:
        lab_command(stub.lab, "break", "worker1", "boot")
    print(f"a dead worker was reported after {said.seconds:.1f} s")
    found = blocked(said)
    assert set(found) == {("worker1", "reachable")}
    assert "root@10.77.0.2:22" in found["worker1", "reachable"]["detail"]


# --- host keys ----------------------------------------------------------------------------------


def lines_of(stub: Product, address: str) -> tuple[list[str], list[str]]:
    """The lines of the lab's known_hosts for an address, and those for others."""
    lines = stub.lab.known_hosts.read_text().splitlines()
    ours = [line for line in lines if line.startswith(f"{address} ")]
    return ours, [line for line in lines if line not in ours]


def fingerprints(lines: list[str]) -> list[str]:
    """As `ssh-keygen -l` prints them."""
    keys = [base64.b64decode(line.split()[2]) for line in lines]
    digests = [base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=") for key in keys]
    return [f"SHA256:{digest}" for digest in digests]


def trusting(stub: Product, folder: Path, lines: list[str]) -> Product:
    """The same cluster with another known_hosts."""
    known_hosts = folder / "known_hosts"
    known_hosts.write_text("".join(f"{line}\n" for line in lines))
    return stub.but(folder, lambda spec: spec["ssh"].update(known_hosts=str(known_hosts)))


HOPS = pytest.mark.parametrize(
    ("name", "address"),
    [
        pytest.param("head", HEAD_ADDRESS, id="control to head"),
        pytest.param("worker1", "10.77.0.2", id="head to worker"),
    ],
)


@HOPS
def test_an_unknown_host_key(untouched: Product, tmp_path: Path, name: str, address: str) -> None:
    lines, others = lines_of(untouched, address)
    product = trusting(untouched, tmp_path, others)
    found = blocked(product.run("check"))
    row = found[name, "host key"]
    assert "unknown host key" in row["detail"]
    assert address in row["detail"]
    assert any(fingerprint in row["detail"] for fingerprint in fingerprints(lines))
    # The remedy does what it says.
    untouched.on("control", row["remedy"].partition("\n")[2])
    assert product.run("check").code == DONE


@HOPS
def test_a_changed_host_key(untouched: Product, tmp_path: Path, name: str, address: str) -> None:
    lines, others = lines_of(untouched, address)
    forged = []
    for line in lines:
        kind = line.split()[1].removeprefix("ssh-").partition("-")[0]
        file = tmp_path / kind
        make_key(file, kind, "forged")
        forged.append(" ".join([address, *file.with_suffix(".pub").read_text().split()[:2]]))
    product = trusting(untouched, tmp_path, [*others, *forged])
    row = blocked(product.run("deploy"))[name, "host key"]
    assert f"the host key of {address} has changed" in row["detail"]
    assert any(fingerprint in row["detail"] for fingerprint in fingerprints(lines))
    assert any(fingerprint in row["detail"] for fingerprint in fingerprints(forged))
    assert f"ssh-keygen -f {tmp_path}/known_hosts -R {address}" in row["remedy"]


# --- a wrong address ----------------------------------------------------------------------------

# The container that sparkrail started, but for one variable, under the same labels.
WRONG_ADDRESS = """
docker rm --force --volumes {name} >/dev/null
docker run --detach --name={name} {labels} --network=host --ipc=shareable --volume=/tmp \
    --volume=/root/.sparkrail/{cluster}/run:/sparkrail:ro --init --entrypoint=sh {image} -c '
    . /sparkrail/node.env
    export VLLM_HOST_IP=10.77.0.99
    exec ray start --address=10.77.0.1:6379 --node-ip-address=10.77.0.2 --block --num-gpus=1 \
        --object-store-memory=200000000'
"""


def test_a_wrong_address_is_caught_before_serve(stub: Product) -> None:
    stub.deploy()
    labels: dict[str, Any] = json.loads(
        stub.on("worker1", f"docker inspect --format '{{{{json .Config.Labels}}}}' {stub.ray}")
    )
    script = WRONG_ADDRESS.format(
        name=stub.ray,
        cluster=stub.name,
        image=STUB_TAG,
        labels=" ".join(f"--label={name}={value}" for name, value in labels.items()),
    )
    stub.on("worker1", script)
    stub.on("head", f"docker rm --force --volumes {stub.server}")
    said = stub.run("deploy")
    assert (said.code, said.outcome) == (FAILED, "rolled-back")
    assert "worker1: VLLM_HOST_IP is 10.77.0.99" in said.error
    assert "Ray knows the node as 10.77.0.2" in said.error
    steps = [row["step"] for row in said.document["steps"]]
    failed = [row["step"] for row in said.document["steps"] if row["outcome"] == "failed"]
    assert failed == ["cluster verification"]
    assert "vLLM serve" not in steps[: steps.index("cluster verification")]
    assert stub.answer() == " of the stub"

"""One rank of an all-reduce over the fabric: runs in the engine's image, prints JSON lines.

Arguments: rank, number of ranks, address and port of rank 0, backend, MiB to reduce, seconds.
The ranks hold on to each other by plain sockets from the start: whether rank 0 can be reached shows
before torch is imported, the clock runs only once all have imported it, and when one rank ends, all
end. The exit code tells apart what failed.
"""

import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

FAILED, PEER_ENDED, NO_MEMORY, PORT_TAKEN, NOT_REACHED = 1, 3, 4, 5, 6
IMPORT_SECONDS = 120
REDUCTIONS = 8
INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
NCCL_LOG = "/tmp/sparkrail-nccl.log"
finished = threading.Event()


class Failed(Exception):
    """What went wrong, with the exit code that tells it apart."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def main(rank: int, world: int, address: str, port: int, backend: str, mib: int, s: float) -> None:
    signal.alarm(IMPORT_SECONDS + int(4 * s))
    name = os.environ.get(INTERFACE, "")
    mine = interfaces().get(name, "")
    tell(interface=name, address=mine, host_ip=os.environ.get("VLLM_HOST_IP", ""))
    if rank == 0:
        listener = listen(address, port)
        import_torch()
        peers = accept(listener, world - 1, s)
        check(name, mine)
        store = free_port(address)
        for peer in peers:
            peer.sendall(f"{store}\n".encode())
    else:
        # Only then what is wrong here: the others see this rank end.
        peers = [reach(address, port, s)]
        check(name, mine)
        import_torch()
        peers[0].sendall(b"r")
        store = int(peers[0].makefile().readline() or "0")
        if not store:
            raise Failed(PEER_ENDED, "rank 0 ended")
    done = threading.Semaphore(0)
    for peer in peers:
        threading.Thread(target=watch, args=(peer, done), daemon=True).start()
    signal.alarm(int(3 * s))
    tell(**reduce(rank, world, f"tcp://{address}:{store}", backend, mib, s))
    finished.set()
    for peer in peers:
        peer.sendall(b"d")
    for _ in peers:
        done.acquire(timeout=s)


def tell(**values: object) -> None:
    print(json.dumps(values), flush=True)


def interfaces() -> "dict[str, str]":
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                row = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(row[20:24])
    return found


def check(name: str, address: str) -> None:
    if not address:
        there = ", ".join(f"{each} {at}" for each, at in interfaces().items())
        raise Failed(FAILED, f"{INTERFACE}: Unable to find address for: {name}; here are {there}")


def listen(address: str, port: int) -> socket.socket:
    try:
        return socket.create_server((address, port), backlog=64)
    except OSError as error:
        # EADDRINUSE, or EADDRNOTAVAIL: then it is not ours to try another.
        code = PORT_TAKEN if error.errno == 98 else FAILED
        raise Failed(code, f"cannot listen on {address}:{port}: {error}") from error


def accept(listener: socket.socket, count: int, seconds: float) -> "list[socket.socket]":
    """The connections of all other ranks, each of which has imported torch."""
    listener.settimeout(seconds)
    try:
        peers = [listener.accept()[0] for _ in range(count)]
    except TimeoutError:
        raise Failed(PEER_ENDED, "not every rank came") from None
    for peer in peers:
        peer.settimeout(IMPORT_SECONDS)
        if peer.recv(1) != b"r":
            raise Failed(PEER_ENDED, "a rank ended")
        peer.settimeout(None)
    return peers


def reach(address: str, port: int, seconds: float) -> socket.socket:
    """A connection to rank 0, which may not have begun yet; silence is a blocked way."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = socket.create_connection((address, port), 5)
        except ConnectionRefusedError as error:
            why = error
        except OSError as error:
            raise Failed(NOT_REACHED, f"cannot reach {address}:{port}: {error}") from error
        else:
            found.settimeout(None)
            return found
        if time.monotonic() > deadline:
            raise Failed(NOT_REACHED, f"cannot reach {address}:{port}: {why}")
        time.sleep(0.1)


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


def watch(peer: socket.socket, done: threading.Semaphore) -> None:
    """End with the other rank: what torch waits for would never come."""
    try:
        said = peer.recv(1)
    except OSError:
        said = b""
    if said == b"d" or finished.is_set():
        done.release()
        return
    print("another rank ended", file=sys.stderr, flush=True)
    os._exit(PEER_ENDED)


def import_torch() -> None:
    import torch.distributed  # noqa: F401


def reduce(
    rank: int, world: int, init_method: str, backend: str, mib: int, seconds: float
) -> "dict[str, object]":
    import torch
    from torch import distributed

    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=NCCL_LOG)
    limit = timedelta(seconds=seconds)
    device = "cuda:0" if backend == "nccl" else "cpu"
    began = time.monotonic()
    distributed.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world, timeout=limit
    )
    data = torch.full((mib * 2**18,), float(rank + 1), device=device)
    distributed.all_reduce(data)
    total = world * (world + 1) / 2
    if float(data.min()) != total or float(data.max()) != total:
        raise Failed(FAILED, f"the sum of all ranks is wrong: {float(data[0])}, not {total}")
    formed = time.monotonic()
    taken = []
    for _ in range(REDUCTIONS):
        started = time.monotonic()
        distributed.all_reduce(data)
        float(data[0])  # On a GPU the work is done only now.
        taken.append(time.monotonic() - started)
    # What each link carries: in a ring, every rank sends its data twice but for its own part. The
    # best of some: the running release may be busy.
    carried = mib * 2 * (world - 1) / world
    return {"mib_s": carried / min(taken), "seconds": formed - began, "transport": transport()}


def transport() -> str:
    """How NCCL says that it reaches the other ranks."""
    for line in nccl_log():
        if "Using network " in line:
            return line.rpartition("Using network ")[2].strip()
    return ""


def nccl_log() -> "list[str]":
    try:
        with open(NCCL_LOG, errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def run(arguments: "list[str]") -> int:
    rank, world, address, port, backend, mib, seconds = arguments
    try:
        main(int(rank), int(world), address, int(port), backend, int(mib), float(seconds))
    except Failed as error:
        print(error, file=sys.stderr, flush=True)
        return error.code
    except Exception as error:
        warnings = [line for line in nccl_log() if "NCCL WARN" in line]
        said = "\n".join([*warnings[-5:], f"{type(error).__name__}: {error}"])
        print(said, file=sys.stderr, flush=True)
        return NO_MEMORY if "out of memory" in said.lower() else FAILED
    return 0


if __name__ == "__main__":
    # Not sys.exit: torch's threads may wait for ranks that are gone.
    os._exit(run(sys.argv[1:]))

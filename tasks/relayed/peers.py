"""What a node reaches of its peers over the fabric, printed as one JSON document.

Relayed to the node; standard library of Python 3.8 only. It writes nothing, and asks all peers at
once. Argument: {"source": own fabric address, "timeout": seconds, "peers": [{"node", "address",
"port", "login": the words of an ssh command, or none}]}.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

# Of <linux/in.h>; Python knows no names for them.
IP_MTU_DISCOVER, IP_MTU, IP_PMTUDISC_PROBE = 10, 14, 3
# Where traceroute sends to: nothing listens there, and firewalls know it.
UDP_PORT = 33434
SMALL, USUAL = 200, 1500
HEADERS = 28  # Of IP and UDP.
LONGEST = 65535
TRIES = 2
WAIT = 0.5


def dial(source: str, address: str, port: int, timeout: float) -> str:
    """How a TCP connection ended: "open", "refused" (which proves the way), or what went wrong."""
    with socket.socket() as sock:
        sock.settimeout(timeout)
        try:
            sock.bind((source, 0))
            sock.connect((address, port))
        except ConnectionRefusedError:
            return "refused"
        except socket.timeout:  # noqa: UP041 - Python 3.8 has two
            return "no answer"
        except OSError as error:
            return os.strerror(error.errno or 0) if error.errno else str(error)
    return "open"


def packet(source: str, address: str, size: int) -> str:
    """How a packet of this size ended: "arrived", "too long" for the way, or "lost".

    The peer's kernel answers that nobody listens; it must not be taken apart on the way.
    """
    for attempt in range(TRIES):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            sock.settimeout(WAIT)
            try:
                sock.bind((source, 0))
                sock.connect((address, UDP_PORT + attempt))
                sock.send(bytes(size - HEADERS))
                sock.recv(1)
            except ConnectionRefusedError:
                return "arrived"
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    return "too long"
    return "lost"


def own_mtu(source: str, address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((source, 0))
        sock.connect((address, UDP_PORT))
        return sock.getsockopt(socket.IPPROTO_IP, IP_MTU)


def packets(source: str, address: str) -> dict[str, str]:
    """How packets of several sizes ended; nothing where not even a small one gets an answer."""
    with contextlib.suppress(OSError):
        mtu = min(own_mtu(source, address), LONGEST)
        if packet(source, address, SMALL) == "arrived":
            full = packet(source, address, mtu)
            found = {str(mtu): full}
            if full != "arrived" and mtu > USUAL:
                found[str(USUAL)] = packet(source, address, USUAL)
            return found
    return {}


def log_in(argv: list[str], timeout: float) -> dict[str, Any]:
    """How the node's own ssh to a peer ended, and what the login there prints unasked."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except FileNotFoundError:
        return {"code": 127, "said": "ssh is not installed"}
    except subprocess.TimeoutExpired:
        return {"code": 255, "said": f"ssh: no answer within {timeout:g} s"}
    lines = done.stdout.decode(errors="replace").splitlines()
    return {
        "code": done.returncode,
        "said": done.stderr.decode(errors="replace")[-2000:].strip(),
        "printed": len(done.stdout),
        "first_line": next((line[:200] for line in lines if line.strip()), ""),
    }


def look(source: str, peer: dict[str, Any], timeout: float) -> dict[str, Any]:
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        tcp = pool.submit(dial, source, peer["address"], peer["port"], timeout)
        udp = pool.submit(packets, source, peer["address"])
        login = pool.submit(log_in, peer["login"], 2 * timeout) if peer.get("login") else None
    return {
        "node": peer["node"],
        "address": peer["address"],
        "port": peer["port"],
        "tcp": tcp.result(),
        "packets": udp.result(),
        "login": login.result() if login else None,
        "seconds": round(time.monotonic() - began, 3),
    }


def main(_program: str, wanted: str) -> None:
    asked = json.loads(wanted)
    source, timeout = asked["source"], asked["timeout"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(look, source, peer, timeout) for peer in asked["peers"]]
    print(json.dumps([future.result() for future in futures]))


if __name__ == "__main__":
    main(*sys.argv[1:])

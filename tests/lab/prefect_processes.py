"""A Prefect server and worker of one's own, as processes of their own sessions."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.lab.layout import REPOSITORY

BIN = Path(sys.executable).parent
POOL = "sparkrail"
SERVER_SECONDS = 300


class PrefectFailed(Exception):
    """A Prefect process or command did not do what it was to do; the text says why."""


class Processes:
    """Server and worker with a folder of their own; those that still run there are used again."""

    def __init__(self, home: Path, cluster: str, first_port: int = 4200, **settings: str) -> None:
        self.home = home
        self.cluster = cluster
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        home.mkdir(parents=True, exist_ok=True)
        self.port = self._running_port() or _free_port(first_port)
        self.environment: Mapping[str, str] = {
            **os.environ,
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": f"{self.ui}/api",
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            **settings,
        }

    @property
    def ui(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_server(self) -> None:
        """Returns once the API answers."""
        if not self.is_running("server"):
            self.start("server", "prefect", "server", "start", "--port", str(self.port))
            (self.home / "port").write_text(str(self.port))
        deadline = time.monotonic() + SERVER_SECONDS
        while not _answers(f"{self.ui}/api/health"):
            log = self.home / "server.log"
            if not self.is_running("server"):
                raise PrefectFailed(f"the Prefect server has ended; see {log}")
            if time.monotonic() > deadline:
                raise PrefectFailed(f"the Prefect server does not answer; see {log}")
            time.sleep(0.3)

    def register(self) -> None:
        """Block types, work pool, deployments and automations."""
        self.command("sparkrail", "register", self.cluster)

    def start_worker(self) -> None:
        if not self.is_running("worker"):
            self.start("worker", "prefect", "worker", "start", "--pool", POOL)

    def stop(self, *names: str) -> None:
        for name in names or ("worker", "server"):
            self._stop(name)

    def signal(self, name: str, number: int) -> None:
        """To the whole process group."""
        os.killpg(self.is_running(name), number)

    def command(self, program: str, *arguments: str) -> str:
        """What a program of the virtual environment prints; it must succeed."""
        ran = subprocess.run(
            [BIN / program, *arguments],
            cwd=REPOSITORY,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if ran.returncode != 0:
            said = f"{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
            raise PrefectFailed(f"{program} {' '.join(arguments)}: {said}")
        return ran.stdout

    def start(self, name: str, program: str, *arguments: str) -> None:
        """A process of its own session that outlives us, known by its pid and start time."""
        if dead := self._children.pop(name, None):
            dead.wait()
        # A background process of a script ignores SIGINT, and Prefect's worker then never stops.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [BIN / program, *arguments],
                cwd=REPOSITORY,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children[name] = process
        (self.home / f"{name}.pid").write_text(f"{process.pid} {_start_time(process.pid)}")

    def is_running(self, name: str) -> int:
        """The pid of what `start` started, or 0: a pid that was used again is not ours."""
        try:
            pid, started = (self.home / f"{name}.pid").read_text().split()
        except (OSError, ValueError):
            return 0
        return int(pid) if _start_time(int(pid)) == started else 0

    def _stop(self, name: str) -> None:
        pid = self.is_running(name)
        if pid:
            os.killpg(pid, signal.SIGTERM)
            if not _within(15, lambda: not self.is_running(name)):
                os.killpg(pid, signal.SIGKILL)
        if child := self._children.pop(name, None):
            child.wait()
        (self.home / f"{name}.pid").unlink(missing_ok=True)

    def _running_port(self) -> int:
        return int((self.home / "port").read_text()) if self.is_running("server") else 0


def _within(seconds: float, ready: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _start_time(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise PrefectFailed(f"no free port from {first} on")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3):
            return True
    except (OSError, urllib.error.URLError):
        return False

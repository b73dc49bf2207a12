"""Private sshds on loopback: real servers with keys of their own, ended by their pid."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blocks import Cluster

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def poll(done: Callable[[], object], what: str, seconds: float = 15) -> None:
    """Ask until it holds, or fail after a deadline."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as taken:
        taken.bind((address, 0))
        port: int = taken.getsockname()[1]
        return port


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "", form: str = "") -> Path:
    """A key pair; `form` PEM is the older format."""
    form_options = ("-m", form) if form else ()
    command = ("ssh-keygen", "-q", "-t", kind, "-N", passphrase, *form_options, "-f", str(path))
    subprocess.run(command, check=True)
    return path


def public(key: Path) -> str:
    return Path(f"{key}.pub").read_text()


def descendants(pid: int, name: str) -> list[int]:
    """A process and those below it that have this name."""
    try:
        if name not in Path(f"/proc/{pid}/comm").read_text():
            return []
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # It just ended.
        return []
    return [pid, *(each for child in children for each in descendants(int(child), name))]


class Sshd:
    """One sshd with its own host key; the user who runs the tests logs in on it."""

    def __init__(
        self,
        folder: Path,
        login_key: Path,
        address: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.folder, self.address, self.port = folder, address, free_port(address)
        self.host_key = make_key(folder / "host_key")
        self.log = folder / "log"
        (folder / "authorized_keys").write_text(public(login_key))
        # Not the home of the user who runs the tests: its .bashrc may be slow, or talk.
        settings = {"HOME": str(self.home), **(environment or {})}
        setenv = " ".join(f"{name}={value}" for name, value in settings.items())
        self._options = (f"SetEnv {setenv}", *options)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / "config"
        config.write_text(
            f"ListenAddress {self.address}:{self.port}\n"
            f"HostKey {self.host_key}\n"
            f"AuthorizedKeysFile {self.folder / 'authorized_keys'}\n"
            f"PidFile {self.folder / 'pid'}\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            + "".join(f"{option}\n" for option in self._options)
        )
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                (str(SSHD), "-D", "-e", "-f", str(config)), stdin=subprocess.DEVNULL, stderr=log
            )
        poll(self._answers, f"sshd starts: {self.log.read_text()}")

    def _answers(self) -> bool:
        assert self._process and self._process.poll() is None, self.log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex((self.address, self.port)) == 0

    def stop(self) -> None:
        """End it and every connection of it."""
        if self._process is None:
            return
        connections = self._pids()[1:]
        self._process.terminate()
        self._process.wait()
        self._process = None
        for pid in filter(lives, connections):
            os.kill(pid, signal.SIGTERM)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It and its connections stand still, as on a node that is swapping."""
        pids = self._pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in filter(lives, pids):
                os.kill(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        assert self._process
        return descendants(self._process.pid, "sshd")

    @property
    def logins(self) -> int:
        return self.log.read_text().count("Accepted publickey")

    @property
    def host(self) -> str:
        """As it stands in known_hosts."""
        return f"[{self.address}]:{self.port}"

    @property
    def known(self) -> str:
        kind, text, *_ = public(self.host_key).split()
        return f"{self.host} {kind} {text}\n"

    @property
    def fingerprint(self) -> str:
        command = ("ssh-keygen", "-lf", str(self.host_key))
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]

    def place(self, name: str, **more: Any) -> dict[str, Any]:
        """This node's part of a spec."""
        return {
            "name": name,
            "fabric_address": f"10.99.0.{1 if name == 'head' else 2}",
            "address": self.address,
            "port": self.port,
            "user": getpass.getuser(),
            **more,
        }


def spec(head: dict[str, Any], worker: dict[str, Any] | None, **ssh: Any) -> Cluster:
    """A cluster spec for the nodes; the rest of it does not matter here."""
    return Cluster.model_validate(
        {
            "name": "loopback",
            "ssh": {key: str(value) for key, value in ssh.items()},
            "head": head,
            "workers": [worker] if worker else [],
            "image": {"name": "engine:1"},
            "model": {"name": "tiny", "path": "/models/tiny"},
            "serve": {"tensor_parallel": 2 if worker else 1},
        }
    )

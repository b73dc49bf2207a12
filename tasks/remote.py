"""Commands and files on a node, over one SSH connection per node; workers through the head.

The only module that imports fabric or paramiko, and the only place that quotes.
"""

import base64
import contextlib
import hashlib
import os
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection
from paramiko import Channel, PKey, Transport
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from blocks import Cluster, Node
from tasks.errors import (
    Cancelled,
    CommandFailed,
    CommandTimedOut,
    HostKeyRefused,
    LoginRefused,
    NodeUnreachable,
    SparkrailError,
)

# sshd allows ten sessions on a connection (MaxSessions); the docker client takes its own from them.
SESSIONS = 7
POLL = 0.2
RUN_VARIABLE = "SPARKRAIL_RUN"

# What the node's shell runs. The first line marks where our output begins (a login shell may print
# before it) and names the process group: sshd makes each session a group of its own. The guard
# waits for the end of standard input, which comes when we close the channel, are killed or lose the
# connection, and then ends the whole group: nothing we started outlives its run.
GUARDED = """\
echo {mark} $$
exec 3<&0
{command} </dev/null 3<&- & job=$!
{{
  trap '' TERM; cat <&3; kill -TERM -- -$$; sleep 3; kill -KILL -- -$$
}} >/dev/null 2>&1 & guard=$!
wait $job; code=$?
kill -KILL $guard
exit $code"""
FED = "echo {mark} $$\nexec {command}"


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit code."""

    stdout: str
    stderr: str
    code: int


@dataclass(frozen=True)
class Command:
    """One command for a node. Its standard input never shows in logs, its words do."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join(self.argv)

    def shell(self) -> str:
        settings = " ".join(f"{name}={shlex.quote(v)}" for name, v in self.environment.items())
        return f"env {settings} {self}" if settings else str(self)


# Set when the run is cancelled; every command in progress then ends its remote group.
STOP = threading.Event()


def cancel() -> None:
    """End every remote command of this process, in any thread."""
    STOP.set()


@contextlib.contextmanager
def cancel_scope() -> Iterator[None]:
    """Around a flow's body: whatever interrupts it also ends its remote commands."""
    STOP.clear()
    try:
        yield
    except BaseException:
        cancel()
        raise


class Remote:
    """A node that we are logged in on."""

    def __init__(self, node: Node, connection: Any, connect_timeout: float) -> None:
        self.node = node
        self._connection = connection
        self._connect_timeout = connect_timeout
        self._sessions = threading.BoundedSemaphore(SESSIONS)

    @property
    def transport(self) -> Transport:
        transport = self._connection.transport
        if not isinstance(transport, Transport) or not transport.is_active():
            raise self._lost("the SSH connection is closed")
        return transport

    @property
    def alive(self) -> bool:
        transport = self._connection.transport
        return isinstance(transport, Transport) and transport.is_active()

    def close(self) -> None:
        self._connection.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60,
        ok: Collection[int] = (0,),
        stdin: bytes | None = None,
        environment: Mapping[str, str] | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> Result:
        """Run one command; `ok` holds the exit codes that are answers, any other one raises.

        On timeout, on cancel and when this process dies, the command's process group is ended.
        """
        command = Command(tuple(argv), environment or {})
        with self._sessions:
            channel = self._session()
            try:
                result = self._converse(channel, command, stdin, timeout, on_output)
            finally:
                channel.close()
        if result.code not in ok:
            raise command_failed(self.node, command, result)
        return result

    def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file whole or not at all: aside, checked, then renamed over the old one."""
        script = (
            'umask 077; mkdir -p -- "$(dirname -- "$1")" && cat >"$2" && chmod "$3" "$2" '
            '&& sha256sum <"$2"'
        )
        aside = f"{path}.{secrets.token_hex(4)}.tmp"
        argv = ("sh", "-c", script, "sh", path, aside, f"{mode:o}")
        try:
            said = self.run(argv, stdin=content).stdout.split()
            if said[:1] != [hashlib.sha256(content).hexdigest()]:
                raise CommandFailed(
                    f"{path}: what arrived is not what was sent",
                    node=self.node.name,
                    remedy="Is the disk full? Nothing was replaced.",
                )
            self.run(("mv", "-f", "--", aside, path))
        except SparkrailError:
            with contextlib.suppress(SparkrailError):
                self.run(("rm", "-f", "--", aside))
            raise

    def open_tunnel(self, host: str, port: int, timeout: float = 10) -> Channel:
        """A TCP connection that the node makes for us, to be used like a socket."""
        try:
            channel = self.transport.open_channel(
                "direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=timeout
            )
        except paramiko.ChannelException as error:
            raise _no_tunnel(self.node.name, f"{host}:{port}", error) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._lost(f"no tunnel to {host}:{port}: {error or 'connection lost'}") from error
        channel.settimeout(timeout)
        return channel

    def _session(self) -> Channel:
        try:
            return self.transport.open_session(timeout=self._connect_timeout)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._lost(f"no session: {error or 'connection lost'}") from error

    def _lost(self, why: str) -> NodeUnreachable:
        return NodeUnreachable(
            why, node=self.node.name, remedy=f"Is {self.node.address} up? Then run again."
        )

    def _converse(
        self,
        channel: Channel,
        command: Command,
        stdin: bytes | None,
        timeout: float,
        on_output: Callable[[str], None] | None,
    ) -> Result:
        mark = f"sparkrail-{secrets.token_hex(6)}"
        deadline = time.monotonic() + timeout
        channel.settimeout(POLL)
        try:
            channel.exec_command(wrap(command, mark, fed=stdin is not None))
            if stdin is not None:
                _feed(channel, stdin, deadline)
            out = _Output(mark, on_output)
            while not out.take(channel):
                if STOP.is_set():
                    raise Cancelled(f"cancelled during: {command}", node=self.node.name)
                if time.monotonic() > deadline:
                    raise CommandTimedOut(
                        f"still running after {timeout:g} s: {command}",
                        node=self.node.name,
                        details=_tail(out.stderr_text or out.stdout_text),
                        remedy="Its processes on the node were ended.",
                    )
            code = channel.recv_exit_status()
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._lost(f"connection lost during: {command} ({error})") from error
        if code < 0 and not self.alive:
            raise self._lost(f"connection lost during: {command}")
        return Result(out.stdout_text, out.stderr_text, code)


class _Output:
    """Both streams of a channel, read side by side; what a login shell prints first is dropped."""

    def __init__(self, mark: str, on_output: Callable[[str], None] | None) -> None:
        self._mark = mark.encode()
        self._on_output = on_output
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._begun = False

    @property
    def stdout_text(self) -> str:
        return self._stdout.decode(errors="replace") if self._begun else ""

    @property
    def stderr_text(self) -> str:
        return self._stderr.decode(errors="replace")

    def take(self, channel: Channel) -> bool:
        """Read what there is; True when both streams have ended and the exit status is here."""
        try:
            data = channel.recv(65536)
        except TimeoutError:
            data = b""
        while channel.recv_stderr_ready():
            self._stderr += channel.recv_stderr(65536)
        if data:
            self._add(data)
            return False
        if channel.exit_status_ready() and not channel.recv_ready():
            return not channel.recv_stderr_ready()
        if channel.eof_received:
            channel.status_event.wait(POLL)
        return channel.closed

    def _add(self, data: bytes) -> None:
        self._stdout += data
        if not self._begun:
            start = self._stdout.find(self._mark)
            end = self._stdout.find(b"\n", start) if start >= 0 else -1
            if end < 0:
                return
            data = bytes(self._stdout[end + 1 :])
            self._stdout = bytearray(data)
            self._begun = True
        if self._on_output and data:
            self._on_output(data.decode(errors="replace"))


def wrap(command: Command, mark: str, *, fed: bool) -> str:
    """The text that the node's login shell, whichever it is, runs for a command."""
    script = (FED if fed else GUARDED).format(mark=mark, command=command.shell())
    run = os.environ.get(RUN_VARIABLE, "")
    script = f"export LC_ALL=C.UTF-8 {RUN_VARIABLE}={shlex.quote(run)}\n{script}"
    # csh and fish read '!', line breaks and backslashes inside quotes in their own ways.
    encoded = base64.b64encode(script.encode()).decode()
    return f"exec /bin/sh -c 'eval \"$(echo {encoded} | base64 -d)\"'"


def command_failed(node: Node, command: Command, result: Result) -> CommandFailed:
    """The error for an exit code that is no answer."""
    if result.code > 128 or result.code < 0:
        ended = f"killed by signal {result.code - 128}" if result.code > 128 else "killed"
    else:
        ended = f"exit code {result.code}"
    return CommandFailed(
        f"{ended}: {command}", node=node.name, details=_tail(result.stderr or result.stdout)
    )


def _tail(text: str, lines: int = 10) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _feed(channel: Channel, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        try:
            sent = channel.send(bytes(view[:65536]))
        except TimeoutError:
            if time.monotonic() > deadline or STOP.is_set():
                raise
            continue
        if not sent:  # The command ended before it read everything: its exit code tells why.
            break
        view = view[sent:]
    channel.shutdown_write()


# --- connections -------------------------------------------------------------------------------


class _Pool:
    """One connection per node for all threads of this process."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[object, threading.Lock] = {}
        self._remotes: dict[object, Remote] = {}

    def get(self, cluster: Cluster, node: Node) -> Remote:
        key = (cluster.ssh, cluster.head.model_dump_json(), node.model_dump_json())
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            remote = self._remotes.get(key)
            if remote is None or not remote.alive:
                remote = self._remotes[key] = self._open(cluster, node)
            return remote

    def _open(self, cluster: Cluster, node: Node) -> Remote:
        gateway = None if node == cluster.head else self.get(cluster, cluster.head)
        attempts = Retrying(
            retry=retry_if_exception_type(NodeUnreachable),
            stop=stop_after_attempt(2),
            wait=wait_random_exponential(multiplier=0.2, max=1),
            reraise=True,
        )
        return attempts(_log_in, cluster, node, gateway)

    def close(self) -> None:
        with self._guard:
            remotes, self._remotes = list(self._remotes.values()), {}
        # Workers first: their channels run through the head's connection.
        for remote in reversed(remotes):
            remote.close()


_pool = _Pool()


def connect(cluster: Cluster, node: Node) -> Remote:
    """The process-wide connection to a node, opened when needed; workers go through the head."""
    return _pool.get(cluster, node)


def disconnect() -> None:
    """Close all connections of this process."""
    _pool.close()


def _log_in(cluster: Cluster, node: Node, gateway: Remote | None) -> Remote:
    timeout = cluster.ssh.connect_timeout
    if gateway is not None:
        # Fabric opens the gateway's channel without a timeout, and paramiko's default is an hour.
        gateway.transport.channel_timeout = timeout
    connection = Connection(
        host=node.address,
        user=node.user,
        port=node.port,
        gateway=gateway._connection if gateway else _proxy_command(node),
        connect_timeout=timeout,
        config=Config(overrides={"load_ssh_configs": False}, lazy=True),
        connect_kwargs={
            "banner_timeout": timeout,
            "auth_timeout": timeout,
            "channel_timeout": timeout,
            **_keys(cluster),
        },
    )
    known_hosts = Path(cluster.ssh.known_hosts).expanduser()
    # Fabric accepts any key unless told otherwise (fabric #1804, #2071).
    if known_hosts.exists():
        connection.client.load_host_keys(str(known_hosts))
    connection.client.set_missing_host_key_policy(_RefuseUnknown(node, known_hosts))
    with _explained(cluster, node, known_hosts):
        connection.open()
    connection.transport.set_keepalive(15)
    return Remote(node, connection, timeout)


def _proxy_command(node: Node) -> str | None:
    if node.proxy_command is None:
        return None
    # Fabric knows %h only, and takes port 22 for %p whatever the port is.
    words = {"%h": node.address, "%p": str(node.port), "%r": node.user, "%%": "%"}
    parts = node.proxy_command.split("%%")
    for token in ("%h", "%p", "%r"):
        parts = [part.replace(token, words[token]) for part in parts]
    return "%%".join(parts)


def _keys(cluster: Cluster) -> dict[str, Any]:
    if cluster.ssh.credentials:
        return _keys_of_block(cluster.ssh.credentials)
    if cluster.ssh.key_file:
        path = Path(cluster.ssh.key_file).expanduser()
        _need_file(path, "ssh.key_file")
        return {"key_filename": str(path), "look_for_keys": False}
    return {}


def _keys_of_block(name: str) -> dict[str, Any]:
    # Imported here: the block's base class costs seconds, and most commands need no block.
    from blocks.secrets import SSHCredentials

    try:
        block = SSHCredentials.load(name)
    except ValueError as error:
        raise LoginRefused(
            f"no ssh-credentials block named {name}",
            details=str(error),
            remedy="Create it in the Prefect UI (Blocks) or take ssh.credentials out of the spec.",
        ) from error
    assert isinstance(block, SSHCredentials)
    found: dict[str, Any] = {"allow_agent": block.use_agent}
    passphrase = block.passphrase.get_secret_value() if block.passphrase else None
    if block.private_key:
        found |= {"pkey": parse_key(block.private_key.get_secret_value(), passphrase)}
        found |= {"look_for_keys": False}
    elif block.key_file:
        path = Path(block.key_file).expanduser()
        _need_file(path, f"key_file of the block {name}")
        found |= {"key_filename": str(path), "passphrase": passphrase, "look_for_keys": False}
    return found


def _need_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise LoginRefused(
            f"{what}: no file {path}", remedy="Name the private key of a pair the nodes accept."
        )


def parse_key(text: str, passphrase: str | None = None) -> PKey:
    """A private key from its text, of any kind that paramiko knows."""
    kinds: tuple[type[PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)
    for kind in kinds:
        try:
            return kind.from_private_key(StringIO(text.strip() + "\n"), password=passphrase)
        except paramiko.PasswordRequiredException as error:
            raise LoginRefused(
                "the private key is encrypted and no passphrase was given",
                remedy="Set the passphrase of the block, or load the key into an agent.",
            ) from error
        except (paramiko.SSHException, ValueError, UnicodeDecodeError):
            continue
    raise LoginRefused(
        "the private key cannot be read",
        remedy="Give an OpenSSH or PEM key (Ed25519, ECDSA or RSA), and its right passphrase.",
    )


class _RefuseUnknown(paramiko.MissingHostKeyPolicy):
    def __init__(self, node: Node, known_hosts: Path) -> None:
        self._node = node
        self._known_hosts = known_hosts

    def missing_host_key(self, client: Any, hostname: str, key: PKey) -> None:  # noqa: ARG002 - paramiko's signature
        line = f"{hostname} {key.get_name()} {key.get_base64()}"
        raise HostKeyRefused(
            f"unknown host key {fingerprint(key)} of {hostname}",
            node=self._node.name,
            remedy="If that is the node's own key (ssh-keygen -lf on the node tells), trust it:\n"
            f"echo {shlex.quote(line)} >> {shlex.quote(str(self._known_hosts))}",
        )


def fingerprint(key: PKey) -> str:
    """As `ssh-keygen -l` prints it."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


@contextlib.contextmanager
def _explained(cluster: Cluster, node: Node, known_hosts: Path) -> Iterator[None]:
    """Each way in which logging in can fail, named, with what to do about it."""
    where = f"{node.user}@{node.address}:{node.port}"
    name = node.name
    try:
        yield
    except SparkrailError:
        raise
    except paramiko.BadHostKeyException as error:
        host = node.address if node.port == 22 else f"[{node.address}]:{node.port}"
        raise HostKeyRefused(
            f"the host key of {host} has changed: it shows {fingerprint(error.key)}, "
            f"known is {fingerprint(error.expected_key)}",
            node=name,
            remedy="If the node was installed anew, forget the old key and run again:\n"
            f"ssh-keygen -f {shlex.quote(str(known_hosts))} -R {shlex.quote(host)}",
        ) from error
    except paramiko.PasswordRequiredException as error:
        raise LoginRefused(
            "the private key is encrypted and no passphrase was given",
            node=name,
            remedy="Load the key into an agent (ssh-add), or use an ssh-credentials block.",
        ) from error
    except paramiko.AuthenticationException as error:
        keys = cluster.ssh.key_file or cluster.ssh.credentials or "the agent's and ~/.ssh's keys"
        raise LoginRefused(
            f"{where} accepts none of our keys ({keys})",
            node=name,
            details=str(error),
            remedy=f"Put the public key into ~/.ssh/authorized_keys of {node.user} on {name}.",
        ) from error
    except paramiko.ChannelException as error:
        raise _no_tunnel(name, where, error) from error
    except (paramiko.SSHException, OSError, EOFError, socket.gaierror) as error:
        through = "" if node == cluster.head else f" from {cluster.head.name}"
        why = str(error) or type(error).__name__
        raise NodeUnreachable(
            f"no SSH connection to {where}{through}: {why}",
            node=name,
            remedy=f"Is {name} up, is its sshd running, and is {node.address} its address?",
        ) from error


def _no_tunnel(node: str, target: str, error: paramiko.ChannelException) -> SparkrailError:
    if error.code == 1:
        return LoginRefused(
            f"sshd forbids the tunnel to {target}",
            node=node,
            remedy="Set AllowTcpForwarding yes in the head's sshd_config and reload sshd.",
        )
    return NodeUnreachable(
        f"no connection to {target}: {error.text or 'refused'}",
        node=node,
        remedy=f"Is the address right, and does something listen on {target}?",
    )

"""Commands and files on a node, over one SSH connection per node; workers through the head.

The only module that imports fabric or paramiko, and the only place that quotes.
"""

import base64
import codecs
import contextlib
import functools
import hashlib
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import paramiko
from fabric import Config, Connection
from paramiko import Channel, PKey, Transport
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

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
# How long a node may stay silent before we ask it, and then to answer: it may be busy swapping.
PATIENCE = 20
# The kernel takes no single word above 128 KiB.
LONGEST = 130_000
# A background child of an ended command can hold its output open for ever.
LINGER = 5
RUN_VARIABLE = "SPARKRAIL_RUN"
# What the node sends and takes while a command or a tunnel is open; used like a socket.
Stream: TypeAlias = Channel

# What the node's shell runs. The first line marks where our output begins: a login shell may print
# before it. The left side of the pipe hands over exactly our standard input and then waits for the
# end of the session's, which comes when we close the channel, are killed or lose the connection;
# then it ends the whole process group (sshd makes each session a group of its own), so that nothing
# we started outlives its run. The right side runs the command and then ends the left one; the
# shell's remarks on that go to /dev/null, and only the command holds the session's stderr.
GUARDED = """\
echo {mark}
exec 3<&0 4>&2 2>/dev/null
{{
  exec 4>&-; trap '' TERM; sh -c 'echo $PPID'; head -c {length} <&3
  exec >/dev/null; cat <&3; kill -TERM 0; sleep 3; kill -KILL 0
}} | {{
  read -r guard; {command} 2>&4 3<&- 4>&-; code=$?; kill -KILL "$guard"; exit $code
}}"""

TALKING = "echo {mark}\nexec {command}"

# $1 the path, $2 the name aside, $3 the mode, $4 the digest, $5 the size. The end of its input ends
# it: SIGTERM could end the rm instead. -T: a folder of that name is an error.
PUT_DAMAGED = 9
PUT = f"""\
trap '' TERM
trap 'rm -f -- "$2"' EXIT
umask 077
mkdir -p -- "$(dirname -- "$1")" && cat >"$2" && chmod -- "$3" "$2" || exit 1
[ "$(wc -c <"$2")" -eq "$5" ] && [ "$(sha256sum <"$2")" = "$4  -" ] || exit {PUT_DAMAGED}
mv -fT -- "$2" "$1\""""

# paramiko logs every failed login as a stack trace; our errors tell it once, in words.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


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
        # Always by env: a shell's builtin echo, kill or test is not the program of that name.
        settings = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join(("env", *settings, str(self)))


# Set when the run is cancelled; every command in progress then ends its remote group.
STOP = threading.Event()
_despite_cancel: ContextVar[bool] = ContextVar("despite_cancel", default=False)


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


@contextlib.contextmanager
def despite_cancel() -> Iterator[None]:
    """Commands of this thread run although the run was cancelled: they give back what it holds."""
    token = _despite_cancel.set(True)
    try:
        yield
    finally:
        _despite_cancel.reset(token)


def _stopped() -> bool:
    return STOP.is_set() and not _despite_cancel.get()


class Remote:
    """A node that we are logged in on."""

    def __init__(self, node: Node, connection: Any, proxy: "_Proxy | None" = None) -> None:
        self.node = node
        self._connection = connection
        self._proxy = proxy
        self._sessions = threading.BoundedSemaphore(SESSIONS)
        self._silent = False

    @property
    def transport(self) -> Transport:
        transport = self._connection.transport
        if not isinstance(transport, Transport) or not transport.is_active():
            raise self._lost("the SSH connection is closed")
        return transport

    @property
    def alive(self) -> bool:
        """Connected, and it answered when it was last asked."""
        return self._connected and not self._silent

    @property
    def _connected(self) -> bool:
        transport = self._connection.transport
        return isinstance(transport, Transport) and transport.is_active()

    def close(self) -> None:
        self._connection.client.close()
        if self._proxy:
            self._proxy.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60,
        ok: Collection[int] = (0,),
        stdin: bytes | None = None,
        environment: Mapping[str, str] | None = None,
        on_output: Callable[[str], None] | None = None,
        keep: bool = True,
    ) -> Result:
        """Run one command; `ok` holds the exit codes that are answers, any other one raises.

        Without `keep`, the result does not hold again what `on_output` was given.

        On timeout, on cancel and when this process dies, the command's process group is ended.
        """
        command = Command(tuple(argv), environment or {})
        with self._slot(command):
            channel = self._session()
            try:
                out = _Output(f"sparkrail-{secrets.token_hex(6)}", on_output, keep=keep)
                result = self._converse(channel, command, stdin or b"", timeout, out)
            finally:
                channel.close()
        if result.code not in ok:
            raise command_failed(self.node, command, result)
        return result

    def start(self, argv: Sequence[str], *, shown: str) -> Stream:
        """A command that talks with us: its standard input and output, behind what a login prints.

        It must end by itself when its standard input ends. `shown` stands for it in errors.
        """
        mark = f"sparkrail-{secrets.token_hex(6)}"
        channel = self._session()
        channel.settimeout(PATIENCE)
        try:
            self._start(channel, wrap(Command(tuple(argv)), mark, None))
            line = b""
            while not (line.endswith(b"\n") and mark.encode() in line):
                byte = channel.recv(1)
                if not byte:
                    raise self._lost(f"ended before it began: {shown}")
                line = byte if line.endswith(b"\n") else line + byte
        except (OSError, EOFError, paramiko.SSHException) as error:
            channel.close()
            raise self._lost(f"connection lost during: {shown} ({error})") from error
        return channel

    def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file whole or not at all: aside, checked, then renamed over the old one."""
        aside = f"{path}.{secrets.token_hex(4)}.tmp"
        digest = hashlib.sha256(content).hexdigest()
        argv = ("sh", "-c", PUT, "sh", path, aside, f"{mode:o}", digest, str(len(content)))
        try:
            code = self.run(argv, stdin=content, ok=(0, PUT_DAMAGED), timeout=120).code
        except CommandFailed as error:
            raise CommandFailed(
                f"cannot write {path}", node=self.node.name, details=error.details
            ) from error
        if code == PUT_DAMAGED:
            raise CommandFailed(
                f"{path}: what arrived is not what was sent",
                node=self.node.name,
                remedy="Nothing was replaced; run again.",
            )

    def open_tunnel(self, host: str, port: int, timeout: float = 10) -> Stream:
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

    @contextlib.contextmanager
    def _slot(self, command: Command) -> Iterator[None]:
        while not self._sessions.acquire(timeout=POLL):
            self._unless_stopped(command)
        try:
            yield
        finally:
            self._sessions.release()

    def _unless_stopped(self, command: Command) -> None:
        if _stopped():
            raise Cancelled(f"cancelled during: {command}", node=self.node.name)

    def _session(self) -> Channel:
        """A new session; where sshd has none left for us just now, we wait for one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.transport.open_session(timeout=PATIENCE)
            except (paramiko.SSHException, OSError, EOFError) as error:
                if not _refused(error):
                    raise self._lost(f"no session: {error or 'connection lost'}") from error
                if time.monotonic() > deadline:
                    raise NodeUnreachable(
                        f"sshd gives us no further session: {error}",
                        node=self.node.name,
                        remedy="Set MaxSessions 10 or more in its sshd_config and reload sshd.",
                    ) from error
            time.sleep(POLL)

    def _start(self, channel: Channel, text: str) -> None:
        # exec_command waits for sshd's answer for ever, and a frozen node never gives it.
        watch = threading.Timer(PATIENCE, channel.close)
        watch.start()
        try:
            channel.exec_command(text)
        finally:
            watch.cancel()

    def _check_answers(self, command: Command) -> None:
        """Ask sshd for a session: a refusal is an answer too, silence is none."""
        try:
            self.transport.open_session(timeout=PATIENCE).close()
        except (paramiko.SSHException, OSError, EOFError) as error:
            if not _refused(error):
                raise self._lost(f"no answer any more during: {command}") from error

    def _lost(self, why: str) -> NodeUnreachable:
        self._silent = True
        return NodeUnreachable(
            why, node=self.node.name, remedy=f"Is {self.node.address} up? Then run again."
        )

    def _converse(
        self,
        channel: Channel,
        command: Command,
        stdin: bytes,
        timeout: float,
        out: "_Output",
    ) -> Result:
        deadline = time.monotonic() + timeout
        channel.settimeout(POLL)
        unsent = memoryview(stdin)
        try:
            self._unless_stopped(command)
            self._start(channel, wrap(command, out.mark, len(stdin)))
            while not out.take(channel, wait=not unsent):
                unsent = unsent[_send(channel, unsent) :]
                self._unless_stopped(command)
                if time.monotonic() > deadline:
                    raise CommandTimedOut(
                        f"still running after {timeout:g} s: {command}",
                        node=self.node.name,
                        details=_tail(out.stderr or out.stdout),
                        remedy="Its processes on the node were ended.",
                    )
                if out.silent_for > PATIENCE:
                    self._check_answers(command)
                    out.heard()
            code = channel.recv_exit_status()
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._lost(f"connection lost during: {command} ({error})") from error
        if code < 0 and not self._connected:
            raise self._lost(f"connection lost during: {command}")
        if not out.begun:
            raise LoginRefused(
                f"the login shell of {self.node.user} did not run our command",
                node=self.node.name,
                details=_tail(out.stderr or out.stdout),
                remedy="Give that user a login shell, and no forced command in authorized_keys "
                "or sshd_config.",
            )
        return Result(out.stdout, out.stderr, code)


def _refused(error: Exception) -> bool:
    """Whether sshd refused a channel, which also is an answer.

    paramiko keeps one exception per connection: of two threads refused at once, one gets a text.
    """
    return isinstance(error, paramiko.ChannelException) or str(error) == "Unable to open channel."


class _Output:
    """Both streams of a channel, read side by side; what a login shell prints first is dropped."""

    def __init__(
        self, mark: str, on_output: Callable[[str], None] | None, *, keep: bool = True
    ) -> None:
        self.mark = mark
        self._on_output = on_output
        self._keep = keep
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stdout = bytearray()
        self._stderr = bytearray()
        self.begun = False
        self.heard()

    @property
    def stdout(self) -> str:
        return self._stdout.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._stderr.decode(errors="replace")

    @property
    def silent_for(self) -> float:
        return time.monotonic() - self._heard

    def heard(self) -> None:
        self._heard = time.monotonic()

    def take(self, channel: Channel, *, wait: bool) -> bool:
        """Read what there is; True when the exit status is here and both streams have ended.

        sshd sends the exit status when the command ends, maybe before the last of its output.
        """
        if channel.recv_ready() or (wait and not channel.recv_stderr_ready()):
            # Waiting on stdout notices stderr late, by POLL at most.
            with contextlib.suppress(TimeoutError):
                self._add(channel.recv(65536))
        while channel.recv_stderr_ready():
            self._stderr += channel.recv_stderr(65536)
            self.heard()
        if channel.recv_ready() or channel.recv_stderr_ready():
            return False
        if channel.closed:
            return True
        if not channel.exit_status_ready():
            if channel.eof_received:
                channel.status_event.wait(POLL)
            return False
        return bool(channel.eof_received) or self.silent_for > LINGER

    def _add(self, data: bytes) -> None:
        if data:
            self.heard()
        self._stdout += data
        if not self.begun:
            start = self._stdout.find(self.mark.encode())
            end = self._stdout.find(b"\n", start) if start >= 0 else -1
            if end < 0:
                return
            data = bytes(self._stdout[end + 1 :])
            self._stdout = bytearray(data)
            self.begun = True
        if self._on_output and data:
            self._on_output(self._decoder.decode(data))
            if not self._keep:
                self._stdout.clear()


def wrap(command: Command, mark: str, length: int | None) -> str:
    """What the node's login shell, whichever it is, runs; `length` is that of the standard input.

    Without a length the command has the session's own standard input, and is not guarded.
    """
    script = TALKING if length is None else GUARDED
    script = script.format(mark=mark, command=command.shell(), length=length)
    run = os.environ.get(RUN_VARIABLE, "")
    script = f"export LC_ALL=C.UTF-8 {RUN_VARIABLE}={shlex.quote(run)}\n{script}"
    # csh and fish read '!', line breaks and backslashes inside quotes in their own ways.
    encoded = base64.b64encode(script.encode()).decode()
    if len(encoded) > LONGEST:
        raise ValueError(f"too long for a command line: {str(command)[:200]} ...")
    return f"exec /bin/sh -c 'eval \"$(echo {encoded} | base64 -d)\"'"


def command_failed(node: Node, command: Command, result: Result) -> CommandFailed:
    """The error for an exit code that is no answer."""
    names = {128 + number: number.name for number in signal.Signals}
    ended = "killed" if result.code < 0 else f"exit code {result.code}"
    if result.code in names:
        ended = f"killed by {names[result.code]}"
    return CommandFailed(
        f"{ended}: {command}", node=node.name, details=_tail(result.stderr or result.stdout)
    )


def _tail(text: str, lines: int = 10) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _send(channel: Channel, data: memoryview) -> int:
    if not data or channel.closed or channel.exit_status_ready():
        return 0  # A command may end before it read everything: its exit code tells why.
    with contextlib.suppress(TimeoutError):
        return channel.send(bytes(data[:65536]))
    return 0


# --- connections -------------------------------------------------------------------------------


class _Pool:
    """One connection per node for all threads of this process."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[object, threading.Lock] = {}
        self._remotes: dict[object, Remote] = {}
        self._retired: list[Remote] = []

    def get(self, cluster: Cluster, node: Node) -> Remote:
        key = (cluster.ssh, cluster.head.model_dump_json(), node.model_dump_json())
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            remote = self._remotes.get(key)
            if remote is None or not remote.alive:
                if remote is not None:
                    self._retire(remote)
                remote = self._remotes[key] = self._open(cluster, node)
            return remote

    def _retire(self, remote: Remote) -> None:
        # A silent one may still carry others' commands: it is closed when they are all done.
        if remote._connected:
            self._retired.append(remote)
        else:
            remote.close()

    def _open(self, cluster: Cluster, node: Node) -> Remote:
        is_head, local = node.name == cluster.head.name, cluster.head.transport == "local"
        if is_head and local:
            # Imported here: it builds on this module.
            from tasks.local import LocalRemote

            return LocalRemote(node)

        def attempt() -> Remote:
            direct = is_head or local
            return _log_in(cluster, node, None if direct else self.get(cluster, cluster.head))

        attempts = Retrying(
            retry=retry_if_exception_type(NodeUnreachable),
            # Again at once where sshd was only busy (MaxStartups), not where nothing answers.
            stop=stop_after_attempt(4) | stop_after_delay(cluster.ssh.connect_timeout / 2),
            wait=wait_random_exponential(multiplier=0.2, max=1),
            reraise=True,
        )
        return attempts(attempt)

    def close(self) -> None:
        with self._guard:
            remotes = [*self._retired, *self._remotes.values()]
            self._remotes, self._retired = {}, []
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
    _load_credentials.cache_clear()


def _log_in(cluster: Cluster, node: Node, gateway: Remote | None) -> Remote:
    timeout = cluster.ssh.connect_timeout
    if gateway is not None:
        # Fabric opens the gateway's channel without a timeout, and paramiko's default is an hour.
        gateway.transport.channel_timeout = timeout
    keys = _keys(cluster)
    known_hosts = Path(cluster.ssh.known_hosts).expanduser()
    proxy = _Proxy(node) if node.proxy_command else None
    connection = _Connection(
        host=node.address,
        user=node.user,
        port=node.port,
        gateway=gateway._connection if gateway else None,
        connect_timeout=timeout,
        config=Config(overrides={"load_ssh_configs": False}, lazy=True),
        connect_kwargs={
            "sock": proxy and proxy.socket,
            # Longer than the timeout of the whole exchange, which so is the one that ends it.
            "banner_timeout": 2 * timeout,
            "auth_timeout": timeout,
            "channel_timeout": timeout,
            **keys,
        },
    )
    remote = Remote(node, connection, proxy)
    try:
        _trust(connection.client, known_hosts)
        # Fabric accepts any key unless told otherwise (fabric #1804, #2071).
        connection.client.set_missing_host_key_policy(_RefuseUnknown(node, known_hosts))
        with _explained(cluster, node, known_hosts, proxy):
            connection.open()
        connection.transport.set_keepalive(15)
        _without_delay(connection.transport.sock)
    except BaseException:
        remote.close()
        raise
    return remote


class _Connection(Connection):  # type: ignore[misc] # Fabric tells no types.
    """Fabric's, whose end by way of a gateway that has ended before is no error of a thread."""

    def open_gateway(self) -> Any:
        channel = super().open_gateway()
        close = channel.close

        def quietly() -> None:
            # It wants to tell the other side; the connection that it runs through is gone.
            with contextlib.suppress(EOFError):
                close()

        channel.close = quietly
        return channel


def _without_delay(sock: Any) -> None:
    # Else each new session waits 40 ms for the ACK of the message that closed the last one.
    if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Proxy:
    """The program of a proxy_command, run as OpenSSH runs it, at the other end of a socket.

    paramiko's ProxyCommand, which Fabric takes for a text as gateway, reads the end of the program
    as silence, for ever.
    """

    def __init__(self, node: Node) -> None:
        words = {"%h": node.address, "%n": node.address, "%p": str(node.port), "%r": node.user}
        command = re.sub(
            "%[%hnpr]", lambda found: words.get(found[0], "%"), node.proxy_command or ""
        )
        self.socket, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # A group of its own: Ctrl-C is for us, who still need the connection to end what runs.
        self._process = subprocess.Popen(
            ("/bin/sh", "-c", f"exec {command}"),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=self._stderr,
            start_new_session=True,
        )
        theirs.close()

    @property
    def said(self) -> str:
        self._stderr.seek(0)
        text = _tail(self._stderr.read(65536).decode(errors="replace"))
        return f"proxy_command said: {text}" if text else ""

    def close(self) -> None:
        self.socket.close()
        self._process.terminate()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()


def _trust(client: paramiko.SSHClient, known_hosts: Path) -> None:
    """Load a known_hosts file; a line that paramiko cannot read only trusts nobody."""
    try:
        lines = known_hosts.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise HostKeyRefused(
            f"ssh.known_hosts cannot be read: {error}",
            remedy="Name a file that holds the host keys of all nodes.",
        ) from error
    for line in map(str.strip, lines):
        # paramiko takes the marks of OpenSSH (@cert-authority, @revoked) for host names.
        if not line or line[0] in "#@":
            continue
        with contextlib.suppress(InvalidHostKey, paramiko.SSHException, ValueError):
            entry = HostKeyEntry.from_line(line)
            if entry and entry.hostnames and entry.key:
                for name in entry.hostnames:
                    client.get_host_keys().add(name, entry.key.get_name(), entry.key)


def _keys(cluster: Cluster) -> dict[str, Any]:
    if cluster.ssh.credentials:
        return _keys_of_block(cluster.ssh.credentials)
    if cluster.ssh.key_file:
        return _key_of_file(cluster.ssh.key_file, "ssh.key_file", None)
    return {}


@functools.lru_cache
def _load_credentials(name: str) -> Any:
    """Once for all connections of a run: the Prefect API may be away when one must be made anew."""
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
    return block


def _keys_of_block(name: str) -> dict[str, Any]:
    block = _load_credentials(name)
    found: dict[str, Any] = {"allow_agent": block.use_agent}
    passphrase = block.passphrase.get_secret_value() if block.passphrase else None
    if block.private_key:
        found |= {"pkey": parse_key(block.private_key.get_secret_value(), passphrase)}
        found |= {"look_for_keys": False}
    elif block.key_file:
        found |= _key_of_file(block.key_file, f"key_file of the block {name}", passphrase)
    return found


def _key_of_file(name: str, what: str, passphrase: str | None) -> dict[str, Any]:
    path = Path(name).expanduser()
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise LoginRefused(
            f"{what}: {path}: {error.strerror}",
            remedy="Name the private key of a pair that the nodes accept.",
        ) from error
    try:
        key = _read_key(text, passphrase)
    except paramiko.PasswordRequiredException as error:
        agent = paramiko.Agent()
        held = agent.get_keys()
        agent.close()
        if not held:
            raise LoginRefused(
                f"{what}: {path} is encrypted and no passphrase was given",
                remedy="Load the key into an agent (ssh-add), or use an ssh-credentials block.",
            ) from error
        return {"look_for_keys": False}  # The agent may hold it.
    if key is None:
        raise _unreadable(f"{what}: {path}", text)
    certificate = Path(f"{path}-cert.pub")
    if certificate.is_file():
        key.load_certificate(str(certificate))
    return {"pkey": key, "look_for_keys": False}


def parse_key(text: str, passphrase: str | None = None) -> PKey:
    """A private key from its text, of any kind that paramiko knows."""
    try:
        key = _read_key(text, passphrase)
    except paramiko.PasswordRequiredException as error:
        raise LoginRefused(
            "the private key is encrypted and no passphrase was given",
            remedy="Set the passphrase of the block, or load the key into an agent.",
        ) from error
    if key is None:
        raise _unreadable("the private key", text)
    return key


def _read_key(text: str, passphrase: str | None) -> PKey | None:
    kinds: tuple[type[PKey], ...] = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)
    for kind in kinds:
        try:
            return kind.from_private_key(StringIO(text.strip() + "\n"), password=passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError, TypeError, IndexError, struct.error):
            continue
    return None


def _unreadable(what: str, text: str) -> LoginRefused:
    try:
        _read_key(text, None)
    except paramiko.PasswordRequiredException:
        return LoginRefused(
            f"{what}: the passphrase is wrong",
            remedy="Correct the passphrase of the ssh-credentials block.",
        )
    return LoginRefused(
        f"{what} is no private key that we can read",
        remedy="Give an OpenSSH or PEM key: Ed25519, ECDSA or RSA (not the .pub file).",
    )


class _RefuseUnknown(paramiko.MissingHostKeyPolicy):
    def __init__(self, node: Node, known_hosts: Path) -> None:
        self._node = node
        self._known_hosts = known_hosts

    def missing_host_key(self, client: Any, hostname: str, key: PKey) -> None:  # noqa: ARG002 - paramiko's signature
        # known_hosts may be absent, or end without a line break.
        kind = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(key.get_name(), "ecdsa")
        line = f"{hostname} {key.get_name()} {key.get_base64()}"
        folder, path = map(shlex.quote, (str(self._known_hosts.parent), str(self._known_hosts)))
        raise HostKeyRefused(
            f"unknown host key {fingerprint(key)} of {hostname}",
            node=self._node.name,
            remedy="If that is what `ssh-keygen -lf /etc/ssh/ssh_host_"
            f"{kind}_key.pub` prints on {self._node.name} itself, trust it:\n"
            f"mkdir -p {folder} && printf '\\n%s\\n' {shlex.quote(line)} >> {path}",
        )


def fingerprint(key: PKey) -> str:
    """As `ssh-keygen -l` prints it."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


@contextlib.contextmanager
def _explained(
    cluster: Cluster, node: Node, known_hosts: Path, proxy: _Proxy | None
) -> Iterator[None]:
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
    except paramiko.ChannelException as error:
        if error.code == 1:
            raise _no_tunnel(cluster.head.name, where, error) from error
        raise _no_connection(cluster, node, error.text) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        why = str(error) or type(error).__name__
        if isinstance(error, paramiko.AuthenticationException) and "timeout" not in why.lower():
            raise _not_let_in(cluster, node, why) from error
        if "No authentication methods" in why:
            raise _not_let_in(cluster, node, "we have no key to offer") from error
        if why == "No existing session":
            why = f"no answer within {cluster.ssh.connect_timeout} s"
        raise _no_connection(cluster, node, why, proxy.said if proxy else "") from error


def _no_connection(cluster: Cluster, node: Node, why: str, details: str = "") -> NodeUnreachable:
    through = "" if node.name == cluster.head.name else f" from {cluster.head.name}"
    return NodeUnreachable(
        f"no SSH connection to {node.user}@{node.address}:{node.port}{through}: {why}",
        node=node.name,
        details=details,
        remedy=f"Is {node.name} up, is its sshd running, and is {node.address} its address?",
    )


def _not_let_in(cluster: Cluster, node: Node, why: str) -> LoginRefused:
    keys = cluster.ssh.key_file or cluster.ssh.credentials or "the agent's and ~/.ssh's keys"
    return LoginRefused(
        f"{node.user}@{node.address}:{node.port} accepts none of our keys ({keys})",
        node=node.name,
        details=why,
        remedy=f"Put the public key into ~/.ssh/authorized_keys of {node.user} on {node.name}; "
        "with many keys in the agent, name one by ssh.key_file.",
    )


def _no_tunnel(node: str, target: str, error: paramiko.ChannelException) -> SparkrailError:
    if error.code == 1:
        return LoginRefused(
            f"sshd forbids the tunnel to {target}",
            node=node,
            remedy=f"Set AllowTcpForwarding yes in sshd_config on {node} and reload sshd.",
        )
    return NodeUnreachable(
        f"no connection to {target}: {error.text or 'refused'}",
        node=node,
        remedy=f"Is the address right, and does something listen on {target}?",
    )

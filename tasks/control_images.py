"""The control machine's own docker: what it says of an image, and sending that to the head."""

import json
import select
import subprocess
import tempfile
import time
from typing import IO, Any

from blocks import Cluster, Node
from tasks import remote
from tasks.errors import Cancelled, CommandTimedOut, NodeUnreachable, SparkrailError
from tasks.image_streams import STEP, Moved, deadline, problem, save_command
from tasks.remote import Stream, connect
from tasks.transfers import Progress

BLOCK = 1 << 18


def control_image(name: str) -> Any:
    """What the control machine's docker says about an image."""
    # Not `inspect` at once: it exits 1 both when the image is absent and when docker is down.
    if not _local_docker("image", "ls", "--quiet", "--no-trunc", name).strip():
        raise SparkrailError(
            f"there is no image {name} on the control machine",
            remedy=f"Get it there (docker pull {name}), or take the head's: image.source: head.",
        )
    return json.loads(_local_docker("image", "inspect", name))[0]


def _local_docker(*arguments: str) -> str:
    try:
        return subprocess.run(
            ("docker", *arguments), capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except FileNotFoundError as error:
        raise SparkrailError(
            "there is no docker on the control machine",
            remedy="Install it, or have the image on the head and set image.source: head.",
        ) from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SparkrailError(
            "docker on the control machine does not answer",
            details=str(error.stderr or error).strip(),
            remedy="Does `docker info` work there?",
        ) from error


def send_from_control(cluster: Cluster, name: str, size: int) -> Moved:
    """Through our one connection: the control machine's `docker save` into the head's load."""
    head = connect(cluster, cluster.head)
    with tempfile.TemporaryFile() as stderr, Progress(STEP, cluster, cluster.head, size) as bar:
        source = subprocess.Popen(
            save_command(name), bufsize=0, stdout=subprocess.PIPE, stderr=stderr
        )
        try:
            with head.start(("docker", "load"), shown="docker load") as sink:
                assert source.stdout is not None
                uplink = _Uplink(cluster.head, sink, deadline(size), bar)
                moved = uplink.move(source, source.stdout)
        finally:
            source.kill()
            source.wait()
        stderr.seek(0)
        moved = moved.model_copy(
            update={"source_said": stderr.read()[-2000:].decode(errors="replace").strip()}
        )
        failed = problem("control", cluster.head, moved, None)
        if failed:
            raise failed
        bar.finished(moved.bytes)
    return moved


class _Uplink:
    """Feeds a command on the head from a local one, block by block."""

    def __init__(self, head: Node, sink: Stream, timeout: float, progress: Progress) -> None:
        self.head = head
        self.sink = sink
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.progress = progress
        self.bytes = 0
        sink.settimeout(remote.POLL)

    def move(self, source: subprocess.Popen[bytes], out: IO[bytes]) -> Moved:
        refused = False
        while block := self._read(out):
            if not self._send(block):
                refused = True
                break
        out.close()
        code = source.wait()
        self.sink.shutdown_write()
        said = self._said()
        return Moved(
            source_code=code,
            sink_code=self._exit_code(),
            bytes=self.bytes,
            seconds=time.monotonic() - self.began,
            refused=refused,
            sink_said=said,
        )

    def _read(self, out: IO[bytes]) -> bytes:
        while not select.select([out], [], [], remote.POLL)[0]:
            self._check()
        return out.read(BLOCK)

    def _send(self, block: bytes) -> bool:
        view = memoryview(block)
        while view:
            self._check()
            try:
                sent = self.sink.send(bytes(view[:65536]))
            except TimeoutError:
                continue
            except OSError:
                return False
            if not sent:
                return False
            self.bytes += sent
            view = view[sent:]
        return True

    def _said(self) -> str:
        said = b""
        while not self.sink.exit_status_ready() or self.sink.recv_stderr_ready():
            self._check()
            try:
                said += self.sink.recv_stderr(4096)
            except TimeoutError:
                continue
            if self.sink.closed:
                break
            self.sink.status_event.wait(remote.POLL)
        return said[-2000:].decode(errors="replace").strip()

    def _exit_code(self) -> int:
        code = self.sink.recv_exit_status()
        if code < 0:
            raise NodeUnreachable("connection lost during: docker load", node=self.head.name)
        return code

    def _check(self) -> None:
        if remote.STOP.is_set():
            raise Cancelled("cancelled during: docker load", node=self.head.name)
        now = time.monotonic()
        if now > self.deadline:
            raise CommandTimedOut(
                f"still running after {now - self.began:.0f} s: docker load", node=self.head.name
            )
        self.progress.told(self.bytes)

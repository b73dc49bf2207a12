"""The control machine as source: what its docker or its archive holds, sent to the head."""

import json
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from blocks import Cluster, Image, Node
from tasks import remote
from tasks.archived_images import archived_image, archived_layers
from tasks.errors import Cancelled, CommandTimedOut, NodeUnreachable, SparkrailError
from tasks.image_deliveries import Parcel
from tasks.image_layers import look, spare
from tasks.image_streams import (
    LOAD,
    STALL,
    STEP,
    Moved,
    deadline,
    load_problem,
    refuses_part,
    save_command,
    save_problem,
)
from tasks.relayed.image_archive import LayerFilter
from tasks.remote import Stream, connect
from tasks.transfers import Progress

BLOCK = 1 << 18


def control_image(image: Image, name: str) -> Any:
    """What the control machine's docker, or its archive, says about an image."""
    if image.archive:
        return archived_image(image.archive, name)
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


def send_from_control(cluster: Cluster, parcel: Parcel) -> Moved:
    """Through our one connection: what the head lacks of the image, into its load."""
    head = cluster.head
    target = look(cluster, head, parcel.layers)
    image = cluster.image
    lacked = LayerFilter(
        parcel.layers,
        spare(parcel.layers, [target]),
        names=archived_layers(image.archive, parcel.name) if image.archive else None,
        legacy=not target.containerd,
    )
    with Progress(STEP, cluster, head, parcel.size) as bar:
        moved = _stream(cluster, parcel, lacked, bar)
        if refuses_part(moved):
            why = moved.load_said.rpartition("\n")[2]
            moved = _stream(cluster, parcel, LayerFilter(), bar).model_copy(
                update={"note": f"all of it, since docker load refused a part of it ({why})"}
            )
        for failed in (save_problem("control", moved), load_problem("control", head, moved)):
            if failed and not (moved.refused and failed.node == "control"):
                raise failed
        bar.finished(moved.bytes)
    return moved


def source_command(image: Image, name: str) -> list[str]:
    if image.archive:
        return ["cat", str(Path(image.archive).expanduser())]
    return save_command(name)


def _stream(cluster: Cluster, parcel: Parcel, lacked: LayerFilter, bar: Progress) -> Moved:
    head = connect(cluster, cluster.head)
    with tempfile.TemporaryFile() as stderr:
        source = subprocess.Popen(
            source_command(cluster.image, parcel.name),
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        try:
            with head.start(LOAD, shown="docker load") as sink:
                assert source.stdout is not None
                uplink = _Uplink(cluster.head, sink, deadline(parcel.size), bar)
                moved = uplink.move(source, source.stdout, lacked)
        finally:
            source.kill()
            source.wait()
        stderr.seek(0)
        said = stderr.read()[-2000:].decode(errors="replace").strip()
    return moved.model_copy(update={"source_said": said})


class _Uplink:
    """Feeds a command on the head from a local one, block by block."""

    def __init__(self, head: Node, sink: Stream, timeout: float, progress: Progress) -> None:
        self.head = head
        self.sink = sink
        self.began = self.moved = time.monotonic()
        self.deadline = self.began + timeout
        self.progress = progress
        self.read = self.bytes = 0
        sink.settimeout(remote.POLL)

    def move(self, source: subprocess.Popen[bytes], out: IO[bytes], lacked: LayerFilter) -> Moved:
        refused = False
        while not refused and (block := self._read(out)):
            self.read += len(block)
            refused = not all(self._send(bytes(part)) for part in lacked.feed(block))
        out.close()
        code = source.wait()
        broken = "" if refused or lacked.whole else "docker save ended in the midst of a file"
        if (code != 0 and not refused) or broken:
            # Cut off at the right place, it would look like an image.
            self.sink.close()
            return Moved(source_code=code, read=self.read, bytes=self.bytes, broken=broken)
        self.sink.shutdown_write()
        said = self._said()
        return Moved(
            source_code=code,
            read=self.read,
            bytes=self.bytes,
            seconds=time.monotonic() - self.began,
            legacy=lacked.is_legacy,
            left_out=len(lacked.left_out),
            sent_anyway=lacked.sent_anyway,
            load_code=self._exit_code(),
            load_said=said,
            refused=refused,
        )

    def _read(self, out: IO[bytes]) -> bytes:
        while not select.select([out], [], [], remote.POLL)[0]:
            self._check()
            if not self.read:
                self.moved = time.monotonic()  # Older engines gather the whole image first.
            self._check_moves("docker save writes no byte")
        self.moved = time.monotonic()
        return out.read(BLOCK)

    def _send(self, block: bytes) -> bool:
        view = memoryview(block)
        while view:
            self._check()
            try:
                sent = self.sink.send(bytes(view[:65536]))
            except TimeoutError:
                self._check_moves("docker load takes no byte")
                continue
            except OSError:
                return False
            if not sent:
                return False
            self.bytes += sent
            self.moved = time.monotonic()
            view = view[sent:]
        return True

    def _said(self) -> str:
        """What the load says on either of its outputs, until it ends."""
        said = b""
        while not self.sink.closed:
            self._check()
            if self.sink.recv_ready():
                said += self.sink.recv(4096)
            elif self.sink.recv_stderr_ready():
                said += self.sink.recv_stderr(4096)
            elif self.sink.exit_status_ready():
                break
            else:
                self.sink.status_event.wait(remote.POLL)
        return said[-2000:].decode(errors="replace").strip()

    def _exit_code(self) -> int:
        code = self.sink.recv_exit_status()
        if code < 0:
            raise NodeUnreachable("connection lost during: docker load", node=self.head.name)
        return code

    def _check_moves(self, what: str) -> None:
        if time.monotonic() - self.moved > STALL:
            raise NodeUnreachable(
                f"the image from the control machine: {what} for {STALL:.0f} s",
                node=self.head.name,
                remedy="Is the connection up, and does docker answer at both ends? Then run again.",
            )

    def _check(self) -> None:
        if remote.STOP.is_set():
            raise Cancelled("cancelled during: docker load", node=self.head.name)
        now = time.monotonic()
        if now > self.deadline:
            raise CommandTimedOut(
                f"still running after {now - self.began:.0f} s: docker load", node=self.head.name
            )
        self.progress.told(self.bytes)

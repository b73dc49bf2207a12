"""Docker image archives (`docker load`), composed without docker: layers, config, manifest.

The same files and the same config give the same bytes.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeAlias

CREATED = "2024-01-01T00:00:00Z"
MTIME = 1_704_067_200
CHUNK = 1 << 20

Member: TypeAlias = tuple[tarfile.TarInfo, IO[bytes]]


class Sink(Protocol):
    def write(self, data: bytes, /) -> int: ...


@dataclass(frozen=True)
class Layer:
    """An uncompressed layer on disk; diff_id is the SHA-256 of the file."""

    path: Path
    diff_id: str


@dataclass(frozen=True)
class Image:
    """All that an archive is made of."""

    tag: str
    layers: tuple[Layer, ...]
    architecture: str
    env: Mapping[str, str]
    entrypoint: Sequence[str] | None = None

    def config(self) -> bytes:
        diff_ids = [f"sha256:{layer.diff_id}" for layer in self.layers]
        container = {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "Entrypoint": None if self.entrypoint is None else list(self.entrypoint),
            "Cmd": None,
            "WorkingDir": "/",
        }
        return _json(
            {
                "architecture": self.architecture,
                "os": "linux",
                "created": CREATED,
                "config": container,
                "rootfs": {"type": "layers", "diff_ids": diff_ids},
                "history": [{"created": CREATED} for _ in self.layers],
            }
        )


def write_archive(image: Image, file: Path, left_out: Collection[Layer] = ()) -> None:
    """The image as `docker load` reads it; `left_out` are layers that the loading side has."""
    config = image.config()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = {
        "Config": config_name,
        "RepoTags": [image.tag],
        # The layout of `docker save` before version 25, which every version reads.
        "Layers": [f"{layer.diff_id}/layer.tar" for layer in image.layers],
    }
    # Unbuffered, because the kernel writes the layers beside Python's back.
    with file.open("wb", buffering=0) as archive:
        for name, content in (("manifest.json", _json([manifest])), (config_name, config)):
            _write_member(archive, *file_member(name, content))
        for layer in image.layers:
            if layer not in left_out:
                _write_layer_member(archive, layer)
        _write_end(archive)


def write_layer(members: Iterable[Member], file: Path) -> str:
    """An uncompressed layer with these members; returns its diff_id."""
    with file.open("wb") as raw:
        layer = _Digesting(raw)
        for info, content in members:
            _write_member(layer, info, content)
        _write_end(layer)
    return layer.sha256.hexdigest()


def tree_members(root: Path, start: str = ".", empty: Collection[str] = ()) -> Iterator[Member]:
    """What lies at root/start, sorted, and the folders that lead there.

    Of the folders in `empty` only the folder itself.
    """
    # It remembers inodes, so that a second name of a file becomes a hard link.
    links = tarfile.TarFile(fileobj=io.BytesIO(), mode="w")
    leading = [root / parent for parent in reversed(Path(start).parents)]
    for path in [*leading, *_walk(root / start, [root / name for name in empty])]:
        name = str(path.relative_to(root))
        info = None if name == "." else links.gettarinfo(path, arcname=name)
        if info is None:
            continue
        # Numbers only: the names of this machine mean nothing in the image.
        info.uname = info.gname = ""
        info.mtime = MTIME
        if info.isreg():
            with path.open("rb") as content:
                yield info, content
        else:
            yield info, io.BytesIO()


def file_members(files: Mapping[str, bytes]) -> Iterator[Member]:
    """Files of root made from their content, with their folders; programs are executable."""
    names = sorted(name.strip("/") for name in files)
    folders = {str(parent) for name in names for parent in Path(name).parents}
    for folder in sorted(folders - {"."}):
        yield _entry(folder, tarfile.DIRTYPE, 0o755), io.BytesIO()
    content = {name.strip("/"): data for name, data in files.items()}
    yield from (file_member(name, content[name]) for name in names)


def file_member(name: str, content: bytes) -> Member:
    program = content.startswith((b"#!", b"\x7fELF"))
    info = _entry(name, tarfile.REGTYPE, 0o755 if program else 0o644)
    info.size = len(content)
    return info, io.BytesIO(content)


def link_member(name: str, target: str) -> Member:
    info = _entry(name, tarfile.SYMTYPE, 0o777)
    info.linkname = target
    return info, io.BytesIO()


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = kind, mode, MTIME
    return info


def _walk(path: Path, empty: Collection[Path]) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink() and path not in empty:
        for child in sorted(path.iterdir()):
            yield from _walk(child, empty)


def _write_member(sink: Sink, info: tarfile.TarInfo, content: IO[bytes]) -> None:
    sink.write(_header(info))
    while data := content.read(CHUNK):
        sink.write(data)
    sink.write(_padding(info.size))


def _write_layer_member(archive: IO[bytes], layer: Layer) -> None:
    info = _entry(f"{layer.diff_id}/layer.tar", tarfile.REGTYPE, 0o644)
    info.size = layer.path.stat().st_size
    archive.write(_header(info))
    with layer.path.open("rb") as source:
        left = info.size
        while left:
            left -= os.sendfile(archive.fileno(), source.fileno(), None, left)
    archive.write(_padding(info.size))


def _write_end(sink: Sink) -> None:
    sink.write(bytes(2 * tarfile.BLOCKSIZE))


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


class _Digesting:
    """Passes on what is written, and digests it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes, /) -> int:
        self.sha256.update(data)
        return self.sink.write(data)

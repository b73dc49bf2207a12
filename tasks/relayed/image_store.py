"""An image as an engine with the classic store keeps it, read where that is allowed.

Relayed to the node as a part of image_stream.py; standard library of Python 3.8 only. `docker save`
gathers every layer of an image, the spare ones too, before it writes the first byte; this reads
only those that are wanted. Whoever loads the result checks the digest of every layer.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import tarfile
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from tasks.relayed.image_archive import chain_ids

BLOCK = 1 << 20
FILE, SEGMENT = 1, 2  # The kinds of entries in a tar-split file.


class Layer(NamedTuple):
    """Where a layer lies: its files, and what a tar archive of them has around them."""

    diff_id: str
    files: str
    split: str


def stored(
    root: str, image_id: str, layers: Sequence[str], wanted: Collection[str]
) -> tuple[bytes, list[Layer]] | None:
    """The config and the wanted layers; none where they cannot be read, or lie in another way."""
    try:
        folder = os.path.join(root, "image", "overlay2")
        config = read(os.path.join(folder, "imagedb", "content", *image_id.split(":")))
        if f"sha256:{hashlib.sha256(config).hexdigest()}" != image_id:
            return None
        found: list[Layer] = []
        for diff_id, chain_id in zip(layers, chain_ids(layers)):  # noqa: B905 - Python 3.8
            place = os.path.join(folder, "layerdb", *chain_id.split(":"))
            if diff_id not in wanted or diff_id in {layer.diff_id for layer in found}:
                continue
            if read(os.path.join(place, "diff")).decode() != diff_id:
                return None
            cache_id = read(os.path.join(place, "cache-id")).decode()
            layer = Layer(
                diff_id,
                os.path.join(root, "overlay2", cache_id, "diff"),
                os.path.join(place, "tar-split.json.gz"),
            )
            os.listdir(layer.files)
            with open(layer.split, "rb"):
                found.append(layer)
    except (OSError, ValueError):
        return None
    return config, found


def archive(
    name: str, config: bytes, layers: Sequence[str], kept: Sequence[Layer]
) -> Iterator[bytes]:
    """An image archive in the older layout, which every classic store reads, in blocks."""
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = {
        "Config": config_name,
        "RepoTags": [name],
        "Layers": [layer_name(layer) for layer in layers],
    }
    for member, content in (
        ("manifest.json", json.dumps([manifest]).encode()),
        (config_name, config),
    ):
        yield header(member, len(content)) + content + padding(len(content))
    for layer in kept:
        size = sum(length for _, length in pieces(layer))
        yield header(layer_name(layer.diff_id), size)
        yield from joined(layer)
        if size % tarfile.BLOCKSIZE:
            yield padding(size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def layer_name(diff_id: str) -> str:
    return f"{diff_id.partition(':')[2]}/layer.tar"


def header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def pieces(layer: Layer) -> Iterator[tuple[dict[str, Any], int]]:
    """What a layer's archive consists of, in order, each with its length."""
    with gzip.open(layer.split) as lines:
        for line in lines:
            entry = json.loads(line)
            if entry["type"] == SEGMENT:
                text = entry.get("payload") or ""
                yield entry, len(text) * 3 // 4 - text.count("=")
            elif entry["type"] == FILE:
                yield entry, entry.get("size", 0)


def joined(layer: Layer) -> Iterator[bytes]:
    """The layer's archive, byte by byte as it once was loaded."""
    block = bytearray()
    for entry, length in pieces(layer):
        if entry["type"] == SEGMENT:
            block += base64.b64decode(entry.get("payload") or "")
        elif length:
            for part in content(layer, entry, length):
                block += part
                if len(block) >= BLOCK:
                    yield bytes(block)
                    block.clear()
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def content(layer: Layer, entry: dict[str, Any], length: int) -> Iterator[bytes]:
    """One file; one that has changed its size is an error here, any other change at the loader."""
    name = base64.b64decode(entry["name_raw"]) if "name_raw" in entry else entry["name"].encode()
    with open(os.path.join(layer.files.encode(), name.lstrip(b"/")), "rb", buffering=0) as file:
        while length:
            part = file.read(min(length, BLOCK))
            if not part:
                raise OSError(f"{name.decode(errors='replace')} is shorter than it was")
            length -= len(part)
            yield part


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()

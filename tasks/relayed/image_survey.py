"""Which layer lies in which blob of an image, as `docker save` writes it.

Relayed to the node; standard library of Python 3.8 only. Argument: {"save": the command, "layers":
the diff ids}. An engine with the containerd store keeps layers as they were pulled, compressed and
named by that; what tells which is which comes last. Reads no further than it takes to know.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

SMALL = 1 << 20
FOLDER = "blobs/sha256/"


def survey(archive: IO[bytes], layers: Sequence[str]) -> dict[str, str]:
    """The layer in each blob; nothing where blobs are named by the layers themselves."""
    texts: dict[str, Any] = {}
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        for member in tar:
            if not member.name.startswith(FOLDER) or not member.isreg():
                continue
            digest = f"sha256:{member.name[len(FOLDER) :]}"
            if digest in layers:
                return {}
            content = tar.extractfile(member) if member.size <= SMALL else None
            try:
                texts[digest] = json.loads(content.read()) if content else None
            except ValueError:
                continue
    return matched(texts, layers)


def matched(texts: Mapping[str, Any], layers: Sequence[str]) -> dict[str, str]:
    """Of the manifests, the one whose config has exactly these layers."""
    for manifest in _mappings(texts.values()):
        config = texts.get((manifest.get("config") or {}).get("digest", ""))
        found = (config or {}).get("rootfs", {}).get("diff_ids")
        blobs = [layer.get("digest", "") for layer in manifest.get("layers") or []]
        if found == list(layers) and len(blobs) == len(layers):
            return {blob: layers[at] for at, blob in enumerate(blobs)}
    return {}


def _mappings(values: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    return (value for value in values if isinstance(value, dict))


def main(_program: str, orders: str) -> None:
    asked = json.loads(orders)
    process = subprocess.Popen(asked["save"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        found = survey(process.stdout, asked["layers"])
    except tarfile.TarError:
        found = {}  # The transfer itself will say what is wrong.
    finally:
        process.kill()
        process.wait()
    print(json.dumps({"blobs": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])

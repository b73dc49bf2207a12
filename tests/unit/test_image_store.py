"""An image read from the folder of a classic store, laid out here as engine 20.10 does it."""

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tasks.relayed.image_archive import chain_ids
from tasks.relayed.image_store import archive, pieces, stored
from tests.lab.docker_archive import file_members, link_member, write_layer

BIG = b"x" * 3_000_000


class Store:
    """The folder, with one image of three layers; the third is the first once more."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tars: dict[str, bytes] = {}
        base, top = self.layer_tar(b"base"), self.layer_tar(BIG)
        self.layers = [self.digest(text) for text in (base, top, base)]
        self.tars = {self.digest(text): text for text in (base, top)}
        for place, layer in zip(chain_ids(self.layers), self.layers, strict=True):
            self.add(place, layer)
        self.config = json.dumps({"rootfs": {"diff_ids": self.layers}}).encode()
        self.image_id = self.digest(self.config)
        self.write("image/overlay2/imagedb/content/" + self.image_id.replace(":", "/"), self.config)

    def layer_tar(self, content: bytes) -> bytes:
        file = self.root / "made.tar"
        members = [
            *file_members({"etc/empty": b"", "etc/file": content, "etc/.wh.gone": b""}),
            link_member("etc/link", "file"),
            *file_members({"na\udce9me": b"of other bytes"}),
        ]
        write_layer(members, file)
        return file.read_bytes()

    @staticmethod
    def digest(text: bytes) -> str:
        return "sha256:" + hashlib.sha256(text).hexdigest()

    def write(self, path: str, content: bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def add(self, chain_id: str, layer: str) -> None:
        place = "image/overlay2/layerdb/" + chain_id.replace(":", "/")
        cache_id = hashlib.sha256(chain_id.encode()).hexdigest()
        self.write(f"{place}/diff", layer.encode())
        self.write(f"{place}/cache-id", cache_id.encode())
        self.write(f"{place}/tar-split.json.gz", gzip.compress(self.split(layer, cache_id)))

    def split(self, layer: str, cache_id: str) -> bytes:
        """What lies around the files; the files themselves go to the folder."""
        text, at = self.tars[layer], 0
        entries: list[dict[str, Any]] = []

        def segment(end: int) -> None:
            payload = base64.b64encode(text[at:end]).decode()
            entries.append({"type": 2, "payload": payload, "position": len(entries)})

        with tarfile.open(fileobj=io.BytesIO(text)) as tar:
            for member in tar:
                segment(member.offset_data)
                at = member.offset_data + (member.size if member.isreg() else 0)
                name = member.name.encode(errors="surrogateescape")
                entry: dict[str, Any] = {"type": 1, "size": member.size, "position": len(entries)}
                is_text = name.isascii()
                key = "name" if is_text else "name_raw"
                entry |= {key: name.decode() if is_text else base64.b64encode(name).decode()}
                entries.append(entry)
                if member.isreg() and ".wh." not in member.name:
                    self.write(
                        f"overlay2/{cache_id}/diff/{member.name}",
                        text[member.offset_data : at],
                    )
        segment(len(text))
        return b"\n".join(json.dumps(entry).encode() for entry in entries)

    def archived(self, *wanted: str) -> bytes:
        found = stored(str(self.root), self.image_id, self.layers, wanted)
        assert found is not None
        return b"".join(archive("app:1", found[0], self.layers, found[1]))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (0, 1, 2)])
def test_the_wanted_layers_come_out_as_they_went_in(store: Store, wanted: tuple[int, ...]) -> None:
    wanted_layers = {store.layers[at] for at in wanted}
    with tarfile.open(fileobj=io.BytesIO(store.archived(*wanted_layers))) as tar:
        names = [member.name for member in tar]
        contents = {name: tar.extractfile(name) for name in names}
        texts = {name: file.read() for name, file in contents.items() if file}
    [manifest] = json.loads(texts.pop("manifest.json"))
    assert manifest["RepoTags"] == ["app:1"]
    assert texts.pop(manifest["Config"]) == store.config
    places = dict(zip(store.layers, manifest["Layers"], strict=True))
    assert texts == {places[layer]: store.tars[layer] for layer in wanted_layers}


def test_no_block_is_large(store: Store) -> None:
    found = stored(str(store.root), store.image_id, store.layers, store.layers)
    assert found is not None
    blocks = [len(block) for block in archive("app:1", found[0], store.layers, found[1])]
    assert 0 < min(blocks) <= max(blocks) < 2 * 1024 * 1024
    sizes = {layer.diff_id: sum(size for _, size in pieces(layer)) for layer in found[1]}
    assert sizes == {layer: len(text) for layer, text in store.tars.items()}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("rm -r image", id="no such store"),
        pytest.param("rm -r overlay2", id="the files lie elsewhere"),
        pytest.param("rm image/overlay2/layerdb/sha256/*/tar-split.json.gz", id="another engine"),
        pytest.param(
            "sed -i s/rootfs/ROOTFS/ image/overlay2/imagedb/content/sha256/*", id="another config"
        ),
        pytest.param(
            "for f in image/overlay2/layerdb/sha256/*/diff; do echo sha256:0 >$f; done",
            id="other layers",
        ),
    ],
)
def test_what_cannot_be_read_is_left_to_docker(store: Store, damage: str) -> None:
    subprocess.run(["sh", "-c", damage], cwd=store.root, check=True)
    assert stored(str(store.root), store.image_id, store.layers, store.layers) is None


def test_a_file_that_was_cut_off_is_no_layer(store: Store) -> None:
    for file in store.root.glob("overlay2/*/diff/etc/file"):
        file.write_bytes(b"x")
    with pytest.raises(OSError, match="etc/file is shorter than it was"):
        store.archived(*store.layers)

"""What `docker save` writes, as a stream, without the layers that its receivers have.

Relayed to the node as a part of image_stream.py; standard library of Python 3.8 only. Nothing is
kept but headers and the small texts that tell which member is which layer.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

BLOCK = tarfile.BLOCKSIZE
# Since version 25, and from the containerd store: named by the digest of what lies in it.
BLOB = re.compile(r"blobs/(sha256)/([0-9a-f]{64})")
# Before version 25: named by an id of the times before version 1.10.
LEGACY = re.compile(r"([0-9a-f]{64})/(json|layer\.tar)")
# Headers that belong to the member after them.
EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
BODILESS = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
SMALL = 1 << 20


def chain_ids(layers: Sequence[str]) -> list[str]:
    """How an engine names each layer together with all below it."""
    chain: list[str] = []
    for layer in layers:
        both = f"{chain[-1]} {layer}" if chain else ""
        chain.append("sha256:" + hashlib.sha256(both.encode()).hexdigest() if both else layer)
    return chain


def legacy_layer(own_id: str, text: bytes, layers: Sequence[str]) -> str | None:
    """The layer behind a legacy id: the only one for which that id comes out.

    The id is the digest of this text with the chain id put in; for layers below the top one the
    engine adds the `os` only afterwards.
    """
    try:
        document = json.loads(text)
    except ValueError:
        return None
    document.pop("id", None)
    if document.get("parent"):
        document["parent"] = f"sha256:{document['parent']}"
    without_os = {name: value for name, value in document.items() if name != "os"}
    for at, chain_id in enumerate(chain_ids(layers)):
        for candidate in (without_os, document):
            if digest_of({**candidate, "layer_id": chain_id}) == own_id:
                return layers[at]
    return None


def digest_of(document: Mapping[str, Any]) -> str:
    """Of the text that Go makes of it: sorted on the outside, and safe to stand in HTML."""
    text = json.dumps(
        {name: document[name] for name in sorted(document)},
        separators=(",", ":"),
        ensure_ascii=False,
    )
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return hashlib.sha256(text.encode()).hexdigest()


class LayerFilter:
    """Passes an archive on, but for layers that are spare: no receiver lacks them.

    `layers` are the diff ids of the image, `spare` some of them. `blobs` tells which layers lie
    in blobs of other digests: compressed ones; `names` which lie in members of other names, where
    that is known. What cannot be told for sure is passed on.
    """

    def __init__(
        self,
        layers: Sequence[str] = (),
        spare: Collection[str] = (),
        *,
        blobs: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
        legacy: bool = True,
    ) -> None:
        self.layers = tuple(layers)
        self.spare = frozenset(spare)
        self.blobs = dict(blobs or {})
        self.names = dict(names or {})
        self.legacy_too = legacy  # Whether the receivers take a legacy archive without layers.
        self.is_legacy = False
        self.left_out: set[str] = set()
        self.bytes = 0  # Of what was passed on.
        self._header = b""
        self._held = b""  # Extensions of the next member.
        self._left = 0  # Of the current member, with its padding ...
        self._keep = "pass"  # ... and what becomes of it: "pass", "drop" or "hold".
        self._tail = False  # Behind the last member.
        self._extension = b""
        self._name, self._length = "", -1  # As extensions told them.
        self._text: bytes | None = None  # Of a member that says something about later ones.
        self._text_length = 0
        self._name_of_text = ""
        self._by_id: dict[str, str] = {}

    def feed(self, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """What is to be passed on of the next part of the stream."""
        for passed in self._feed(memoryview(data)):
            self.bytes += len(passed)
            yield passed

    @property
    def whole(self) -> bool:
        """Whether the stream may end here: cut off elsewhere, an engine may take it for whole."""
        return not (self._left or self._header or self._held)

    @property
    def sent_anyway(self) -> int:
        """How many layers were passed on although nobody lacks them."""
        return len(self.spare - self.left_out)

    def _feed(self, view: memoryview) -> Iterator[bytes | memoryview]:
        while view:
            if self._tail:
                yield view
                return
            if self._left:
                part, view = view[: self._left], view[self._left :]
                yield from self._body(part)
                continue
            missing = BLOCK - len(self._header)
            self._header += view[:missing]
            view = view[missing:]
            if len(self._header) == BLOCK:
                header, self._header = self._header, b""
                yield from self._begin(header)

    def _body(self, part: memoryview) -> Iterator[memoryview]:
        self._left -= len(part)
        if self._text is not None:
            self._text += part
        if self._keep == "hold":
            self._held += part
        elif self._keep == "pass":
            yield part
        if not self._left and self._text is not None:
            text, self._text = self._text[: self._text_length], None
            self._learn(text)

    def _begin(self, header: bytes) -> Iterator[bytes]:
        """A member begins: its header is passed on, held, or left out with all of it."""
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:  # The end; or no archive, as `docker load` will say.
            self._tail = True
            yield self._held + header
            self._held = b""
            return
        if member.type in EXTENSIONS:
            self._extension = member.type
            self._open(member.size, "hold")
            self._text = b""
            self._held += header
            return
        name = self._name or member.name
        size = self._length if self._length >= 0 else member.size
        self._name, self._length = "", -1
        held, self._held = self._held, b""
        self._extension = b""
        self._open(0 if member.type in BODILESS else size, "pass")
        layer = self._layer_of(name) if member.isreg() else None
        if layer in self.spare and (self.legacy_too or not self.is_legacy):
            assert layer is not None
            self.left_out.add(layer)
            self._keep = "drop"
            return
        legacy = LEGACY.fullmatch(name)
        if legacy and legacy[2] == "json" and 0 < size <= SMALL:
            self._text, self._name_of_text = b"", legacy[1]
        yield held + header

    def _open(self, size: int, keep: str) -> None:
        self._left, self._text_length, self._keep = size + -size % BLOCK, size, keep

    def _layer_of(self, name: str) -> str | None:
        blob = BLOB.fullmatch(name)
        if blob and name not in self.names:
            digest = f"{blob[1]}:{blob[2]}"
            return self.blobs.get(digest, digest)
        legacy = LEGACY.fullmatch(name)
        if legacy and legacy[2] == "layer.tar":
            self.is_legacy = True
            return self.names.get(name) or self._by_id.get(legacy[1])
        return self.names.get(name)

    def _learn(self, text: bytes) -> None:
        """A member is over that says something about those that follow."""
        if not self._extension:
            layer = legacy_layer(self._name_of_text, text, self.layers)
            if layer:
                self._by_id[self._name_of_text] = layer
        elif self._extension == tarfile.GNUTYPE_LONGNAME:
            self._name = text.rstrip(b"\0").decode(errors="replace")
        elif self._extension != tarfile.GNUTYPE_LONGLINK:
            records = pax_records(text)
            self._name = records.get("path", self._name)
            self._length = int(records.get("size", self._length))


def pax_records(text: bytes) -> dict[str, str]:
    """The records of an extended header: `length key=value`, each with a line break."""
    records, at = {}, 0
    while at < len(text):
        length = text[at:].partition(b" ")[0]
        if not length.isdigit() or int(length) < 1:
            break
        name, _, value = text[at : at + int(length) - 1].partition(b" ")[2].partition(b"=")
        records[name.decode(errors="replace")] = value.decode(errors="replace")
        at += int(length)
    return records

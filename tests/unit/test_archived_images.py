"""Archives on the control machine: what is in them, and what is said of those that do not do."""

import gzip
import json
from pathlib import Path

import pytest

from blocks import Cluster
from tasks.archived_images import archived_image, archived_layers
from tasks.control_images import control_image, source_command
from tasks.errors import SparkrailError
from tasks.images import image_content
from tests.lab.docker_archive import Image, Layer, file_members, write_archive, write_layer
from tests.unit.specs import spec


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    layer = tmp_path / "layer.tar"
    digest = write_layer(file_members({"note": b"one"}), layer)
    file = tmp_path / "image.tar"
    write_archive(Image("engine:1", (Layer(layer, digest),), "arm64", {"A": "1"}, ["/entry"]), file)
    return file


def with_archive(file: Path) -> Cluster:
    return spec(image={"source": "control", "archive": str(file)})


def test_it_reads_as_docker_would_tell_it(archive: Path) -> None:
    image = with_archive(archive).image
    found = image_content(control_image(image, "engine:1"))
    assert (found.architecture, found.os, found.entrypoint) == ("arm64", "linux", ("/entry",))
    assert found.size == archive.stat().st_size
    assert len(found.layers) == 1
    as_docker_tells_it = {
        "Id": "sha256:0",
        "Architecture": "arm64",
        "Os": "linux",
        "Config": {"Env": ["A=1"], "Entrypoint": ["/entry"], "WorkingDir": "/", "Cmd": None},
        "RootFS": {"Type": "layers", "Layers": list(found.layers)},
    }
    assert image_content(as_docker_tells_it).digest == found.digest
    assert source_command(image, "engine:1") == ["cat", str(archive)]


def test_it_tells_which_layer_is_where(archive: Path) -> None:
    [layer] = archived_image(str(archive), "engine:1")["RootFS"]["Layers"]
    [(member, found)] = archived_layers(str(archive), "engine:1").items()
    assert (member, found) == (f"{layer.removeprefix('sha256:')}/layer.tar", layer)


def test_without_an_archive_docker_is_asked() -> None:
    image = spec(image={"source": "control"}).image
    assert source_command(image, "engine:1") == ["docker", "save", "--", "engine:1"]


def test_it_holds_another_image(archive: Path) -> None:
    with pytest.raises(SparkrailError) as error:
        archived_image(str(archive), "engine:2")
    assert str(error.value) == (
        f"the image archive {archive} holds no image engine:2\n"
        "It holds: engine:1\n"
        f"Make it anew: docker save -o {archive} engine:2"
    )


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(SparkrailError, match=r"cannot read the image archive .*: No such file"):
        archived_image(str(tmp_path / "none.tar"), "engine:1")


@pytest.mark.parametrize("kind", ["compressed", "no archive", "another archive"])
def test_it_is_something_else(tmp_path: Path, archive: Path, kind: str) -> None:
    file = tmp_path / "other.tar"
    if kind == "compressed":
        file.write_bytes(gzip.compress(archive.read_bytes()))
    elif kind == "no archive":
        file.write_text(json.dumps({"manifest.json": []}))
    else:
        write_layer(file_members({"note": b"one"}), file)
    with pytest.raises(SparkrailError, match=r"(?s)is no archive of `docker save`.*gunzip"):
        archived_image(str(file), "engine:1")

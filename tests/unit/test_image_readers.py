"""The container that reads an image: what it may see and do, and no more."""

from tasks.image_layers import Source
from tasks.image_readers import START, mounts, reader
from tasks.relayed.image_archive import chain_ids
from tests.unit.specs import spec

LAYERS = ("sha256:a", "sha256:b", "sha256:a")
CHAIN = [name.replace(":", "/") for name in chain_ids(LAYERS)]
ROOT = "/var/lib/docker"
FOLDERS = tuple(f"{ROOT}/overlay2/{name}/diff" for name in ("one", "two", "three"))
SOURCE = Source(driver="overlay2", root=ROOT, containerd=False, folders=FOLDERS)
STORE = {"root": ROOT, "id": "sha256:1", "name": "app:1"}
CONFIG = "image/overlay2/imagedb/content/sha256/1"


def test_it_sees_the_layers_that_it_reads_and_nothing_else() -> None:
    layer = f"image/overlay2/layerdb/{CHAIN[1]}"
    assert mounts(SOURCE, "sha256:1", LAYERS, {"sha256:b"}) == {
        f"{ROOT}/{CONFIG}": f"/sparkrail/{CONFIG}",
        f"{ROOT}/{layer}": f"/sparkrail/{layer}",
        f"{ROOT}/overlay2/two/diff": "/sparkrail/overlay2/two/diff",
    }


def test_a_layer_that_is_there_twice_is_seen_twice() -> None:
    assert len(mounts(SOURCE, "sha256:1", LAYERS, {"sha256:a"})) == 5


def test_the_folder_of_the_engine_may_lie_behind_a_link() -> None:
    folders = tuple(name.replace(ROOT, "/data") for name in FOLDERS)
    seen = mounts(SOURCE.model_copy(update={"folders": folders}), "sha256:1", LAYERS, {"sha256:b"})
    assert seen["/data/overlay2/two/diff"] == "/sparkrail/overlay2/two/diff"


def test_command() -> None:
    found = reader(spec(), SOURCE, STORE, LAYERS, LAYERS)
    assert found is not None
    *words, length = found["command"]
    assert int(length) == len(found["program"].encode())
    [name] = [word for word in words if word.startswith("--name=")]
    assert name.startswith("--name=sparkrail-sparks-image-")
    words.remove(name)
    assert words == [
        *("docker", "run", "--rm", "--interactive", "--pull=never"),
        *("--network=none", "--log-driver=none", "--read-only", "--no-healthcheck"),
        *("--cap-drop=ALL", "--cap-add=DAC_OVERRIDE", "--user=0", "--workdir=/"),
        "--env=NVIDIA_VISIBLE_DEVICES=void",
        "--label=sparkrail.cluster=sparks",
        "--label=sparkrail.role=image",
        f"--mount=type=bind,source={ROOT}/{CONFIG},target=/sparkrail/{CONFIG},readonly",
        "--entrypoint=python3",
        *("sha256:1", "-I", "-S", "-c", START),
    ]


def test_no_container_where_the_engine_does_not_tell_where_layers_lie() -> None:
    source = SOURCE.model_copy(update={"folders": ()})
    assert reader(spec(), source, STORE, LAYERS, ()) is None

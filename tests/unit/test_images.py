"""Images: equal by content, and why one did not get where it should."""

from typing import Any

import pytest

from blocks import Cluster
from tasks.errors import CommandFailed, NodeUnreachable
from tasks.image_streams import (
    FolderUnreadable,
    Moved,
    load_problem,
    refuses_part,
    save_command,
    save_problem,
)
from tasks.images import Send, image_content, plan, tagged, told

LAYERS = ["sha256:" + "1" * 64, "sha256:" + "2" * 64]
# As engine 20.10 with overlay2 tells it ...
CLASSIC: dict[str, Any] = {
    "Id": "sha256:" + "c" * 64,
    "RepoDigests": [],
    "Architecture": "arm64",
    "Os": "linux",
    "Size": 30_000_000,
    "Config": {
        "Hostname": "",
        "Image": "sha256:" + "a" * 64,
        "AttachStdin": False,
        "Env": ["PATH=/bin", "A=1"],
        "Entrypoint": ["/entry"],
        "Cmd": None,
        "Labels": None,
        "WorkingDir": "/",
    },
    "RootFS": {"Type": "layers", "Layers": LAYERS},
}
# ... and a newer one with the containerd store.
CONTAINERD: dict[str, Any] = {
    "Id": "sha256:" + "d" * 64,
    "RepoDigests": ["vllm@sha256:" + "d" * 64],
    "Architecture": "arm64",
    "Os": "linux",
    "Size": 60_000_000,
    "Config": {"Env": ["PATH=/bin", "A=1"], "Entrypoint": ["/entry"], "WorkingDir": "/"},
    "RootFS": {"Type": "layers", "Layers": LAYERS},
}


def changed(**config: Any) -> dict[str, Any]:
    return {**CLASSIC, "Config": {**CLASSIC["Config"], **config}}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.model_validate(
        {
            "name": "pair",
            "head": {"name": "spark1", "address": "10.0.0.1", "fabric_address": "10.77.0.1"},
            "workers": [{"name": "spark2", "fabric_address": "10.77.0.2", "port": 2222}],
            "image": {"name": "vllm:1"},
            "model": {"name": "tiny", "path": "/models/tiny"},
            "serve": {"tensor_parallel": 2},
        }
    )


@pytest.mark.parametrize(
    ("attrs", "equal"),
    [
        pytest.param(CONTAINERD, True, id="other store, other id"),
        pytest.param(changed(Labels={}, Cmd=[]), True, id="empty instead of absent"),
        pytest.param(changed(Image="", Hostname="build"), True, id="what does not matter"),
        pytest.param(changed(Env=["A=1", "PATH=/bin"]), False, id="environment in another order"),
        pytest.param(changed(Entrypoint=["/other"]), False, id="another entrypoint"),
        pytest.param({**CLASSIC, "Architecture": "amd64"}, False, id="another architecture"),
        pytest.param(
            {**CLASSIC, "RootFS": {"Layers": LAYERS[::-1]}}, False, id="layers in another order"
        ),
        pytest.param({**CLASSIC, "RootFS": {"Type": "layers"}}, False, id="no layers"),
    ],
)
def test_content_decides(attrs: dict[str, Any], equal: bool) -> None:
    assert (image_content(attrs).digest == image_content(CLASSIC).digest) is equal


def test_what_later_steps_get() -> None:
    content = image_content(CLASSIC)
    assert content.facts() == {
        "content": content.digest,
        "id": "sha256:" + "c" * 64,
        "architecture": "arm64",
        "entrypoint": ["/entry"],
    }


@pytest.mark.parametrize(
    ("have", "steps"),
    [
        pytest.param(None, ["send vllm:1 from spark1, about 30.0 MB"], id="absent"),
        pytest.param(CONTAINERD, [], id="as wanted"),
        pytest.param(
            changed(Env=[]), ["send vllm:1 from spark1, about 30.0 MB"], id="tag moved to another"
        ),
    ],
)
def test_plan(have: dict[str, Any] | None, steps: list[str]) -> None:
    content = image_content(have) if have else None
    found = plan("vllm:1", "spark1", image_content(CLASSIC), content)
    assert [str(step) for step in found] == steps
    assert all(isinstance(step, Send) for step in found)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("vllm", "vllm:latest"),
        ("vllm/vllm-openai:v1", "vllm/vllm-openai:v1"),
        ("host:5000/vllm", "host:5000/vllm:latest"),
        ("host:5000/vllm:1", "host:5000/vllm:1"),
    ],
)
def test_a_name_always_has_a_tag(name: str, full: str) -> None:
    assert tagged(name) == full


def test_commands() -> None:
    assert save_command("vllm:1") == ["docker", "save", "--", "vllm:1"]
    assert " ".join(save_command("vllm:1", "linux/arm64")) == (
        "docker save --platform=linux/arm64 -- vllm:1"
    )


@pytest.mark.parametrize(
    ("moved", "removed", "text"),
    [
        pytest.param(
            Moved(bytes=30_000_000, seconds=2), [], "sent vllm:1, 30.0 MB at 15.0 MB/s", id="whole"
        ),
        pytest.param(
            Moved(bytes=3000, left_out=1), [], "sent vllm:1, 3.0 kB, 1 of 2 layers", id="a part"
        ),
        pytest.param(
            Moved(bytes=3000, note="all of it, since it had to be"),
            ["abc"],
            "sent vllm:1, 3.0 kB; all of it, since it had to be; removed abc",
            id="whole, with a reason",
        ),
    ],
)
def test_what_an_outcome_says(moved: Moved, removed: list[str], text: str) -> None:
    assert told("vllm:1", image_content(CLASSIC), moved, removed) == text


@pytest.mark.parametrize(
    ("moved", "kind", "text"),
    [
        pytest.param(
            Moved(load_code=1, load_said="write: No space left on device"),
            CommandFailed,
            "spark2: docker load of the image from spark1 ended with exit code 1\n"
            "write: No space left on device\n"
            "Make room on spark2: docker system df",
            id="disk full",
        ),
        pytest.param(
            Moved(load_code=1, refused=True, load_said="boom"),
            CommandFailed,
            "spark2: docker load of the image from spark1 ended with exit code 1\nboom\n"
            "Does docker answer on spark2? Nothing was replaced; run again.",
            id="it failed",
        ),
        pytest.param(
            Moved(load_said='{"errorDetail":{"message":"boom"},"error":"boom"}'),
            CommandFailed,
            "spark2: docker load of the image from spark1 ended with exit code 0\n"
            '{"errorDetail":{"message":"boom"},"error":"boom"}\n'
            "Does docker answer on spark2? Nothing was replaced; run again.",
            id="an error in the stream of one that ended well",
        ),
        pytest.param(
            Moved(load_code=127, load_said="docker: No such file or directory"),
            CommandFailed,
            "spark2: docker load of the image from spark1 ended with exit code 127\n"
            "docker: No such file or directory\n"
            "Install docker on spark2, on the PATH of non-interactive logins.",
            id="no docker",
        ),
        pytest.param(
            Moved(load_code=-9, load_stalled=True),
            NodeUnreachable,
            "spark2: docker load of the image from spark1: it took no byte for 120 s\n"
            "Does docker on spark2 answer, and its disk? Then run again.",
            id="stalled",
        ),
    ],
)
def test_why_a_load_failed(
    cluster: Cluster, moved: Moved, kind: type[Exception], text: str
) -> None:
    found = load_problem("spark1", cluster.workers[0], moved)
    assert isinstance(found, kind)
    assert str(found) == text


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        pytest.param(
            Moved(source_code=1, read=9, source_said="boom", broken="docker save failed"),
            "spark1: docker save ended with exit code 1 after 9 bytes\nboom\n"
            "Does `docker save` of this image work on spark1, and is there room in its "
            "/var/lib/docker?",
            id="it failed",
        ),
        pytest.param(
            Moved(),
            "spark1: docker save ended with exit code 0 after 0 bytes\n"
            "Does `docker save` of this image work on spark1, and is there room in its "
            "/var/lib/docker?",
            id="nothing came",
        ),
        pytest.param(
            Moved(source_code=127, source_said="docker: No such file"),
            "spark1: docker is missing, the image cannot be saved\n"
            "Install it on spark1, on the PATH of non-interactive logins.",
            id="no docker",
        ),
        pytest.param(
            Moved(source_code=-9, read=9, source_stalled=True),
            "spark1: docker save wrote no byte for 120 s\n"
            "Does docker on spark1 answer, and its disk? Then run again.",
            id="stalled",
        ),
        pytest.param(
            Moved(read=9, broken="docker save ended in the midst of a file"),
            "spark1: docker save ended in the midst of a file\nRun again.",
            id="cut off",
        ),
    ],
)
def test_why_a_save_failed(moved: Moved, text: str) -> None:
    found = save_problem("spark1", moved)
    assert isinstance(found, CommandFailed)
    assert str(found) == text


def test_a_folder_that_cannot_be_read_is_told_apart() -> None:
    moved = Moved(read=9, from_store=True, broken="reading the image from docker's folder: EIO")
    assert isinstance(save_problem("spark1", moved), FolderUnreadable)


def test_a_whole_stream_is_no_problem(cluster: Cluster) -> None:
    moved = Moved(read=10, bytes=10)
    assert save_problem("spark1", moved) is None
    assert load_problem("spark1", cluster.workers[0], moved) is None


@pytest.mark.parametrize(
    ("moved", "refused"),
    [
        pytest.param(
            Moved(left_out=1, load_code=1, load_said="layer.tar: no such file"), True, id="refused"
        ),
        pytest.param(Moved(load_code=1, load_said="boom"), False, id="it had all layers"),
        pytest.param(Moved(left_out=1), False, id="it loaded"),
        pytest.param(
            Moved(left_out=1, load_code=1, load_said="write: no space left on device"),
            False,
            id="disk full",
        ),
        pytest.param(
            Moved(left_out=1, load_code=1, load_said="Cannot connect to the Docker daemon"),
            False,
            id="no engine",
        ),
    ],
)
def test_all_of_it_helps_only_where_a_part_was_refused(moved: Moved, refused: bool) -> None:
    assert refuses_part(moved) is refused

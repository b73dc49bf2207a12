"""Images: equal by content, and a stream whose failing side is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks.errors import CommandFailed, LoginRefused, NodeUnreachable
from tasks.image_streams import Moved, load_command, problem, save_command
from tasks.images import Send, image_content, plan, tagged

STREAM = Path(__file__).parents[2] / "tasks" / "relayed" / "stream.py"
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


def test_commands(cluster: Cluster) -> None:
    assert save_command("vllm:1") == ["docker", "save", "--", "vllm:1"]
    assert " ".join(save_command("vllm:1", "linux/arm64")) == (
        "docker save --platform=linux/arm64 -- vllm:1"
    )
    assert " ".join(load_command(cluster.workers[0])) == (
        "ssh -p 2222 -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10 "
        "-o ServerAliveInterval=15 -o ServerAliveCountMax=4 root@10.77.0.2 docker load"
    )


@pytest.mark.parametrize(
    ("moved", "kind", "text"),
    [
        pytest.param(
            Moved(source_code=0, sink_code=1, bytes=9, sink_said="write: No space left on device"),
            CommandFailed,
            "spark2: docker load of the image from spark1 ended with exit code 1\n"
            "write: No space left on device\n"
            "Make room on spark2: docker system df",
            id="disk full on the worker",
        ),
        pytest.param(
            Moved(source_code=-13, sink_code=1, bytes=9, refused=True, sink_said="boom"),
            CommandFailed,
            "spark2: docker load of the image from spark1 ended with exit code 1\nboom\n"
            "Does docker answer on spark2? Nothing was replaced; run again.",
            id="load failed first, save followed",
        ),
        pytest.param(
            Moved(source_code=1, sink_code=1, bytes=9, source_said="boom", sink_said="EOF"),
            CommandFailed,
            "spark1: docker save for spark2 ended with exit code 1 after 9 bytes\nboom\n"
            "Does `docker save` of this image work on spark1, and is there room in its "
            "/var/lib/docker?",
            id="save failed first, load followed",
        ),
        pytest.param(
            Moved(source_code=0, sink_code=0, bytes=0),
            CommandFailed,
            "spark1: docker save for spark2 ended with exit code 0 after 0 bytes\n"
            "Does `docker save` of this image work on spark1, and is there room in its "
            "/var/lib/docker?",
            id="nothing came",
        ),
        pytest.param(
            Moved(source_code=127, sink_code=1, bytes=0, source_said="docker: No such file"),
            CommandFailed,
            "spark1: docker is missing, the image for spark2 cannot be saved\n"
            "Install it on spark1, on the PATH of non-interactive logins.",
            id="no docker on the head",
        ),
        pytest.param(
            Moved(source_code=0, sink_code=127, bytes=0, sink_said="sh: docker: not found"),
            CommandFailed,
            "spark2: docker load of the image from spark1 ended with exit code 127\n"
            "sh: docker: not found\n"
            "Install docker on spark2, on the PATH of non-interactive logins.",
            id="no docker on the worker",
        ),
        pytest.param(
            Moved(source_code=-9, sink_code=-9, bytes=9, stalled=True),
            NodeUnreachable,
            "spark2: the image from spark1: no byte moved for 120 s\n"
            "Is the link up, and does docker answer at both ends? Then run again.",
            id="stalled",
        ),
        pytest.param(
            Moved(
                source_code=-13,
                sink_code=255,
                bytes=0,
                refused=True,
                sink_said="root@10.77.0.2: Permission denied (publickey).",
            ),
            LoginRefused,
            "spark2: spark1 -> root@10.77.0.2:2222: spark2 accepts none of spark1's keys\n"
            "root@10.77.0.2: Permission denied (publickey).\n"
            "Let it in, on spark1, as root:\n"
            "ssh-copy-id -p 2222 root@10.77.0.2\n"
            "It needs a key without a passphrase there (ssh-keygen makes one).",
            id="ssh refused",
        ),
    ],
)
def test_the_failing_side_is_named(
    cluster: Cluster, moved: Moved, kind: type[Exception], text: str
) -> None:
    found = problem("spark1", cluster.workers[0], moved, cluster)
    assert isinstance(found, kind)
    assert str(found) == text


def test_a_whole_stream_is_no_problem(cluster: Cluster) -> None:
    moved = Moved(source_code=0, sink_code=0, bytes=10)
    assert problem("spark1", cluster.workers[0], moved, cluster) is None


# --- the relayed program ------------------------------------------------------------------------


def stream(source: str, sink: str, stall: float = 60) -> Moved:
    sides = (json.dumps(["sh", "-c", command]) for command in (source, sink))
    done = subprocess.run(
        [sys.executable, "-", "stream", *sides, str(stall)],
        input=STREAM.read_bytes(),
        capture_output=True,
        timeout=30,
        check=True,
    )
    return Moved.model_validate_json(done.stdout.splitlines()[-1])


def test_stream_moves_every_byte(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    moved = stream("head -c 3000001 /dev/zero; echo done >&2", f"cat >{target}; echo well >&2")
    assert target.stat().st_size == moved.bytes == 3_000_001
    assert (moved.source_code, moved.sink_code) == (0, 0)
    assert (moved.source_said, moved.sink_said) == ("done", "well")


@pytest.mark.parametrize(
    ("source", "sink", "codes", "refused"),
    [
        pytest.param("head -c 9 /dev/zero; exit 3", "cat >/dev/null", (3, 0), False, id="source"),
        pytest.param("exec cat /dev/zero", "exit 4", (-13, 4), True, id="sink"),
        pytest.param("exec nonesuch", "cat >/dev/null", (127, 0), False, id="no source"),
    ],
)
def test_stream_tells_both_ends(
    source: str, sink: str, codes: tuple[int, int], refused: bool
) -> None:
    moved = stream(source, sink)
    assert (moved.source_code, moved.sink_code) == codes
    assert moved.refused is refused


def test_stream_ends_both_sides_when_nothing_moves() -> None:
    moved = stream("exec cat /dev/zero", "exec sleep 60", stall=0.5)
    assert moved.stalled
    assert (moved.source_code, moved.sink_code) == (-9, -9)


def test_a_silent_start_is_no_stall() -> None:
    assert not stream("sleep 1.2; echo x", "cat >/dev/null", stall=0.5).stalled

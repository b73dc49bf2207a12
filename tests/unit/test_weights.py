"""Weights: what makes a model folder whole, what a copy of it lacks, and what went wrong."""

import base64
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocks import Cluster
from tasks.errors import CommandFailed, HostKeyRefused, NodeUnreachable, SparkrailError
from tasks.manifests import File, Manifest, extra_weights, plan, problems
from tasks.programs import program
from tasks.relayed.pieces import PIECE
from tasks.remote import Result
from tasks.transfers import amount, pace, rate, ssh_failed
from tasks.weight_rsync import rsync_command, rsync_failed, shared_out
from tasks.weight_streams import Arrived, failed
from tasks.weights import complete, remarks

INDEX = "model.safetensors.index.json"


def manifest(**sizes: int) -> Manifest:
    """Files by a short word each: `a=1` is a.safetensors with one byte."""
    return Manifest(
        files={f"{n}.safetensors": File(size=s, sha256=f"{n}{s}") for n, s in sizes.items()}
    )


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.model_validate(
        {
            "name": "pair",
            "head": {"name": "spark1", "address": "10.0.0.1", "fabric_address": "10.77.0.1"},
            "workers": [{"name": "spark2", "fabric_address": "10.77.0.2"}],
            "image": {"name": "vllm:1"},
            "model": {"name": "tiny", "path": "/models/My Model's $(id)"},
            "serve": {"tensor_parallel": 2},
        }
    )


FILE = File(size=1, sha256="x")
CONFIGURED = {"config.json": FILE, "model.safetensors": FILE}
WHOLE = {**CONFIGURED, "tokenizer.json": FILE}
SHARDED = {
    **WHOLE,
    "m-1.safetensors": FILE,
    INDEX: File(size=1, sha256="i", names=("m-1.safetensors", "m-2.safetensors")),
}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param(Manifest(files=WHOLE), [], id="whole"),
        pytest.param(
            Manifest(folder="does not exist"), ["the folder does not exist"], id="no folder"
        ),
        pytest.param(
            Manifest(),
            [
                "config.json is missing",
                "there are no weights (*.safetensors)",
                "there is no tokenizer (tokenizer.json, tokenizer.model, ...)",
            ],
            id="empty folder",
        ),
        pytest.param(
            Manifest(files=SHARDED),
            [f"m-2.safetensors is missing ({INDEX} names it)"],
            id="a shard is missing",
        ),
        pytest.param(
            Manifest(files=SHARDED, faults={"m-2.safetensors": "is a broken link"}),
            ["m-2.safetensors is a broken link"],
            id="a shard is a broken link, told once",
        ),
        pytest.param(
            Manifest(files=WHOLE, faults={"model.safetensors": "is cut off within its header"}),
            ["model.safetensors is cut off within its header"],
            id="a damaged file",
        ),
        pytest.param(
            Manifest(files={**CONFIGURED, "tokenizer_config.json": FILE}),
            ["there is no tokenizer (tokenizer.json, tokenizer.model, ...)"],
            id="the configuration of a tokenizer is none",
        ),
        *(
            pytest.param(Manifest(files={**CONFIGURED, name: FILE}), [], id=name)
            for name in ("tokenizer.model.v3", "tekken.json", "vocab.txt", "spiece.model")
        ),
        pytest.param(
            Manifest(files={**WHOLE, "m.gguf": FILE, "qwen.tiktoken": FILE}), [], id="other formats"
        ),
        pytest.param(
            Manifest(files=WHOLE, faults={".cache/x.incomplete": "is left"}),
            [],
            id="whole, and the hub's folder holds remains",
        ),
        pytest.param(
            Manifest(
                files={**WHOLE, INDEX: File(size=1, sha256="i", names=("m-2.safetensors",))},
                faults={".cache/x.incomplete": "is left"},
            ),
            [".cache/x.incomplete is left", f"m-2.safetensors is missing ({INDEX} names it)"],
            id="a shard is missing, and the hub's folder tells of it",
        ),
    ],
)
def test_problems(found: Manifest, said: list[str]) -> None:
    assert problems(found) == said


def test_the_tokenizer_may_lie_elsewhere(cluster: Cluster) -> None:
    files = dict.fromkeys(("config.json", "model.safetensors"), FILE)
    serve = cluster.serve.model_copy(update={"arguments": ("--tokenizer=/models/other",)})
    complete(cluster.model_copy(update={"serve": serve}), Manifest(files=files))
    with pytest.raises(SparkrailError, match="there is no tokenizer"):
        complete(cluster, Manifest(files=files))


def test_an_incomplete_model_is_refused_by_name(cluster: Cluster) -> None:
    with pytest.raises(SparkrailError) as error:
        complete(cluster, Manifest(files=SHARDED))
    assert str(error.value) == (
        "spark1: the model in /models/My Model's $(id) is not complete\n"
        f"m-2.safetensors is missing ({INDEX} names it)\n"
        "Finish or repeat the download there, then run again. Nothing was sent."
    )


@pytest.mark.parametrize(
    ("have", "steps"),
    [
        pytest.param(manifest(a=1, b=2), [], id="as wanted"),
        pytest.param(manifest(a=1, b=2, z=3), [], id="more than wanted"),
        pytest.param(
            Manifest(folder="does not exist"),
            ["send 2 of 2 files, 3 B: a.safetensors, b.safetensors"],
            id="absent",
        ),
        pytest.param(manifest(a=1), ["send 1 of 2 files, 2 B: b.safetensors"], id="one is missing"),
        pytest.param(
            manifest(a=9, b=2), ["send 1 of 2 files, 1 B: a.safetensors"], id="one has another size"
        ),
        pytest.param(
            Manifest(
                files={
                    **manifest(b=2).files,
                    "a.safetensors": File(size=1, sha256="damaged"),
                }
            ),
            ["send 1 of 2 files, 1 B: a.safetensors"],
            id="one has other content of the same size",
        ),
    ],
)
def test_plan(have: Manifest, steps: list[str]) -> None:
    assert [str(step) for step in plan(manifest(a=1, b=2), have)] == steps


@pytest.mark.parametrize(
    ("removing", "steps"),
    [
        pytest.param(False, ["send"], id="by default they stay"),
        pytest.param(
            True, ["send", "remove 1 files that only it has: z.safetensors"], id="when asked for"
        ),
    ],
)
def test_plan_with_files_that_only_the_worker_has(removing: bool, steps: list[str]) -> None:
    found = plan(manifest(a=1, b=2), manifest(a=1, z=3), removing=removing)
    assert [
        str(step).replace("send 1 of 2 files, 2 B: b.safetensors", "send") for step in found
    ] == steps


def test_files_are_shared_out_by_size() -> None:
    want = manifest(a=5, b=3, c=3, d=1, e=0)
    paths = sorted(want.files)
    assert shared_out(want, paths, 2) == [
        ["a.safetensors", "d.safetensors", "e.safetensors"],
        ["b.safetensors", "c.safetensors"],
    ]
    assert shared_out(want, paths[:1], 4) == [["a.safetensors"]]


@pytest.mark.parametrize(
    ("kind", "said", "error", "text"),
    [
        pytest.param(
            "disk",
            "9 bytes are needed, 1 are free",
            CommandFailed,
            "spark2: the model's files did not arrive from spark1: the disk is full\n"
            "9 bytes are needed, 1 are free\n"
            "Make room on spark2: df -h '/models/My Model'\"'\"'s $(id)'",
            id="disk full",
        ),
        pytest.param(
            "changed",
            "a.bin",
            SparkrailError,
            "spark1: the model changed while it was sent to spark2: a.bin\n"
            "Wait until nothing writes there any more, then run again.",
            id="source changed",
        ),
        pytest.param(
            "sources",
            "spark1: Connection refused",
            NodeUnreachable,
            "spark2: the model's files did not arrive from spark1: nobody serves them\n"
            "spark1: Connection refused\n"
            "Is the link between spark1 and spark2 up, and does no firewall keep their TCP ports "
            "from each other? Run again: it goes on where it stopped.\n"
            "Where only SSH may pass: weights.transport: rsync",
            id="nobody serves",
        ),
        pytest.param(
            "damaged",
            "a.bin",
            CommandFailed,
            "spark2: the model's files did not arrive from spark1: a.bin arrives damaged, again "
            "and again\nNothing of it was kept. Something between spark1 and spark2 changes bytes: "
            "a cable, a network card, or memory. Run again: it goes on where it stopped.",
            id="damaged on the wire",
        ),
        pytest.param(
            "listen",
            "Cannot assign requested address",
            CommandFailed,
            "spark2: cannot listen on its fabric address 10.77.0.2: Cannot assign requested "
            "address\n"
            "Is the address up? On spark2: ip address",
            id="no fabric address",
        ),
    ],
)
def test_what_a_stream_could_not_do(
    cluster: Cluster, kind: str, said: str, error: type[Exception], text: str
) -> None:
    found = failed(cluster, cluster.workers[0], kind, said)
    assert type(found) is error
    assert str(found) == text


def test_remarks_tell_what_was_not_as_it_should_be() -> None:
    assert remarks(Arrived(bytes=9, fetched=9)) == []
    odd = Arrived(bytes=9_000_000, fetched=5_000_000, damaged=2, without=("spark3: gone",))
    assert remarks(odd) == [
        "4.0 MB were there from an interrupted transfer",
        "2 pieces arrived damaged, fetched again",
        "went on without spark3: gone",
    ]


def test_extra_weights_are_those_that_would_be_loaded() -> None:
    files = dict.fromkeys(("a.safetensors", "x.safetensors", "sub/y.safetensors", "z.md"), FILE)
    assert extra_weights(manifest(a=1), Manifest(files=files)) == ("x.safetensors",)


def test_the_digest_follows_names_and_content_only() -> None:
    one, other = File(size=1, sha256="1"), File(size=1, sha256="2")
    base = Manifest(files={"a": one, "b": other})
    assert base.digest == Manifest(files={"b": other, "a": one}, faults={"c": "x"}).digest
    assert base.digest != Manifest(files={"a": other, "b": one}).digest
    assert base.digest != Manifest(files={"a": one}).digest


def test_rsync_command(cluster: Cluster) -> None:
    assert rsync_command(cluster, cluster.workers[0]) == (
        "rsync",
        "--copy-links",
        "--times",
        "--ignore-times",
        "--files-from=-",
        "--from0",
        "--partial-dir=.rsync-part",
        "--timeout=60",
        "--info=progress2",
        "--protect-args",
        "--rsh=ssh -p 22 -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10 "
        "-o ServerAliveInterval=15 -o ServerAliveCountMax=4 "
        "-o 'Ciphers=^aes128-gcm@openssh.com,aes256-gcm@openssh.com'",
        "/models/My Model's $(id)/",
        "root@10.77.0.2:/models/My Model's $(id)/",
    )


BRIEF = "spark2: the model's files did not arrive from spark1: "
PATH = "'/models/My Model'\"'\"'s $(id)'"


@pytest.mark.parametrize(
    ("code", "said", "kind", "text"),
    [
        pytest.param(
            11,
            'rsync: [receiver] write failed on "x": No space left on device (28)',
            CommandFailed,
            f"{BRIEF}the disk is full (rsync exit code 11)\n"
            'rsync: [receiver] write failed on "x": No space left on device (28)\n'
            f"Make room on spark2: df -h {PATH}",
            id="disk full",
        ),
        pytest.param(
            11,
            "",
            CommandFailed,
            f"{BRIEF}cannot be written (rsync exit code 11)\n"
            f"Is its disk full? On spark2: df -h {PATH}",
            id="disk full, and rsync lost the receiver's words",
        ),
        pytest.param(
            127,
            "env: 'rsync': No such file or directory",
            CommandFailed,
            "spark1: rsync is missing, the model's files cannot be sent to spark2\n"
            "env: 'rsync': No such file or directory\nInstall it: apt-get install rsync",
            id="no rsync on the head",
        ),
        pytest.param(
            127,
            "sh: rsync: not found\nrsync error: remote command not found (code 127)",
            CommandFailed,
            f"{BRIEF}rsync is missing (rsync exit code 127)\n"
            "sh: rsync: not found\nrsync error: remote command not found (code 127)\n"
            "Install it on spark2: apt-get install rsync",
            id="no rsync on the worker",
        ),
        pytest.param(
            2,
            "protocol version mismatch -- is your shell clean?",
            CommandFailed,
            f"{BRIEF}its login prints text (rsync exit code 2)\n"
            "protocol version mismatch -- is your shell clean?\n"
            "Silence what root's shell prints at login on spark2.",
            id="login prints",
        ),
        pytest.param(
            23,
            'rsync: [receiver] mkstemp "x" failed: Permission denied (13)',
            CommandFailed,
            f"{BRIEF}may not read or write (rsync exit code 23)\n"
            'rsync: [receiver] mkstemp "x" failed: Permission denied (13)\n'
            f"On spark2: sudo mkdir -p {PATH} && sudo chown -R root {PATH}\n"
            "(files that root cannot read on the head are the other possible cause)",
            id="not allowed",
        ),
        pytest.param(
            24,
            "file has vanished",
            CommandFailed,
            f"{BRIEF}files changed on the way (rsync exit code 24)\nfile has vanished\n"
            "Does something write to /models/My Model's $(id) on spark1? Run again.",
            id="source changed",
        ),
        pytest.param(
            30,
            "io timeout",
            NodeUnreachable,
            f"{BRIEF}nothing moved for 60 s (rsync exit code 30)\nio timeout\n"
            "Is the link between spark1 and spark2 up? Run again.",
            id="link down",
        ),
        pytest.param(
            12,
            "connection unexpectedly closed",
            CommandFailed,
            f"{BRIEF}the transfer broke (rsync exit code 12)\nconnection unexpectedly closed\n"
            "Run again: it goes on where it stopped.",
            id="receiver killed",
        ),
        pytest.param(
            255,
            "Host key verification failed.",
            HostKeyRefused,
            "spark2: spark1 -> root@10.77.0.2:22: spark1 does not know its host key\n"
            "Host key verification failed.\n"
            "Trust it, on spark1, as root:\n"
            "ssh-keyscan -p 22 10.77.0.2 >> ~/.ssh/known_hosts\n"
            "and compare it with /etc/ssh/ssh_host_*_key.pub on spark2.",
            id="unknown host key",
        ),
        pytest.param(
            12,
            "ssh: connect to host 10.77.0.2 port 22: No route to host\n"
            "rsync: connection unexpectedly closed (0 bytes received so far) [sender]",
            NodeUnreachable,
            "spark2: spark1 -> root@10.77.0.2:22: no connection over the fabric, or it broke\n"
            "ssh: connect to host 10.77.0.2 port 22: No route to host\n"
            "rsync: connection unexpectedly closed (0 bytes received so far) [sender]\n"
            "Is the link up at both ends? Try, on spark1, as root:\n"
            "ssh -p 22 -o BatchMode=yes root@10.77.0.2 true",
            id="no route, and rsync was faster than its ssh",
        ),
    ],
)
def test_rsync_failed(
    cluster: Cluster, code: int, said: str, kind: type[Exception], text: str
) -> None:
    found = rsync_failed(cluster, cluster.workers[0], Result("", said, code))
    assert type(found) is kind
    assert str(found) == text


@pytest.mark.parametrize(
    ("said", "kind", "part"),
    [
        pytest.param(
            "@@@@@\nREMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.",
            HostKeyRefused,
            "If spark2 was installed anew, on spark1, as root:\nssh-keygen -R '10.77.0.2'",
            id="changed host key",
        ),
        pytest.param(
            "ssh: connect to host 10.77.0.2 port 22: No route to host",
            NodeUnreachable,
            "spark1 -> root@10.77.0.2:22: no connection over the fabric, or it broke",
            id="link down",
        ),
    ],
)
def test_ssh_failed(cluster: Cluster, said: str, kind: type[Exception], part: str) -> None:
    found = ssh_failed(cluster, cluster.workers[0], said)
    assert isinstance(found, kind)
    assert part in str(found)
    assert "@@" not in str(found)


def test_amounts_are_for_people() -> None:
    assert [amount(n) for n in (0, 999, 12_340, 119_000_000_000, 2.5e12)] == [
        "0 B",
        "999 B",
        "12.3 kB",
        "119.0 GB",
        "2.5 TB",
    ]
    assert rate(5_000_000, 2) == "5.0 MB at 2.5 MB/s"
    assert rate(5, 2) == "5 B"


@pytest.mark.parametrize(
    ("done", "speed", "text"),
    [
        pytest.param(30, 10.0, " at 10 B/s, 7 s left", id="seconds"),
        pytest.param(30, 0.01, " at 0 B/s, 117 min left", id="minutes"),
        pytest.param(30, 0.0, " at 0 B/s", id="nothing moves"),
        pytest.param(100, 5.0, " at 5 B/s", id="all is there"),
    ],
)
def test_pace(done: int, speed: float, text: str) -> None:
    assert pace(done, 100, speed) == text


# --- the relayed program ------------------------------------------------------------------------


class Folder:
    """A model folder, and what the program says of it."""

    def __init__(self, root: Path) -> None:
        self.path = root / "my model's $(id)"
        self.path.mkdir()
        self.state = root / "home" / "pair" / "weights.json"

    def write(self, name: str, content: bytes) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    def look(self, mode: str = "keep", path: Path | None = None) -> Manifest:
        done = subprocess.run(
            [sys.executable, "-", "manifest", str(path or self.path), str(self.state), mode],
            input=program("manifest"),
            capture_output=True,
            timeout=30,
            check=True,
        )
        return Manifest.model_validate_json(done.stdout.splitlines()[-1])

    def records(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.state.read_text())["folders"][str(self.path)]
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def safetensors(size: int) -> bytes:
    header = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def test_manifest_of_a_folder(folder: Folder) -> None:
    folder.write("config.json", b"{}")
    folder.write("sub/odd name's.txt", b"x")
    folder.write("w.safetensors", safetensors(100))
    folder.write(INDEX, b'{"weight_map": {"b": "w-2", "a": "w-1", "c": "w-2"}}')
    folder.write(".git/objects/big", b"never loaded")
    folder.write(".rsync-part/w.safetensors", b"half")
    found = folder.look()
    assert sorted(found.files) == [
        "config.json",
        INDEX,
        "sub/odd name's.txt",
        "w.safetensors",
    ]
    assert found.files["config.json"].size == 2
    assert found.files["config.json"].sha256.startswith("44136fa355b3678a")
    assert found.files[INDEX].names == ("w-1", "w-2")
    assert found.faults == {}


def test_a_glance_reads_no_whole_file_and_keeps_nothing(folder: Folder) -> None:
    folder.write("config.json", b"{}")
    known = folder.look().files["config.json"]
    kept = folder.records()
    folder.write("w.safetensors", safetensors(100)[:-1])
    found = folder.look("glance")
    assert {name: file.size for name, file in found.files.items()} == {
        "config.json": 2,
        "w.safetensors": 205,
    }
    assert found.files["config.json"] == known
    assert found.files["w.safetensors"].sha256 == ""
    assert found.faults == {"w.safetensors": "has 205 bytes, its header promises 206"}
    assert folder.records() == kept


WEIGHTS = safetensors(100)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        pytest.param("w.safetensors", WEIGHTS, None, id="whole"),
        pytest.param(
            "w.safetensors",
            WEIGHTS[:-1],
            f"has {len(WEIGHTS) - 1} bytes, its header promises {len(WEIGHTS)}",
            id="one byte short",
        ),
        pytest.param(
            "w.safetensors",
            WEIGHTS + b"\0",
            f"has {len(WEIGHTS) + 1} bytes, its header promises {len(WEIGHTS)}",
            id="one byte long",
        ),
        pytest.param(
            "w.safetensors", WEIGHTS[:20], "is cut off within its header", id="header cut"
        ),
        pytest.param("w.safetensors", b"", "is cut off: 0 bytes", id="empty"),
        pytest.param("w.safetensors", bytes(300), "has no readable header", id="zeros"),
        pytest.param("w.safetensors", b"<html>" * 9, "is no safetensors file", id="something else"),
        pytest.param(
            "w.bin",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "is a Git-LFS pointer, not the file itself",
            id="LFS pointer",
        ),
        pytest.param(INDEX, b"{", "has no readable weight_map", id="broken index"),
        pytest.param(
            "w.bin.incomplete", b"", "is left by a download that has not finished", id="unfinished"
        ),
        pytest.param(
            ".cache/huggingface/download/x.incomplete",
            b"",
            "is left by a download that has not finished",
            id="unfinished, in the hub's folder",
        ),
        pytest.param(".cache/huggingface/download/x.lock", b"", None, id="the hub's old lock"),
    ],
)
def test_faults_of_a_file(folder: Folder, name: str, content: bytes, fault: str | None) -> None:
    folder.write(name, content)
    assert folder.look().faults == ({name: fault} if fault else {})


@pytest.mark.parametrize(
    ("left", "fault"),
    [
        pytest.param("w.safetensors.incomplete", None, id="beside the whole file"),
        pytest.param("other.safetensors.incomplete", "other", id="of a file that is not there"),
        pytest.param(
            ".cache/huggingface/download/w.safetensors.0a1b.incomplete", None, id="in the hub's way"
        ),
        pytest.param(
            # base64 of the sha1 of "w.safetensors.metadata"
            ".cache/huggingface/download/{hashed}.0a1b.incomplete",
            None,
            id="in the hub's newer way",
        ),
        pytest.param(
            ".cache/huggingface/download/other.safetensors.0a1b.incomplete",
            "other",
            id="of another file, in the hub's way",
        ),
        pytest.param("w.safetensors.aria2", "w", id="aria2 writes beside the file itself"),
    ],
)
def test_remains_of_a_download(folder: Folder, left: str, fault: str | None) -> None:
    digest = hashlib.sha1(b"w.safetensors.metadata").digest()
    left = left.format(hashed=base64.urlsafe_b64encode(digest).decode())
    folder.write("w.safetensors", safetensors(100))
    folder.write(left, b"half")
    assert [*folder.look().faults] == ([left] if fault else [])


def test_the_digest_of_a_large_file_is_that_over_its_pieces(folder: Folder) -> None:
    content = os.urandom(2 * PIECE + 5)
    folder.write("w.bin", content)
    folder.write("one.bin", content[:PIECE])
    found = folder.look().files
    cut = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    over = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in cut))
    assert found["w.bin"].sha256 == over.hexdigest()
    assert found["one.bin"].sha256 == hashlib.sha256(cut[0]).hexdigest()
    pieces = base64.b64decode(folder.records()["w.bin"]["pieces"])
    assert pieces == b"".join(hashlib.sha256(piece).digest() for piece in cut)


def test_links_are_followed(folder: Folder) -> None:
    blob = folder.path.parent / "blobs" / "abc"
    blob.parent.mkdir()
    blob.write_bytes(b"data")
    (folder.path / "w.bin").symlink_to("../blobs/abc")
    (folder.path / "sub").symlink_to(blob.parent)
    (folder.path / "around").symlink_to(folder.path)
    (folder.path / "gone.bin").symlink_to("../blobs/gone")
    found = folder.look()
    assert sorted(found.files) == ["sub/abc", "w.bin"]
    assert found.faults == {"gone.bin": "is a broken link"}


def test_a_name_that_is_no_text_is_named(folder: Folder) -> None:
    Path(os.fsdecode(os.fsencode(folder.path) + b"/w\xff.bin")).write_bytes(b"x")
    assert folder.look().faults == {"w\\xff.bin": "has a name that is not UTF-8"}


def test_known_files_are_not_read_again(folder: Folder) -> None:
    folder.write("w.bin", b"data")
    folder.look()
    state = json.loads(folder.state.read_text())
    state["folders"][str(folder.path)]["w.bin"]["sha256"] = "as recorded"
    folder.state.write_text(json.dumps(state))
    assert folder.look().files["w.bin"].sha256 == "as recorded"


def _damage(file: Path) -> None:
    before = file.stat()
    file.write_bytes(b"dXta")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"dXta")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)


@pytest.mark.parametrize("change", [_damage, _replace])
def test_a_change_of_equal_size_and_time_is_found(
    folder: Folder, change: Callable[[Path], None]
) -> None:
    file = folder.write("w.bin", b"data")
    before = folder.look()
    change(file)
    assert folder.look().files["w.bin"].sha256 != before.files["w.bin"].sha256


def test_a_look_writes_nothing(folder: Folder) -> None:
    folder.write("w.bin", b"data")
    assert folder.look("look").files["w.bin"].size == 4
    assert not folder.state.parent.exists()


@pytest.mark.parametrize("text", ["", "{", '{"version": 0}', "[]"])
def test_a_damaged_state_file_is_replaced(folder: Folder, text: str) -> None:
    folder.write("w.bin", b"data")
    folder.state.parent.mkdir(parents=True)
    folder.state.write_text(text)
    assert folder.look().files["w.bin"].size == 4


def test_the_state_of_another_model_stays(folder: Folder) -> None:
    folder.write("w.bin", b"data")
    folder.look()
    other = folder.path.with_name("other")
    other.mkdir()
    folder.look(path=other)
    assert folder.records().keys() == {"w.bin"}


def test_only_what_lies_inside_is_removed(folder: Folder) -> None:
    outside = folder.path.parent / "other"
    outside.mkdir()
    (outside / "a").write_text("x")
    (folder.path / "link").symlink_to("../other")
    (folder.path / "b.bin").symlink_to("../other/a")
    folder.write("sub/deep/c", b"")
    folder.write("kept", b"")
    paths = ["link/a", "b.bin", "sub/deep/c", "gone"]
    done = subprocess.run(
        [sys.executable, "-", "remove_files", str(folder.path), json.dumps(paths)],
        input=program("remove_files"),
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert json.loads(done.stdout) == {"stay": {"link/a": f"lies in {outside}"}}
    assert (outside / "a").read_text() == "x"
    assert sorted(path.name for path in folder.path.iterdir()) == ["kept", "link"]


def test_no_folder(folder: Folder) -> None:
    assert folder.look(path=folder.path / "none").folder == "does not exist"
    assert folder.look(path=folder.write("file", b"")).folder == "cannot be read: Not a directory"

"""The script relay: what stands on a node, against what should."""

import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from tasks.scripts import LOOK, NAMES, File, PutFile, parse_look, plan
from tasks.topology import Files

HEAD = Files(launch=b"launch", environment=b"secret", arguments=b"arguments")
WORKER = HEAD.model_copy(update={"arguments": None})


def standing(files: Files) -> dict[str, File]:
    return {
        name: File(mode=mode, sha256=sha256(content).hexdigest())
        for name, content, mode in files.items()
    }


@pytest.mark.parametrize(
    ("want", "have", "steps"),
    [
        pytest.param(HEAD, {}, ["write launch", "write node.env", "write serve.args"], id="absent"),
        pytest.param(HEAD, standing(HEAD), [], id="as wanted"),
        pytest.param(WORKER, standing(WORKER), [], id="as wanted on a worker"),
        pytest.param(
            HEAD,
            standing(HEAD) | {"launch": File(mode=0o755, sha256="edited")},
            ["write launch"],
            id="edited",
        ),
        pytest.param(
            HEAD,
            standing(HEAD) | {"node.env": File(mode=0o644, sha256=sha256(b"secret").hexdigest())},
            ["write node.env"],
            id="readable by everybody",
        ),
        pytest.param(
            WORKER, standing(HEAD), ["remove serve.args"], id="a head that became a worker"
        ),
    ],
)
def test_plan(want: Files, have: dict[str, File], steps: list[str]) -> None:
    assert [str(step) for step in plan(want, have)] == steps


def test_a_step_never_shows_what_it_writes() -> None:
    step = PutFile("node.env", 0o600, b"secret")
    assert (str(step), repr(step)) == (
        "write node.env",
        "PutFile(name='node.env', mode=384)",
    )


def look(folder: Path) -> subprocess.CompletedProcess[str]:
    argv = ["sh", "-c", LOOK, "sh", str(folder), *NAMES]
    return subprocess.run(argv, capture_output=True, text=True)


def test_looking_at_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "-a folder"
    folder.mkdir()
    for name, content, mode in HEAD.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(mode)
    (folder / "more").write_text("not ours")
    said = look(folder)
    assert (said.returncode, said.stderr) == (0, "")
    assert parse_look(said.stdout) == standing(HEAD)


@pytest.mark.parametrize("made", [False, True])
def test_looking_where_nothing_is(made: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    said = look(folder)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
    assert parse_look(said.stdout) == {}

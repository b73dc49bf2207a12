"""What the engine says of its arguments: the question, the answers, and what is remembered."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.engine_verdicts import (
    Verdict,
    check_command,
    key,
    parse_memory,
    parse_verdict,
    plan,
    remembered,
)
from tasks.relayed import engine_check as relay
from tasks.remote import Result
from tests.unit.specs import RUN, spec

SCRIPT = Path(relay.__file__)
ACCEPTED = Verdict(versions={"vllm": "0.32.0"})


def test_the_throwaway_container() -> None:
    argv = check_command(spec(), RUN, ("serve", "/models/tiny"))
    [name] = [word for word in argv if word.startswith("--name=")]
    assert name.startswith("--name=sparkrail-sparks-check-run-1-")
    assert [word for word in argv if word != name] == [
        "docker",
        "run",
        "--rm",
        "--interactive",
        "--init",
        "--pull=never",
        "--network=none",
        "--workdir=/",
        "--env=HF_HUB_OFFLINE=1",
        "--label=sparkrail.cluster=sparks",
        "--label=sparkrail.role=check",
        "--label=sparkrail.run=run-1",
        "--mount=type=bind,source=/models/tiny,target=/models/tiny,readonly",
        "--entrypoint=python3",
        "engine:1",
        "-",
        '["serve", "/models/tiny"]',
    ]


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        pytest.param(
            Result('{"missing": [], "versions": {"vllm": "0.32.0"}, "refused": ""}\n', "noise", 0),
            ACCEPTED,
            id="accepted",
        ),
        pytest.param(
            Result('{"missing": ["ray"], "versions": {}}\n', "", 0),
            Verdict(missing=("ray",)),
            id="no Ray",
        ),
        pytest.param(
            Result("", 'exec: "python3": executable file not found in $PATH', 127),
            Verdict(missing=("python3", "vllm", "ray")),
            id="no python3",
        ),
        pytest.param(
            Result("", "Traceback\nKeyError: 'x'", 1),
            Verdict(unparsed="exit code 1: KeyError: 'x'"),
            id="it fell",
        ),
        pytest.param(Result("", "", 142), Verdict(unparsed="exit code 142: "), id="it hung"),
    ],
)
def test_answers(result: Result, verdict: Verdict) -> None:
    assert parse_verdict(result) == verdict


def test_a_verdict_depends_on_image_and_arguments() -> None:
    words = ("serve", "/models/tiny")
    keys = {key("1", words), key("2", words), key("1", (*words, "--x")), key("1", words)}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("", None, id="nothing kept"),
        pytest.param("[1]", None, id="of another form"),
        pytest.param('{"k": {"missing": 1}}', None, id="of another version"),
        pytest.param('{"other": {}}', None, id="another question"),
        pytest.param(
            json.dumps({"k": ACCEPTED.model_dump(mode="json", exclude={"source"})}),
            ACCEPTED.model_copy(update={"source": "remembered"}),
            id="the same question",
        ),
    ],
)
def test_what_is_remembered(text: str, found: Verdict | None) -> None:
    assert remembered(parse_memory(text), "k") == found


def test_the_newest_verdicts_are_kept() -> None:
    have: dict[str, Any] = {f"k{number}": {} for number in range(20)}
    [keep] = plan("new", {"missing": []}, have)
    assert list(keep.memory) == ["new", *list(have)[:19]]
    assert str(keep) == "keep the verdict"
    assert plan("new", {"missing": []}, keep.memory) == []


# --- the relayed program, on a made-up vLLM: the real one needs the engine image ------------------

VLLM = {
    "vllm/__init__.py": "print('vLLM prints while it is imported')",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": (
        "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser): pass\n"
    ),
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/serve.py": """\
class Serve:
    def subparser_init(self, commands):
        parser = commands.add_parser("serve")
        parser.add_argument("model")
        parser.add_argument("--max-model-len", type=int)
        parser.add_argument("--tools", action="store_true")
    def validate(self, arguments):
        if arguments.tools:
            raise TypeError("--tools requires --parser")
def cmd_init():
    return [Serve()]
""",
}


def image(folder: Path, *programs: str, **changed: str) -> Path:
    """A folder with a vLLM of these files, and programs on its PATH."""
    for name, content in {**VLLM, **changed}.items():
        file = folder / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (folder / "bin").mkdir()
    for name in programs:
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def asked(folder: Path, *words: str) -> Any:
    said = subprocess.run(
        [sys.executable, "-", json.dumps(["serve", "/models/tiny", *words])],
        input=SCRIPT.read_bytes(),
        env={"PATH": str(folder / "bin"), "PYTHONPATH": str(folder / "site")},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return json.loads(said.stdout)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        pytest.param(["--max-model-len=256"], "", id="accepted"),
        pytest.param(
            ["--mem-fraction=0.8"], "unrecognized arguments: --mem-fraction=0.8", id="unknown flag"
        ),
        pytest.param(
            ["--max-model-len=lots"],
            "argument --max-model-len: invalid int value: 'lots'",
            id="bad value",
        ),
        pytest.param(["--tools"], "TypeError: --tools requires --parser", id="flags that need one"),
        pytest.param(["--help"], "it would print its help and end", id="help"),
    ],
)
def test_the_parsers_refusal(tmp_path: Path, words: list[str], refused: str) -> None:
    found = asked(image(tmp_path, "vllm", "ray"), *words)
    assert (found["missing"], found["refused"]) == ([], refused)
    assert "python" in found["versions"]


def test_an_image_without_ray(tmp_path: Path) -> None:
    found = asked(image(tmp_path, "vllm"))
    assert found["missing"] == ["ray"]
    assert "refused" not in found


def test_a_vllm_that_cannot_be_asked(tmp_path: Path) -> None:
    broken = {"vllm/entrypoints/cli/serve.py": "raise RuntimeError('no GPU here')"}
    found = asked(image(tmp_path, "vllm", "ray", **broken))
    assert found["unparsed"] == "RuntimeError: no GPU here"


def test_an_older_vllm(tmp_path: Path) -> None:
    folder = image(tmp_path, "vllm", "ray")
    parser = folder / "site/vllm/utils/argparse_utils.py"
    (folder / "site/vllm/utils/__init__.py").write_text(parser.read_text())
    parser.unlink()
    assert asked(folder)["refused"] == ""

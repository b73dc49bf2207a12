"""Programs for a node: with what they import of ours, and what they are told."""

import ast
import json
import subprocess
import sys

import pytest

from tasks.programs import program


@pytest.mark.parametrize("told", ["a 'quoted' \"text\"\n{x}", {"token": "secret", "number": 1}])
def test_a_program_runs_with_its_neighbours_and_orders(
    monkeypatch: pytest.MonkeyPatch, told: object
) -> None:
    texts = {
        "outer": '"""Says what it is told."""\nfrom __future__ import annotations\n'
        "import sys\nfrom tasks.relayed.inner import answer\n"
        'if __name__ == "__main__":\n    print(answer(sys.argv))\n',
        "inner": "def answer(words: list[str]) -> str:\n    return repr(words)\n",
    }
    monkeypatch.setattr("tasks.programs.read", texts.__getitem__)
    done = subprocess.run(
        [sys.executable, "-I", "-", "outer", "argument"],
        input=program("outer", told),
        capture_output=True,
        timeout=30,
        check=True,
    )
    words = ast.literal_eval(done.stdout.decode())
    assert words[:3] == ["-", "outer", "argument"]
    assert json.loads(words[3]) == told


def test_every_program_is_there() -> None:
    assert program("facts").startswith(b'"""')

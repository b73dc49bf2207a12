"""The command line as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BAD = """\
name: Bad Name
head: {name: head, address: 10.88.0.1, fabric_address: 10.77.0.1}
image: {name: "engine:1"}
model: {name: tiny, path: /models/tiny}
serve: {tensor_parallel: 1}
"""


def test_a_bad_spec_prints_one_document_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    argv = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main())"]
    words = ["deploy", str(tmp_path / "bad.yaml"), "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(tmp_path / "prefect")}
    said = subprocess.run([*argv, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert said.returncode == 2, said.stderr
    document = json.loads(said.stdout)
    assert list(document) == [
        "cluster",
        "state",
        "outcome",
        "seconds",
        "endpoint",
        "steps",
        "problems",
        "error",
    ]
    assert (document["state"], document["steps"]) == ("failed", [])
    assert "Bad Name" in document["error"]

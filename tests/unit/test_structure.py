"""The shape of the project: imports point one way, and there are no further folders."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.programs import NEIGHBOUR

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "blocks": {"blocks"},
    "tasks": {"blocks", "tasks"},
    "flows": {"blocks", "tasks", "flows"},
}
FOLDERS = {"blocks", "tasks", "flows", "deployments", "tests"}
MODULES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """The top-level packages that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    """flows -> tasks -> blocks, and nothing of ours imports the tests."""
    ours = {"blocks", "tasks", "flows", "tests"}
    assert set(imports(path)) & ours <= MAY_IMPORT[path.relative_to(ROOT).parts[0]]


def test_one_module_speaks_ssh() -> None:
    speaking = [path for path in MODULES if {"fabric", "paramiko"} & set(imports(path))]
    assert speaking == [ROOT / "tasks" / "remote.py"]


def test_relayed_programs_need_nothing_but_python() -> None:
    """They run on nodes that have only what a fresh system has; some run inside the engine."""
    inside = {
        "ray_nodes.py": {"ray", "vllm"},
        "engine_check.py": {"vllm"},
        "all_reduce.py": {"torch"},
    }
    for path in (ROOT / "tasks" / "relayed").glob("*.py"):
        foreign = set(imports(path)) - sys.stdlib_module_names
        if foreign == {"tasks"}:  # Its neighbours, which are relayed with it.
            bare = NEIGHBOUR.sub("", path.read_text())
            foreign = {"tasks"} if re.search(r"\b(from|import) tasks\b", bare) else set()
        assert foreign <= inside.get(path.name, set()), path.name


def test_there_are_no_other_folders() -> None:
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"}
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert found - ignored - {"shared"} == FOLDERS


@pytest.mark.parametrize("folder", ["blocks", "tasks", "flows", "tests"])
def test_folders_are_packages(folder: str) -> None:
    """Without it any regular package of that name, anywhere on the path, wins over ours."""
    assert (ROOT / folder / "__init__.py").is_file()


def test_no_flow_hides_a_library() -> None:
    """Prefect puts the flow's own folder first on the path."""
    names = {path.stem for path in (ROOT / "flows").glob("*.py")}
    assert not names & {
        "docker",
        "ray",
        "prefect",
        "fabric",
        "rich",
        "yaml",
        "pydantic",
        "tenacity",
    }

"""Cluster specs as files: `deployments/clusters/NAME.yaml`, or a path."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from blocks import Cluster
from blocks.mistakes import field_path, shown
from tasks.errors import InvalidSpec

CLUSTERS = Path(__file__).resolve().parents[1] / "deployments" / "clusters"
REMEDY = f"Nothing was touched. {CLUSTERS / 'example.yaml'} explains every key."


def load_cluster(name_or_path: str) -> Cluster:
    """The spec of that name, or InvalidSpec with all its mistakes at once."""
    path = _path(name_or_path)
    document = _document(path)
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        lines = [_line(problem) for problem in error.errors(include_url=False)]
        raise _invalid(path, *lines) from error


def spec_text(name_or_path: str) -> str:
    """A spec as it is written."""
    return _path(name_or_path).read_text(encoding="utf-8")


def cluster_names() -> list[str]:
    """The clusters that have a file."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


def _path(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path).expanduser()
    return CLUSTERS / f"{name_or_path}.yaml"


def _document(path: Path) -> Any:
    try:
        # A loader of the safe kind: it makes texts, lists and mappings, and nothing else.
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise InvalidSpec(
            f"{path}: no such file",
            details=f"clusters here: {', '.join(cluster_names()) or 'none'}",
            remedy=f"Copy {CLUSTERS / 'example.yaml'} and fill in your nodes.",
        ) from error
    except OSError as error:
        raise _invalid(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _invalid(
            path, f"not UTF-8: byte {error.start} is {error.object[error.start]:#x}"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _invalid(path, _where(error)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise _invalid(path, f"not YAML: {error}") from error
    if not isinstance(document, dict):
        raise _invalid(path, f"the document: {shown(document)} — allowed: keys with values")
    return document


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{error.problem or error.context}"


def _line(problem: Any) -> str:
    value = "(absent)" if problem["type"] == "missing" else shown(problem["input"])
    return f"{field_path(problem['loc'])}: {value} — {problem['msg']}"


def _invalid(path: Path, *mistakes: str) -> InvalidSpec:
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    return InvalidSpec(f"{path}: {count}", details="\n".join(mistakes), remedy=REMEDY)


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once, and a value is the text that the user wrote.

    YAML 1.1 reads NO as false, 010 as 8 and 1.10 as 1.1; the fields of the spec know their types.
    """


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        text = str(key.value)
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a word", key.start_mark
            )
        first = lines.setdefault(text, line)
        if first != line:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {text} stands already in line {first}", key.start_mark
            )
    loader.flatten_mapping(node)
    return {
        loader.construct_object(k, deep=True): loader.construct_object(v, deep=True)
        for k, v in node.value
    }


_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)

"""The cluster spec of a lab, as a user would write it."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from tests.lab import engine_image, network
from tests.lab.layout import HEAD_ADDRESS, Lab, Shape, nodes
from tests.lab.node import HERE, PYTHON

MODEL_PATH = "/models/tiny"
# The tiny model's attention heads can be split into so many parts.
TENSOR_PARALLEL = (1, 2, 4)


def write(lab: Lab, shape: Shape) -> None:
    lab.spec.parent.mkdir(parents=True, exist_ok=True)
    aside = lab.spec.with_suffix(".new")
    header = f"# The lab {lab.name}, written by `python -m tests.lab up` and removed by `down`.\n"
    aside.write_text(header + "\n".join(_lines(document(lab, shape))) + "\n")
    aside.rename(lab.spec)


def document(lab: Lab, shape: Shape) -> dict[str, Any]:
    head, *workers = nodes(shape)
    count = len(workers) + 1
    tensor = count if count in TENSOR_PARALLEL else 1
    return {
        "name": lab.name,
        "ssh": {"known_hosts": str(lab.known_hosts), "key_file": str(lab.key_file)},
        "head": {
            "name": head.name,
            "address": HEAD_ADDRESS,
            "user": "root",
            "fabric_address": head.fabric_address,
            "gpus": 1,
            "proxy_command": proxy_command(lab),
        },
        "workers": [
            {
                "name": worker.name,
                "user": "root",
                "fabric_address": worker.fabric_address,
                "gpus": 1,
            }
            for worker in workers
        ],
        "image": {"name": engine_image.TAG, "gpu_access": "none"},
        "model": {"name": "tiny", "path": MODEL_PATH},
        "serve": {
            "port": 8000,
            "tensor_parallel": tensor,
            "pipeline_parallel": count // tensor,
            "arguments": ["--enforce-eager", "--dtype=bfloat16", "--max-model-len=256"],
        },
        # A while of a person's patience, not of a model's.
        "canary": {"again_seconds": 2},
        "ray": {"port": 6379, "object_store_mib": 200},
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"},
    }


def proxy_command(lab: Lab) -> str:
    """Dials from inside the control's namespace, so that nobody outside it needs a route."""
    dial = [PYTHON, "-I", "-S", str(HERE / "dial.py")]
    return f"{shlex.join([*network.inside(lab, 'control'), *dial])} %h %p"


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """YAML of nested mappings and lists; JSON's scalars are YAML's."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield f"{indent}{key}:"
            yield from _lines(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            yield f"{indent}{key}:"
            for entry in item:
                first, *rest = _lines(entry, indent + "    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            yield f"{indent}{key}: {_scalar(item)}"


def _scalar(item: Any) -> str:
    words = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
    plain = isinstance(item, str) and re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", item)
    return str(item) if plain and str(item).lower() not in words else json.dumps(item)

"""How much memory a model needs on a node, by its files, its config and the engine's arguments."""

import re
from collections.abc import Sequence

from tasks.checks.site import Site
from tasks.manifests import WEIGHTS

UTILIZATION = 0.9  # vLLM's default.
# With these, the files' size says little about what the ranks hold.
UNKNOWN_SIZE = ("--quantization", "-q", "--cpu-offload-gb", "--load-format")
FACTORS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


def option(arguments: Sequence[str], *names: str) -> str | None:
    """The last value that the arguments give an option."""
    value = None
    for place, word in enumerate(arguments):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") in names:
            following = arguments[place + 1 : place + 2]
            value = text if equals else next(iter(following), "")
    return value


def utilization(site: Site) -> float:
    """The share of a GPU's memory that vLLM takes at its start."""
    said = option(site.cluster.serve.arguments, "--gpu-memory-utilization")
    try:
        return float(said) if said else UTILIZATION
    except ValueError:  # The engine's parser will refuse it.
        return UTILIZATION


def weights(site: Site) -> int | None:
    """Bytes that the ranks of this node load; none where the files do not tell."""
    arguments = site.cluster.serve.arguments
    if option(arguments, *UNKNOWN_SIZE) is not None:
        return None
    files = site.wanted_weights.files
    kinds = [kind for kind in WEIGHTS if any(path.endswith(kind) for path in files)]
    size = sum(file.size for path, file in files.items() if path.endswith(tuple(kinds[:1])))
    if site.model.get("dtype", site.model.get("torch_dtype")) == "float32":
        # vLLM loads them as 16 bits unless told otherwise.
        size = size if option(arguments, "--dtype") in ("float", "float32") else size // 2
    return size * site.node.gpus // ranks(site)


def ranks(site: Site) -> int:
    return site.cluster.serve.tensor_parallel * site.cluster.serve.pipeline_parallel


def kv_cache(site: Site) -> int | None:
    """Bytes that one request of the greatest length needs on this node, for plain attention."""
    config, serve = site.model, site.cluster.serve
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    length = _length(option(serve.arguments, "--max-model-len"))
    length = length or config.get("max_position_embeddings")
    if not layers or not heads or not length or not _is_plain(site):
        return None
    shared = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    small = (option(serve.arguments, "--kv-cache-dtype") or "").startswith("fp8")
    per_rank = max(1, shared // serve.tensor_parallel) * layers / serve.pipeline_parallel
    return int(2 * per_rank * size * (1 if small else 2) * length * site.node.gpus)


def _is_plain(site: Site) -> bool:
    kinds = {*(site.model.get("layer_types") or ())} - {"full_attention"}
    return not (kinds or site.model.get("kv_lora_rank") or site.model.get("sliding_window"))


def _length(said: str | None) -> int | None:
    """A number as vLLM takes it, such as 32768, 32k or 32K."""
    found = re.fullmatch(r"([0-9.]+)([kKmM]?)", said or "")
    return int(float(found.group(1)) * FACTORS[found.group(2)]) if found else None

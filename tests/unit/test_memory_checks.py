"""Whether a model fits: the estimates by files, config and arguments, and the verdicts on them."""

from collections.abc import Sequence
from typing import Any

import pytest

from tasks.checks import estimates
from tasks.checks.site import Site
from tasks.errors import SparkrailError
from tasks.manifests import File, Manifest
from tasks.node_facts import Gpu, GpuHolder, Memory, ModelFacts, NodeFacts
from tests.unit.sites import (
    FOREIGN,
    GIB,
    OURS,
    Change,
    both,
    cluster,
    container,
    containers,
    having,
    nodes,
    process,
    row,
)

# Like a 70B model with 8 KV heads: 320 KiB of KV cache for each token, over two ranks half of it.
LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
}


def serving(*arguments: str) -> Any:
    return cluster(serve={"tensor_parallel": 2, "arguments": list(arguments)})


def site(arguments: Sequence[str] = (), **changes: Any) -> Site:
    spec, facts = serving(*arguments), model(100, **changes)
    read = {name: found for name, found in facts.items() if isinstance(found, NodeFacts)}
    return Site(spec, spec.head, read)


def model(size: int, **config: Any) -> dict[str, NodeFacts | SparkrailError]:
    """Both nodes hold weights of so many GiB."""
    files = {
        "model-1.safetensors": File(size=size * GIB, sha256="a"),
        "old.bin": File(size=size * GIB, sha256="b"),
        "tokenizer.json": File(size=GIB, sha256="c"),
    }
    change = having(weights=Manifest(files=files), model=ModelFacts(config={**LLAMA, **config}))
    return nodes(head=change, worker1=change)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["--max-model-len=256"], "256"),
        (["--max-model-len", "256"], "256"),
        (["--max_model_len=256"], "256"),
        (["--max-model-len=1", "--max-model-len=2"], "2"),
        (["--max-model-len"], ""),
    ],
)
def test_the_value_of_an_option(arguments: list[str], value: str | None) -> None:
    assert estimates.option(arguments, "--max-model-len") == value


@pytest.mark.parametrize(
    ("arguments", "config", "size"),
    [
        pytest.param([], {}, 50 * GIB, id="half of them on each of two ranks"),
        pytest.param([], {"torch_dtype": "float32"}, 25 * GIB, id="32 bits, loaded as 16"),
        pytest.param(
            ["--dtype=float32"], {"torch_dtype": "float32"}, 50 * GIB, id="32 bits as asked"
        ),
        pytest.param(["--quantization=fp8"], {}, None, id="quantized while they are loaded"),
        pytest.param(["--cpu-offload-gb", "20"], {}, None, id="offloaded"),
    ],
)
def test_weights_of_a_node(arguments: list[str], config: dict[str, Any], size: int | None) -> None:
    assert estimates.weights(site(arguments, **config)) == size


@pytest.mark.parametrize(
    ("arguments", "config", "size"),
    [
        pytest.param([], {}, 20 * GIB, id="the model's own length"),
        pytest.param(["--max-model-len=32768"], {}, 5 * GIB, id="a length"),
        pytest.param(["--max-model-len=32K"], {}, 5 * GIB, id="a length in words"),
        pytest.param(["--max-model-len=auto"], {}, 20 * GIB, id="a length that is no number"),
        pytest.param(["--kv-cache-dtype=fp8_e5m2"], {}, 10 * GIB, id="8 bits"),
        pytest.param([], {"num_key_value_heads": 1}, 5 * GIB, id="every rank has a head at least"),
        pytest.param([], {"head_dim": 256}, 40 * GIB, id="heads of their own size"),
        pytest.param([], {"kv_lora_rank": 512}, None, id="latent attention"),
        pytest.param([], {"sliding_window": 4096}, None, id="sliding window"),
        pytest.param(
            [], {"layer_types": ["full_attention", "linear_attention"]}, None, id="mixed layers"
        ),
        pytest.param([], {"num_hidden_layers": None}, None, id="no such config"),
    ],
)
def test_kv_cache_of_a_node(arguments: list[str], config: dict[str, Any], size: int | None) -> None:
    assert estimates.kv_cache(site(arguments, **config)) == size


def holding(mib: int, where: str) -> Change:
    found = GpuHolder(pid=42, name="python3", used_mib=mib, process=process(container=where))
    return having(gpu_holders=(found,))


def memory(available: int, free: int) -> Change:
    return having(memory=Memory(total=120 * GIB, available=available * GIB, free=free * GIB))


H200 = Gpu(
    index=0, name="H200", uuid="GPU-2", driver="1", memory_mib=140 * 1024, free_mib=139 * 1024
)
OUR_RELEASE = containers(container(OURS, "sparkrail-lab-serve", label="lab"))
FITS = "50.0 GiB of weights + 5.0 GiB of KV cache in 0.9 of 120.0 GiB"


@pytest.mark.parametrize(
    ("size", "change", "verdict", "detail", "remedy"),
    [
        pytest.param(100, memory(115, 110), "ready", FITS, "", id="fits"),
        pytest.param(
            300,
            memory(115, 110),
            "blocked",
            "150.0 GiB of weights + 5.0 GiB of KV cache do not fit into 0.9 of 120.0 GiB",
            "Take more nodes, a smaller model or --max-model-len, or a greater "
            "--gpu-memory-utilization.",
            id="can never fit",
        ),
        pytest.param(
            100,
            memory(100, 90),
            "blocked",
            f"{FITS}; vLLM takes 108.0 GiB at its start, 100.0 GiB are to be had",
            "Free some on head, or set --gpu-memory-utilization=0.83.",
            id="too little to be had",
        ),
        pytest.param(
            100,
            both(memory(100, 90), holding(11700, "")),
            "blocked",
            f"{FITS}; vLLM takes 108.0 GiB at its start, 100.0 GiB are to be had",
            "Free some on head (11.4 GiB are held by others, see gpu memory), or set "
            "--gpu-memory-utilization=0.83.",
            id="a forgotten service",
        ),
        pytest.param(
            200,
            memory(90, 90),
            "blocked",
            "100.0 GiB of weights + 5.0 GiB of KV cache in 0.9 of 120.0 GiB; vLLM takes 108.0 GiB "
            "at its start, 90.0 GiB are to be had",
            "Free some on head.",
            id="less than the weights is to be had",
        ),
        pytest.param(
            100,
            memory(115, 60),
            "slow",
            f"{FITS}; 48.0 GiB of page cache have to go first",
            "If vLLM finds too little free memory, on head: sudo sysctl vm.drop_caches=1",
            id="page cache has to go",
        ),
        pytest.param(
            100,
            both(memory(20, 10), OUR_RELEASE, holding(90000, OURS)),
            "ready",
            FITS,
            "",
            id="our own release holds it",
        ),
        pytest.param(
            100,
            both(memory(20, 10), OUR_RELEASE, holding(20480, FOREIGN)),
            "blocked",
            f"{FITS}; vLLM takes 108.0 GiB at its start, 100.0 GiB are to be had",
            "Free some on head (20.0 GiB are held by others, see gpu memory), or set "
            "--gpu-memory-utilization=0.83.",
            id="others hold it beside our own release",
        ),
        pytest.param(
            100,
            both(memory(20, 10), having(gpus=(H200,))),
            "ready",
            "50.0 GiB of weights + 5.0 GiB of KV cache in 0.9 of 140.0 GiB",
            "",
            id="a GPU with memory of its own",
        ),
    ],
)
def test_memory_fit(size: int, change: Change, verdict: str, detail: str, remedy: str) -> None:
    facts = model(size)
    head = facts["head"]
    assert isinstance(head, NodeFacts)
    found = row(
        "memory fit", {**facts, "head": change(head)}, spec=serving("--max-model-len=32768")
    )
    assert (found.verdict, found.detail, found.remedy) == (verdict, detail, remedy)


def test_what_others_hold_may_go_by_policy() -> None:
    facts = model(100)
    head = facts["head"]
    assert isinstance(head, NodeFacts)
    facts["head"] = both(memory(100, 90), holding(11700, ""))(head)
    spec = cluster(
        serve={"tensor_parallel": 2, "arguments": ["--max-model-len=32768"]},
        residue={"policy": "stop-all-except"},
    )
    assert row("memory fit", facts, spec=spec).verdict == "slow"


def test_without_a_gpu_the_kv_cache_is_what_the_spec_says() -> None:
    spec = cluster(
        image={"name": "engine:1", "gpu_access": "none"},
        environment={"VLLM_CPU_KVCACHE_SPACE": "80"},
    )
    found = row("memory fit", model(100), spec=spec)
    assert (found.verdict, found.detail) == (
        "blocked",
        "50.0 GiB of weights + 80.0 GiB of KV cache in 115.0 GiB",
    )
    assert found.remedy == "Free some on head, or set a smaller VLLM_CPU_KVCACHE_SPACE."

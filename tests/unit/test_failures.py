"""Log lines that mean it will never come up, and a healthy log in which none is found."""

from pathlib import Path

import pytest

from tasks.failures import FAILURES, find_failure

FOLDER = Path(__file__).parent / "data" / "failures"
HEALTHY = (Path(__file__).parent / "data" / "vllm" / "healthy-start-0.32.0.txt").read_text()


@pytest.mark.parametrize(
    ("log", "line", "cause"),
    [
        pytest.param(
            "usage: vllm [-h] [-v] {chat,complete,serve,bench,collect-env,run-batch} ...\n"
            "vllm: error: unrecognized arguments: --attention-backends=FOO --nope\n",
            "vllm: error: unrecognized arguments: --attention-backends=FOO --nope",
            "this vLLM does not know one of serve.arguments",
            id="a flag of another engine",
        ),
        pytest.param(
            "usage: vllm serve [model_tag] [options]\n"
            "vllm serve: error: argument --max-model-len: invalid human_readable_int value: "
            "'lots'\n",
            "vllm serve: error: argument --max-model-len: invalid human_readable_int value: 'lots'",
            "vLLM does not accept the value of one of serve.arguments",
            id="a value that is none",
        ),
        pytest.param(
            "vllm serve: error: argument --dtype: expected one argument",
            "vllm serve: error: argument --dtype: expected one argument",
            "vLLM does not accept the value of one of serve.arguments",
            id="no value",
        ),
        pytest.param(
            "(EngineCore_DP0 pid=214) ValueError: Free memory on device (11.2/121.63 GiB) on "
            "startup is less than desired GPU memory utilization (0.9, 109.47 GiB). Decrease GPU "
            "memory utilization or reduce GPU memory used by other processes.\n",
            "ValueError: Free memory on device (11.2/121.63 GiB) on startup is less than desired "
            "GPU memory utilization (0.9, 109.47 GiB). Decrease GPU memory utilization or reduce "
            "GPU memory used by other processes.",
            "other processes or the page cache hold the GPU's memory",
            id="somebody else holds the memory",
        ),
        pytest.param(
            "(RayWorkerWrapper pid=301, ip=10.77.0.2) torch.OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 121.63 GiB of which 512.00 "
            "MiB is free.\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a "
            "total capacity of 121.63 GiB of which 512.00 MiB is free.",
            "the model does not fit into the memory that is left",
            id="out of memory",
        ),
        pytest.param(
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine.",
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine.",
            "no memory is left for the KV cache",
            id="no memory for the KV cache",
        ),
        pytest.param(
            "ValueError: To serve at least one request with the models's max seq len (131072), "
            "(24.00 GiB KV cache is needed, which is larger than the available KV cache memory "
            "(3.42 GiB). Based on the available memory, the estimated maximum model length is "
            "18688.",
            "ValueError: To serve at least one request with the models's max seq len (131072), "
            "(24.00 GiB KV cache is needed, which is larger than the available KV cache memory "
            "(3.42 GiB). Based on the available memory, the estimated maximum model length is "
            "18688.",
            "the context is too long for the memory that is left for the KV cache",
            id="a context too long",
        ),
        pytest.param(
            "ValueError: The model's max seq len (131072) is larger than the maximum number of "
            "tokens that can be stored in KV cache (26064). Try increasing "
            "`gpu_memory_utilization` or decreasing `max_model_len`.",
            "ValueError: The model's max seq len (131072) is larger than the maximum number of "
            "tokens that can be stored in KV cache (26064). Try increasing "
            "`gpu_memory_utilization` or decreasing `max_model_len`.",
            "the context is too long for the memory that is left for the KV cache",
            id="a context too long, in older words",
        ),
        pytest.param(
            "\x1b[33m(autoscaler +12s)\x1b[0m Error: No available node types can fulfill resource "
            "request {'GPU': 1.0, 'node:10.88.0.1': 0.001}. Add suitable node types to this "
            "cluster to resolve this issue.",
            "(autoscaler +12s) Error: No available node types can fulfill resource request "
            "{'GPU': 1.0, 'node:10.88.0.1': 0.001}. Add suitable node types to this cluster to "
            "resolve this issue.",
            "vLLM asks Ray for an address that no node registered",
            id="the address is not Ray's",
        ),
        pytest.param(
            "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc"
            ":84] ifa != nullptr. Unable to find address for: enp9s9",
            "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc"
            ":84] ifa != nullptr. Unable to find address for: enp9s9",
            "Gloo was given an interface that the node does not have",
            id="no such interface",
        ),
        pytest.param(
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/"
            "transport/tcp/pair.cc:144] timed out connecting: SO_ERROR: Connection refused, "
            "remote=[127.0.0.1]:41329",
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/"
            "transport/tcp/pair.cc:144] timed out connecting: SO_ERROR: Connection refused, "
            "remote=[127.0.0.1]:41329",
            "Gloo bound to loopback instead of the fabric interface",
            id="Gloo on loopback",
        ),
        pytest.param(
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect "
            "[127.0.1.1]:38921: Connection refused",
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect "
            "[127.0.1.1]:38921: Connection refused",
            "Gloo bound to loopback instead of the fabric interface",
            id="Gloo on the address that Debian gives a node's own name",
        ),
        pytest.param(
            "ValueError: The repository /models/x contains custom code which must be executed to "
            "correctly load the model. You can inspect the repository content at /models/x .\n"
            " You can inspect the repository content at https://hf.co//models/x.\n"
            "Please pass the argument `trust_remote_code=True` to allow custom code to be run.\n",
            "Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
            "the model brings code of its own",
            id="code of its own",
        ),
        pytest.param(
            "Loading /models/x requires to execute some code in that repo, you can inspect the "
            "content of the repository at https://hf.co//models/x. You can dismiss this prompt by "
            "passing `trust_remote_code=True`.\nPlease set the option `trust_remote_code=True` to "
            "remove this error.",
            "Please set the option `trust_remote_code=True` to remove this error.",
            "the model brings code of its own",
            id="code of its own, in older words",
        ),
        pytest.param(
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete "
            "metadata, file not fully covered",
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete "
            "metadata, file not fully covered",
            "a weights file is truncated or not a safetensors file",
            id="a truncated weights file",
        ),
        pytest.param(
            "safetensors_rust.SafetensorError: Error while deserializing header: header too large",
            "safetensors_rust.SafetensorError: Error while deserializing header: header too large",
            "a weights file is truncated or not a safetensors file",
            id="a pointer of git-lfs in place of the file",
        ),
        pytest.param(
            "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
            "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
            "a weights file is truncated or not a safetensors file",
            id="the same, in older words",
        ),
        pytest.param(
            "OSError: [Errno 98] Address already in use",
            "OSError: [Errno 98] Address already in use",
            "another process listens on the port",
            id="the port is taken",
        ),
        pytest.param(
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): "
            "address already in use",
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): "
            "address already in use",
            "another process listens on the port",
            id="the port is taken, in uvicorn's words",
        ),
    ],
)
def test_known_failures(log: str, line: str, cause: str) -> None:
    hit = find_failure(f"{HEALTHY}{log}\nTraceback (most recent call last):\n")
    assert hit is not None
    assert (hit.line, hit.failure.cause) == (line, cause)
    assert hit.failure.remedy.endswith(".")


def read(path: Path) -> tuple[str, str]:
    """The cause that stands in a file's first line, and the log behind its head."""
    head, _, log = path.read_text().partition("\n\n")
    return head.splitlines()[0].removeprefix("cause: "), log


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_captured_failures(path: Path) -> None:
    cause, log = read(path)
    hit = find_failure(f"{HEALTHY}{log}")
    assert hit is not None
    assert hit.failure.cause == cause
    assert len(hit.line) < 420


def test_every_entry_has_a_log() -> None:
    causes = {read(path)[0] for path in FOLDER.iterdir()}
    assert causes == {failure.cause for failure in FAILURES}


def test_who_said_it() -> None:
    hit = find_failure("(RayWorkerProc pid=9, ip=10.77.0.2) (Worker pid=9) CUDA out of memory")
    assert hit is not None
    assert (hit.address, hit.line) == ("10.77.0.2", "CUDA out of memory")


def test_whose_traceback_it_is() -> None:
    hit = find_failure(read(FOLDER / "model-not-in-the-ranks-container.txt")[1])
    assert hit is not None
    assert hit.address == "10.77.0.1"


def test_nothing_is_found_in_a_healthy_start() -> None:
    assert find_failure(HEALTHY) is None


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {'trust_remote_code': True, 'model': '/models/tiny'}",
        "WARNING [_custom_ops.py:20] Failed to import from vllm._C with "
        "ModuleNotFoundError(\"No module named 'vllm._C'\")",
        "INFO Available KV cache memory: 88.13 GiB",
        "INFO Maximum concurrency for 131,072 tokens per request: 3.05x",
        "WARNING If out-of-memory error occurs during cudagraph capture, consider decreasing "
        "`gpu_memory_utilization` or switching to eager mode.",
        "[W socket.cpp:200] [c10d] The client socket has failed to connect to "
        "[localhost]:29500 (errno: 97 - Address family not supported by protocol).",
        "The argument `trust_remote_code` is to be used with Auto classes. It has no effect here "
        "and is ignored.",
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is "
        ": 1",
        'INFO:     127.0.0.1:53144 - "GET /health HTTP/1.1" 200 OK',
    ],
)
def test_lines_that_only_look_like_failures(line: str) -> None:
    assert find_failure(line) is None


def test_the_first_failure_is_the_cause_of_those_after_it() -> None:
    log = "OSError: [Errno 98] Address already in use\ntorch.OutOfMemoryError: CUDA out of memory."
    hit = find_failure(log)
    assert hit is not None
    assert hit.line == "OSError: [Errno 98] Address already in use"

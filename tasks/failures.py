"""Lines in the engine's and Ray's logs that mean it will never come up, with cause and remedy."""

import re
from dataclasses import dataclass

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Which process said it, as Ray and vLLM put it before a line: "(EngineCore pid=250) ".
SPEAKER = re.compile(r"(\([^()]*\bpid=\d+[^()]*\)\s*)*")
ADDRESS = re.compile(r"\bip=([0-9.]+)")
# Whose traceback follows, where the engine prints that of a rank.
RANK = re.compile(r"\bray::\S+\(\) \(pid=\d+, ip=([0-9.]+)")

INTERFACE = "Take GLOO_SOCKET_IFNAME out of the spec: it follows from fabric_address."
HOLDERS = "See who holds GPU memory (sparkrail check)"
AGAIN = "Run sparkrail deploy again; if it comes back, see the log of the node that is named."


@dataclass(frozen=True)
class Failure:
    """A known failure: what the log says, why, what to do, and whether again may go better."""

    pattern: re.Pattern[str]
    cause: str
    remedy: str
    retryable: bool = False


def _never(pattern: str, cause: str, remedy: str) -> Failure:
    return Failure(re.compile(pattern), cause, remedy)


def _maybe(pattern: str, cause: str, remedy: str = AGAIN) -> Failure:
    return Failure(re.compile(pattern), cause, remedy, retryable=True)


# Of a line that two of them know, the first one counts: the particular before the general.
FAILURES = (
    # --- what vLLM was told ---
    _never(
        "unrecognized arguments: ",
        "this vLLM does not know one of serve.arguments",
        "Take the argument out, or use an image with a vLLM that knows it.",
    ),
    _never(
        r"error: argument .*(invalid|expected)",
        "vLLM does not accept the value of one of serve.arguments",
        "Correct the value; the line names the argument.",
    ),
    _never(
        r"max_model_len \(.*\) is greater than the derived max_model_len",
        "--max-model-len is longer than the model can",
        "Lower --max-model-len to what the line names.",
    ),
    _never(
        "attention heads .* must be divisible by tensor parallel size",
        "the model's attention heads cannot be split into serve.tensor_parallel parts",
        "Choose serve.tensor_parallel and serve.pipeline_parallel so that it divides them.",
    ),
    # --- the model's files ---
    _never(
        r"(set the option|pass the argument) `trust_remote_code=True`"
        r"|EOFError: EOF when reading a line",
        "the model brings code of its own",
        "Read that code, then set model.trust_remote_code: true.",
    ),
    _never(
        r"Model architectures .* are not supported for now"
        r"|does not recognize this architecture"
        r"|[Mm]odel architecture \S+ (was supported in vLLM until|is not supported)",
        "this vLLM does not know the model's architecture",
        "Use an image with a vLLM that knows it.",
    ),
    _never(
        r"Error while deserializing header",
        "a weights file is truncated or not a safetensors file",
        "Fetch the model anew on the head; sparkrail copies it to the workers.",
    ),
    _never(
        r"Cannot find any model weights with|weights were not initialized from checkpoint"
        r"|No such file or directory: \S*\.safetensors",
        "weights files are missing",
        "Fetch the model anew on the head; sparkrail copies it to the workers.",
    ),
    _never(
        r"Can't load tokenizer for|Couldn't instantiate the backend tokenizer"
        r"|Unable to load vocabulary from file|Can't load the tokenizer",
        "the model's tokenizer files are missing",
        "Fetch them (tokenizer.json, tokenizer_config.json, ...) into model.path on the head.",
    ),
    _never(
        r"Repo id must (be in the form|use alphanumeric)|Invalid repository ID or local directory"
        r"|is not a local folder and is not a valid model identifier"
        r"|does not appear to have a file named config\.json",
        "model.path holds no model",
        "Correct model.path, or fetch the model into it on the head.",
    ),
    # --- memory ---
    _never(
        r"Free memory on device .*less than desired GPU memory utilization",
        "other processes or the page cache hold the GPU's memory",
        "See who holds it (sparkrail check), or lower --gpu-memory-utilization.",
    ),
    _never(
        r"(CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory)",
        "the model does not fit into the memory that is left",
        f"{HOLDERS}; then lower --max-model-len or --gpu-memory-utilization.",
    ),
    _never(
        "No available memory for the cache blocks",
        "no memory is left for the KV cache",
        f"{HOLDERS}, or raise --gpu-memory-utilization.",
    ),
    _never(
        r"larger than the maximum number of tokens that can be stored in KV cache"
        r"|KV cache.*larger than the available KV cache memory",
        "the context is too long for the memory that is left for the KV cache",
        "Lower --max-model-len to what the line offers.",
    ),
    _never(
        r"killed due to (the node running low on memory|memory pressure)",
        "Ray ended a rank because the node's memory ran out",
        "See who holds the node's memory; then lower --gpu-memory-utilization or --max-model-len.",
    ),
    _never(
        r"exceeds /dev/shm size|object store is using \S+ instead of /dev/shm",
        "Ray's object store does not fit into the container's shared memory",
        "Raise image.shm_mib, or lower ray.object_store_mib.",
    ),
    _never(
        r"No space left on device",
        "a disk of the node, or the container's /dev/shm, is full",
        "Free some of it (df -h); image.shm_mib is the size of /dev/shm.",
    ),
    # --- GPU and image ---
    _never(
        r"CUDA driver version is insufficient|no kernel image is available for execution"
        r"|forward compatibility was attempted on non supported HW",
        "the image's CUDA does not fit the node's driver or GPU",
        "Use an image made for this GPU, or update the driver.",
    ),
    _never(
        r"No CUDA GPUs are available|Found no NVIDIA driver|Failed to infer device type",
        "the container sees no GPU",
        "See image.gpu_access, and whether `docker run --gpus all IMAGE nvidia-smi` works there.",
    ),
    _never(
        r"exec:? .*\b(ray|vllm): not found|\b(ray|vllm): command not found",
        "the image lacks Ray or vLLM",
        "Use an engine image that has both.",
    ),
    _never(
        "exec format error",
        "the image is made for another architecture than the node's",
        "Use an image for the node's architecture (uname -m).",
    ),
    # --- addresses and interfaces ---
    _never(
        "No available node types can fulfill resource request",
        "vLLM asks Ray for an address that no node registered",
        "VLLM_HOST_IP and Ray's node address differ; run sparkrail deploy again.",
    ),
    _never(
        "Every node should have a unique IP address",
        "two nodes have the same VLLM_HOST_IP",
        "Take VLLM_HOST_IP out of the variables that you give: it follows from fabric_address.",
    ),
    _never(
        # vLLM says it after 10, 30 and 70 seconds; on a busy node, the first ones mean nothing.
        r"Waiting for creating a placement group of specs for ([6-9]\d|\d{3,}) seconds"
        r"|Cannot provide a placement group",
        "Ray does not give vLLM the GPUs that it asks for",
        "Is VLLM_HOST_IP of the head its fabric_address, and does nothing else use this Ray?",
    ),
    _never(
        r"Current node has no \S+ available|is not included in a placement group"
        r"|number of required \S+ exceeds the total number of available",
        "Ray has fewer GPUs than vLLM needs",
        "See gpus of each node in the spec, and what else uses this Ray.",
    ),
    _never(
        "Unable to find address for: ",
        "Gloo was given an interface that the node does not have",
        INTERFACE,
    ),
    _never(
        # 127.0.1.1 is what Debian's /etc/hosts has for the node's own name.
        r"(timed out connecting|Connection refused).*remote=\[127\."
        r"|connect \[127\..*Connection refused",
        "Gloo bound to loopback instead of the fabric interface",
        INTERFACE,
    ),
    _never(
        r"no socket interface found",
        "NCCL was given an interface that the node does not have",
        "Take NCCL_SOCKET_IFNAME out of the spec: it follows from fabric_address.",
    ),
    _never(
        r"NCCL WARN .*(ibv_modify_qp|ibv_reg_mr|ibv_create_qp|Got completion .* with status)",
        "RDMA between the nodes does not work",
        "Leave NCCL_IB_GID_INDEX and NCCL_IB_HCA out of the spec; see `show_gids` on both ends.",
    ),
    _never(
        r"\[Errno 98\].*[Aa]ddress already in use",
        "another process listens on the port",
        "End it, or set another serve.port; sparkrail check names the owner.",
    ),
    # --- Ray ---
    _never(
        "Ray is trying to start at .* but is already running",
        "another Ray head runs on the node",
        "Stop it, or set another ray.port.",
    ),
    _never(
        "Version mismatch: The cluster was started with",
        "Ray or Python of this node differ from the head's",
        "Use the same image on all nodes: run sparkrail deploy again.",
    ),
    _maybe(
        r"Unable to connect to GCS|Failed to connect to GCS",
        "the Ray head cannot be reached",
        "Is the fabric's link up, and does no firewall on the head stop it?",
    ),
    _maybe("The current node timed out during startup", "Ray took too long to start"),
    _maybe(
        r"marked as dead by the GCS|The actor died because its node has died",
        "a node was lost while it started",
        "See whether its link was down or it was out of memory; then run sparkrail deploy again.",
    ),
    _maybe("Some Ray subprocesses exited unexpectedly", "one of Ray's processes ended"),
    # --- ranks ---
    _maybe(
        r"NCCL.*(unhandled system error|remote process exited|ncclSystemError|ncclRemoteError)",
        "NCCL lost another rank",
    ),
    _maybe(
        r"(RayWorkerProc rank=.*|Worker proc .*) died unexpectedly|The worker died unexpectedly"
        r"|The actor died unexpectedly",
        "a rank ended",
    ),
    _maybe(
        r"gloo/transport/tcp/.*(Connection closed by peer|Connection reset by peer"
        r"|timed out|Timed out)",
        "Gloo lost another rank",
    ),
)
ANY = re.compile("|".join(f"(?:{failure.pattern.pattern})" for failure in FAILURES))


@dataclass(frozen=True)
class Hit:
    """A known failure in a log, and the node that said it, if another than the log's."""

    line: str
    failure: Failure
    address: str = ""


def shorten(line: str, longest: int = 400) -> str:
    """A line as an error shows it."""
    return line if len(line) <= longest else f"{line[:longest]} ..."


def find_failure(log: str) -> Hit | None:
    """The first line in a log that is a known failure."""
    rank = ""
    # By line: some are thousands of characters long, and every probe of a start reads them again.
    for line in ANSI.sub("", log).splitlines():
        traced = RANK.search(line)
        rank = traced[1] if traced else rank
        if ANY.search(line):
            failure = next(each for each in FAILURES if each.pattern.search(line))
            speaker = SPEAKER.match(line)
            said = speaker[0] if speaker else ""
            address = ADDRESS.search(said)
            # vLLM lists every model that it knows in one line.
            shown = shorten(line[len(said) :].strip())
            return Hit(shown, failure, address[1] if address else rank)
    return None

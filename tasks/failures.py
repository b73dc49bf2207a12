"""Lines in the engine's and Ray's logs that mean it will never come up, with cause and remedy."""

import re
from dataclasses import dataclass

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Which process said it, as Ray and vLLM put it before a line: "(EngineCore pid=250) ".
SPEAKER = re.compile(r"(\([^()]*\bpid=\d+[^()]*\)\s*)*")


@dataclass(frozen=True)
class Failure:
    """A known failure: what the log says, why, and what to do."""

    pattern: re.Pattern[str]
    cause: str
    remedy: str


def _failure(pattern: str, cause: str, remedy: str) -> Failure:
    return Failure(re.compile(pattern), cause, remedy)


FAILURES = (
    _failure(
        "unrecognized arguments: ",
        "this vLLM does not know one of serve.arguments",
        "Take the argument out, or use an image with a vLLM that knows it.",
    ),
    _failure(
        r"error: argument .*(invalid|expected)",
        "vLLM does not accept the value of one of serve.arguments",
        "Correct the value; the line names the argument.",
    ),
    _failure(
        r"Free memory on device .*less than desired GPU memory utilization",
        "other processes or the page cache hold the GPU's memory",
        "See who holds it (sparkrail check), or lower --gpu-memory-utilization.",
    ),
    _failure(
        r"(CUDA out of memory|torch\.OutOfMemoryError)",
        "the model does not fit into the memory that is left",
        "See who holds GPU memory (sparkrail check); then lower --max-model-len or "
        "--gpu-memory-utilization.",
    ),
    _failure(
        "No available memory for the cache blocks",
        "no memory is left for the KV cache",
        "See who holds GPU memory (sparkrail check), or raise --gpu-memory-utilization.",
    ),
    _failure(
        r"larger than the maximum number of tokens that can be stored in KV cache"
        r"|KV cache.*larger than the available KV cache memory",
        "the context is too long for the memory that is left for the KV cache",
        "Lower --max-model-len to what the line offers.",
    ),
    _failure(
        "No available node types can fulfill resource request",
        "vLLM asks Ray for an address that no node registered",
        "VLLM_HOST_IP and Ray's node address differ; run sparkrail deploy again.",
    ),
    _failure(
        "Unable to find address for: ",
        "Gloo was given an interface that the node does not have",
        "Take GLOO_SOCKET_IFNAME out of the spec: it follows from fabric_address.",
    ),
    _failure(
        # 127.0.1.1 is what Debian's /etc/hosts has for the node's own name.
        r"(timed out connecting|Connection refused).*remote=\[127\."
        r"|connect \[127\..*Connection refused",
        "Gloo bound to loopback instead of the fabric interface",
        "Take GLOO_SOCKET_IFNAME out of the spec: it follows from fabric_address.",
    ),
    _failure(
        r"(set the option|pass the argument) `trust_remote_code=True`",
        "the model brings code of its own",
        "Read that code, then set model.trust_remote_code: true.",
    ),
    _failure(
        "Error while deserializing header",
        "a weights file is truncated or not a safetensors file",
        "Fetch the model anew on the head; sparkrail copies it to the workers.",
    ),
    _failure(
        r"\[Errno 98\].*[Aa]ddress already in use",
        "another process listens on the port",
        "End it, or set another serve.port; sparkrail check names the owner.",
    ),
)


@dataclass(frozen=True)
class Hit:
    """A known failure in a log."""

    line: str
    failure: Failure


def find_failure(log: str) -> Hit | None:
    """The first line in a log that is a known failure."""
    # By line: some are thousands of characters long, and every probe of a start reads them again.
    for line in ANSI.sub("", log).splitlines():
        for failure in FAILURES:
            if failure.pattern.search(line):
                return Hit(SPEAKER.sub("", line, count=1).strip(), failure)
    return None

"""An out-of-tree vLLM platform: CPUs as tensor-parallel ranks of a Ray cluster."""


def register() -> str:
    """Name the platform's class, as vLLM's entry-point group `vllm.platform_plugins` asks."""
    return "lab_platform.platform.LabPlatform"

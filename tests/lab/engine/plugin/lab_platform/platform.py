"""The CPU platform, with what it lacks for Ray: the name of the device to ask Ray for."""

# vLLM and torch are in the engine image only.
# mypy: ignore-errors

import torch
from vllm.platforms.cpu import CpuPlatform

# vLLM's attention for AMX uses the tile registers without asking Linux for them, and dies of an
# illegal instruction where nothing else in the process has asked (seen with small models).
torch.cpu._is_amx_tile_supported = lambda: False


class LabPlatform(CpuPlatform):
    """A CPU that Ray counts as a GPU, as on the nodes that the lab stands for."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "lab_platform.communicator.LabCommunicator"

"""The CPU communicator, for ranks on different nodes."""

# mypy: ignore-errors
# vLLM and torch are in the engine image only.

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class LabCommunicator(CpuCommunicator):
    """Traffic between ranks goes through Gloo, hence through the interface named to it."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        # vLLM compares names only, and they are equal on nodes that share no /dev/shm.
        return False

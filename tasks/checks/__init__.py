"""Every check, in the order in which a table shows them; each is pure, and judges one node."""

from tasks.checks import engine, machine, memory, model, network, paths, variables
from tasks.checks.site import Check

CHECKS: dict[str, Check] = {
    "python3": machine.python,
    "docker": engine.docker,
    "nvidia runtime": engine.nvidia_runtime,
    "fabric address": network.fabric_address,
    "fabric link": network.fabric_link,
    "fabric subnet": network.fabric_subnet,
    "fabric mtu": paths.fabric_mtu,
    "fabric path": paths.fabric_path,
    "head's ssh": paths.head_login,
    "environment": variables.variables,
    "architecture": engine.architecture,
    "image": engine.image,
    "engine": engine.programs,
    "arguments": engine.arguments,
    "weights": model.weights,
    "own code": model.own_code,
    "parallel sizes": model.split,
    "disk": machine.disks,
    "ports": network.ports,
    "container names": engine.container_names,
    "gpus": machine.gpus,
    "driver": machine.driver,
    "gpu memory": machine.gpu_memory,
    "memory": memory.memory,
    "memory fit": memory.memory_fit,
    "shared memory": memory.shared_memory,
    "programs": machine.programs,
    "clock": machine.clock,
}

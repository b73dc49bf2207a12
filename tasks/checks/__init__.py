"""Every check, in the order in which a table shows them; each is pure, and judges one node."""

from tasks.checks import engine, machine, network
from tasks.checks.site import Check

CHECKS: dict[str, Check] = {
    "python3": machine.python,
    "docker": engine.docker,
    "nvidia runtime": engine.nvidia_runtime,
    "fabric address": network.fabric_address,
    "fabric link": network.fabric_link,
    "fabric subnet": network.fabric_subnet,
    "fabric mtu": network.fabric_mtu,
    "architecture": engine.architecture,
    "image": engine.image,
    "weights": machine.weights,
    "disk": machine.disks,
    "ports": network.ports,
    "containers": engine.container_names,
    "gpus": machine.gpus,
    "driver": machine.driver,
    "gpu memory": machine.gpu_memory,
    "memory": machine.memory,
    "programs": machine.programs,
    "clock": machine.clock,
}

"""Checks of memory: what there is, whether the model fits, and what containers share."""

from typing import NamedTuple

from tasks.checks import estimates
from tasks.checks.site import Finding, Site, blocked, gib, ready, slow

MIB = 2**20
GIB = 2**30


def memory(site: Site) -> Finding:
    found = site.here.memory
    return ready(
        f"{gib(found.total)}, {gib(found.available)} available, {gib(found.free)} of it free"
    )


class Pool(NamedTuple):
    """Where the ranks of a node load to; what is available but not free is page cache."""

    total: int
    available: int
    free: int


def memory_fit(site: Site) -> Finding | None:
    """Whether what the ranks load fits into what this node has, once our own release is gone."""
    weights = estimates.weights(site)
    if not weights:
        return None
    if site.cluster.image.gpu_access == "none":
        return _fits_without_gpu(site, weights)
    cache = estimates.kv_cache(site) or 0
    pool = _pool(site)
    share = estimates.utilization(site)
    takes, need = int(share * pool.total), weights + cache
    needs = f"{gib(weights)} of weights" + (f" + {gib(cache)} of KV cache" if cache else "")
    said = f"{needs} in {share:g} of {gib(pool.total)}"
    if need > takes:
        return blocked(
            f"{needs} do not fit into {share:g} of {gib(pool.total)}",
            "Take more nodes, a smaller model or --max-model-len, or a greater "
            "--gpu-memory-utilization.",
        )
    if takes > pool.available:
        short = f"{said}; vLLM takes {gib(takes)} at its start, {gib(pool.available)} are to be had"
        return (slow if _others_will_go(site, pool, takes) else blocked)(
            short, _make_room(site, pool, need)
        )
    if takes > pool.free:
        return slow(
            f"{said}; {gib(takes - pool.free)} of page cache have to go first",
            f"If vLLM finds too little free memory, on {site.node.name}: "
            "sudo sysctl vm.drop_caches=1",
        )
    return ready(said)


def _pool(site: Site) -> Pool:
    gpus, memory = site.here.gpus[: site.node.gpus], site.here.memory
    if gpus and all(gpu.memory_mib for gpu in gpus):
        total = sum(gpu.memory_mib or 0 for gpu in gpus) * MIB
        unused = [gpu.memory_mib if gpu.free_mib is None else gpu.free_mib for gpu in gpus]
        free = sum(each or 0 for each in unused) * MIB
        pool = Pool(total, free, free)
    else:
        pool = Pool(memory.total, memory.available, memory.free)
    if site.runs:
        # What our release holds will be free again; what it holds of the rest nobody can tell.
        best = pool.total - _held_by_others(site)
        return Pool(pool.total, best, best)
    return pool


def _held_by_others(site: Site) -> int:
    held = (each for each in site.here.gpu_holders if not site.is_ours_holder(each))
    return sum(each.used_mib or 0 for each in held) * MIB


def _others_will_go(site: Site, pool: Pool, takes: int) -> bool:
    """Whether the policy of the spec lets us stop others who hold what is lacking."""
    best = pool.available + _held_by_others(site)
    return site.cluster.residue.policy != "report" and best >= takes


def _make_room(site: Site, pool: Pool, need: int) -> str:
    lower = int(100 * pool.available / pool.total) / 100
    others = _held_by_others(site)
    free = f"Free some on {site.node.name}" + (
        f" ({gib(others)} are held by others, see gpu memory)" if others else ""
    )
    if lower * pool.total >= need:
        return f"{free}, or set --gpu-memory-utilization={lower:g}."
    return f"{free}."


def _fits_without_gpu(site: Site, weights: int) -> Finding:
    """For CPUs vLLM takes what it is told for its KV cache, beside the weights."""
    said = site.cluster.environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    cache = int(said) * GIB * site.node.gpus if said.isdigit() else 0
    found = site.here.memory
    room = found.total if site.runs else found.available
    text = f"{gib(weights)} of weights + {gib(cache)} of KV cache in {gib(room)}"
    if weights + cache <= room:
        return ready(text)
    return blocked(text, f"Free some on {site.node.name}, or set a smaller VLLM_CPU_KVCACHE_SPACE.")


def shared_memory(site: Site) -> Finding:
    """Ray refuses an object store that is greater than its container's /dev/shm."""
    size, store = site.cluster.image.shm_mib, site.cluster.ray.object_store_mib or 0
    if store > size:
        return blocked(
            f"ray.object_store_mib is {store}, but containers have {size} MiB of shared memory",
            f"Set image.shm_mib to {store} or more.",
        )
    # Containers have an IPC namespace of their own, which logind does not know.
    removes = ", out of reach of logind's RemoveIPC" if site.here.removes_ipc else ""
    return ready(f"{size} MiB for each container{removes}")

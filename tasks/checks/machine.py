"""Checks of the machine: programs, disks, GPUs, clock."""

from typing import NamedTuple

from tasks.checks.site import Finding, Site, blocked, gib, how_to_end, named, ready, slow
from tasks.docker_facts import CONTAINERD_ROOT
from tasks.manifests import differing
from tasks.node_facts import Disk, Gpu, GpuHolder

RESERVE = 2**30  # Logs and the files of running containers.
CLOCK_DIFFERENCE = 5.0


def python(site: Site) -> Finding:
    return ready(site.here.python)


def programs(site: Site) -> Finding | None:
    """What copying to the workers needs, on both ends."""
    if not site.cluster.workers:
        return None
    needed = ["rsync", "ssh"] if site.cluster.weights.transport == "rsync" else ["ssh"]
    missing = [name for name in needed if not site.here.programs.get(name)]
    if not missing:
        return ready(", ".join(needed))
    packages = " ".join({"ssh": "openssh-client"}.get(name, name) for name in missing)
    return blocked(
        f"not on the PATH of {site.here.user}: {', '.join(missing)}",
        f"On {site.node.name}: sudo apt install {packages}",
    )


class Need(NamedTuple):
    """Bytes that will be written below a path; at least `least` of them."""

    what: str
    path: str
    size: int
    least: int


def disks(site: Site) -> Finding:
    """Everything that will lie on one mount is added up."""
    mounts: dict[int, tuple[Disk, list[Need]]] = {}
    for need in (_image_need(site), _weights_need(site)):
        disk = site.here.disk_of(need.path)
        if disk:
            mounts.setdefault(disk.device, (disk, []))[1].append(need)
    found = [_fits(site, disk, needs) for disk, needs in mounts.values()]
    for verdict in ("blocked", "slow"):
        worse = [finding for finding in found if finding.verdict == verdict]
        if worse:
            return worse[0]
    return ready("; ".join(finding.detail for finding in found))


def _fits(site: Site, disk: Disk, needs: list[Need]) -> Finding:
    size = sum(need.size for need in needs)
    parts = " + ".join(f"{gib(need.size)} for {need.what}" for need in needs if need.size)
    said = f"{gib(disk.free)} free at {disk.nearest}, {parts or 'nothing'} needed"
    remedy = (
        f"Free {gib(size - disk.free)} at {disk.nearest} on {site.node.name} "
        "(docker system df tells what images and containers take)."
    )
    if sum(need.least for need in needs) > disk.free:
        return blocked(said, remedy)
    if size > disk.free:
        return slow(f"{said}, less where layers are shared", remedy)
    return ready(said)


def _image_need(site: Site) -> Need:
    source = site.head.docker.image if site.head and site.head.docker else None
    here = site.here.docker.image if site.here.docker else None
    path = _image_path(site)
    if site.is_head or source is None or (here and here.content == source.content):
        return Need("docker", path, RESERVE, RESERVE)
    # `docker load` keeps what arrives beside what it unpacks.
    size = RESERVE + 2 * source.size
    # Another image of that name may share most of its layers with the new one.
    return Need("docker and the image", path, size, RESERVE if here else size)


def _image_path(site: Site) -> str:
    docker = site.here.docker
    if docker is None:
        return ""
    own = site.here.disk_of(CONTAINERD_ROOT)
    # The other store keeps its images where a containerd of the system's lies, if there is one.
    if docker.store == "containerd" and own and own.nearest == own.path:
        return own.path
    return docker.root


def _weights_need(site: Site) -> Need:
    want, have = site.wanted_weights.files, site.here.weights.files
    lacking = () if site.is_head else differing(site.wanted_weights, site.here.weights)
    replaced = {name: have[name].size for name in lacking if name in have}
    missing = sum(max(0, want[name].size - replaced.get(name, 0)) for name in lacking)
    # A file that is replaced stays until the new one is whole.
    whole = missing + max(replaced.values(), default=0)
    return Need("the weights", site.cluster.model.path, whole, missing)


def gpus(site: Site) -> Finding:
    found, wanted = site.here.gpus, site.node.gpus
    said = ", ".join(map(_gpu, found)) or "none"
    if site.cluster.image.gpu_access == "none":
        return ready(f"{said} (image.gpu_access is none)")
    if len(found) >= wanted:
        return ready(said)
    why = f"; {site.here.gpus_error}" if site.here.gpus_error else ""
    return blocked(
        f"nvidia-smi finds {len(found)} GPUs, the spec says {wanted}{why}",
        f"See `nvidia-smi` on {site.node.name}; or correct gpus of {site.node.name} in the spec.",
    )


def _gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.memory_mib} MiB" if gpu.memory_mib else gpu.name


def driver(site: Site) -> Finding | None:
    here = sorted({gpu.driver for gpu in site.here.gpus})
    there = sorted({gpu.driver for gpu in site.there.gpus})
    if not here or not there:
        return None
    if here != there:
        return slow(
            f"{', '.join(here)}, but {site.reference.name} has {', '.join(there)}",
            "Install the same driver on all nodes.",
        )
    serves = f"{', '.join(here)}, CUDA {site.here.cuda or 'unknown'}"
    image = site.head.docker.image if site.head and site.head.docker else None
    if image and image.cuda and _major(image.cuda) > _major(site.here.cuda) > 0:
        return slow(
            f"{serves}, but {site.cluster.image.name} is made for CUDA {image.cuda}",
            "Install a newer driver on all nodes, or take an image for this one.",
        )
    return ready(serves)


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def gpu_memory(site: Site) -> Finding | None:
    """Who else holds GPU memory: the model then looks as if it did not fit."""
    holders, error = site.here.gpu_holders, site.here.gpu_holders_error
    if error:
        wanted = site.cluster.image.gpu_access == "nvidia"
        return slow(f"cannot tell who holds it: {error}", "See `nvidia-smi`.") if wanted else None
    foreign = [held for held in holders if not site.is_ours_holder(held)]
    if not foreign:
        return ready(f"held by {len(holders)} processes of ours" if holders else "held by nobody")
    return slow(
        "; ".join(_holder(site, held) for held in foreign),
        f"If nobody needs it, on {site.node.name}: "
        + "; ".join(dict.fromkeys(how_to_end(site, held.process) for held in foreign)),
    )


def _holder(site: Site, held: GpuHolder) -> str:
    size = f"{held.used_mib} MiB" if held.used_mib is not None else "an unknown amount"
    who = named(site, held.process) if held.process else f"pid {held.pid}"
    return f"{held.name} holds {size}: {who}"


def clock(site: Site) -> Finding:
    ahead = site.here.clock_offset - site.there.clock_offset
    if abs(ahead) <= CLOCK_DIFFERENCE:
        return ready(f"within {CLOCK_DIFFERENCE:g} s of {site.reference.name}'s")
    way = "ahead of" if ahead > 0 else "behind"
    return slow(
        f"{abs(ahead):.0f} s {way} {site.reference.name}'s",
        f"On {site.node.name}: sudo timedatectl set-ntp true",
    )

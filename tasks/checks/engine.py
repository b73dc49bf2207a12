"""Checks of docker, the engine image and our containers' names."""

from tasks.checks.site import Finding, Site, age, blocked, gib, ready, slow
from tasks.topology import ray_container, serve_container

DOCKER_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}


def docker(site: Site) -> Finding:
    here, name = site.here, site.node.name
    if here.docker:
        found = here.docker
        return ready(f"{found.version}, {found.storage_driver} ({found.store} store)")
    remedies = {
        "absent": f"Install docker on {name}, or start it: sudo systemctl enable --now docker",
        "denied": f"Let {here.user} use it: sudo usermod -aG docker {here.user}",
        "open": f"See `docker info` and `journalctl -u docker` on {name}.",
    }
    return blocked(here.docker_error or "it does not answer", remedies[here.docker_socket])


def nvidia_runtime(site: Site) -> Finding | None:
    found = site.here.docker
    if found is None or site.cluster.image.gpu_access != "nvidia":
        return None
    # Docker takes --gpus by this hook also where no runtime of that name is configured.
    hook = site.here.programs.get("nvidia-container-runtime-hook")
    if "nvidia" in found.runtimes or hook:
        return ready("docker's nvidia runtime" if "nvidia" in found.runtimes else str(hook))
    return blocked(
        "docker has no NVIDIA runtime, so that containers get no GPU",
        "Install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure "
        "--runtime=docker && sudo systemctl restart docker",
    )


def architecture(site: Site) -> Finding:
    here, there = site.here.architecture, site.there.architecture
    if here == there:
        return ready(here)
    return blocked(
        f"{here}, but {site.reference.name} is {there}",
        "One image serves all nodes: take nodes of one architecture.",
    )


def image(site: Site) -> Finding | None:
    """Present where it comes from, and made for this machine."""
    if site.here.docker is None:
        return None
    name, here = site.cluster.image.name, site.here.docker.image
    source = site.head.docker.image if site.head and site.head.docker else None
    from_head = site.cluster.image.source == "head"
    if site.is_head and here is None and from_head:
        return blocked(
            f"{name} is not on {site.node.name}",
            f"On {site.node.name}: docker pull {name}; or set image.source to control.",
        )
    judged = source if from_head else here
    wanted = DOCKER_NAMES.get(site.here.architecture, site.here.architecture)
    if judged and judged.architecture != wanted:
        return blocked(
            f"{name} is made for {judged.architecture}, {site.node.name} is {wanted}",
            f"Take an image that is made for {wanted}.",
        )
    if here is None:
        return ready(f"will be copied from {'the head' if from_head else 'the control machine'}")
    notes = [judged.architecture if judged else here.architecture, gib(here.size)]
    if site.is_head and here.entrypoint:
        notes.append(f"its entrypoint {' '.join(here.entrypoint)} is not used")
    if source and here.content != source.content:
        notes = ["differs from the head's, will be replaced by it"]
    return ready(", ".join(notes))


def programs(site: Site) -> Finding | None:
    """vLLM and Ray are in the image: newer engine images come without Ray."""
    found = site.engine
    if not site.is_head or found is None:
        return None
    name = site.cluster.image.name
    if found.missing:
        return blocked(
            f"{name} has no {' and no '.join(found.missing)}",
            "Take an image with vLLM and Ray for these nodes, or build one.",
        )
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return ready(versions or "vllm, ray") if not found.unparsed else None


def arguments(site: Site) -> Finding | None:
    """What vLLM's own parser says of serve.arguments."""
    found = site.engine
    if not site.is_head or found is None or found.missing:
        return None
    if found.unparsed:
        return slow(
            f"vLLM's parser could not be asked: {found.unparsed}",
            "Compare serve.arguments with `vllm serve --help` of that image.",
        )
    if found.refused:
        return blocked(
            f"vllm serve refuses its arguments: {found.refused}",
            "Correct serve.arguments in the spec; `vllm serve --help` of that image tells which "
            "there are.",
        )
    return ready(f"accepted by vLLM's parser ({found.source})")


def container_names(site: Site) -> Finding | None:
    docker = site.here.docker
    if docker is None:
        return None
    names = (ray_container(site.cluster), serve_container(site.cluster))
    found = [container for container in docker.containers if container.name in names]
    foreign = [container for container in found if not site.is_ours(container)]
    if foreign:
        return blocked(
            "; ".join(
                f"{container.name} ({container.id[:12]}, {container.state}, made "
                f"{age(site.here.time - container.created)} ago) is not ours"
                for container in foreign
            ),
            f"Rename or remove it on {site.node.name}: "
            + "; ".join(f"docker rm -f {container.name}" for container in foreign),
        )
    said = [f"{container.name} {container.state}" for container in found]
    return ready(", ".join(said) or "none yet")

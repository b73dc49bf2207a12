"""How one container spec differs from another, in plain words."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from tasks.records import Release
from tasks.topology import ContainerSpec

WORDS = {
    "image_content": "the image's content",
    "command": "what it runs",
    "folder": "its folder",
    "model": "the model's path",
    "gpu_access": "the access to GPUs",
    "shm_mib": "its shared memory",
    "rdma": "the access to RDMA",
    "weights": "the model's files",
    "shares": "whose processes it shares",
}
SHOWN = ("model", "gpu_access", "shm_mib", "rdma")
FILES = ("the launch script", "the variables", "vLLM's arguments")
# Ours, and derived from others that are told.
NOT_TOLD = "SPARKRAIL_"


def between(have: ContainerSpec, want: ContainerSpec) -> list[str]:
    """What another spec asks for, field by field."""
    said = []
    if have.image != want.image:
        said.append(f"the image: {have.image} -> {want.image}")
    for name, words in WORDS.items():
        old, new = getattr(have, name), getattr(want, name)
        if old != new:
            said.append(f"{words}: {old} -> {new}" if name in SHOWN else words)
    pairs = zip_longest(have.files, want.files)
    said += [words for words, (old, new) in zip(FILES, pairs, strict=False) if old != new]
    return said


def changed_words(have: Sequence[str], want: Sequence[str]) -> str:
    """Such as: without --seed=1, with --seed=2."""
    gone = [word for word in have if word not in want]
    new = [word for word in want if word not in have]
    parts = [f"without {' '.join(gone)}"] * bool(gone) + [f"with {' '.join(new)}"] * bool(new)
    return ", ".join(parts) or "in another order"


def changed_variables(have: Mapping[str, str], want: Mapping[str, str]) -> str:
    """The variables that differ; where none of those that may be shown does, a secret does."""
    names = sorted(name for name in {*have, *want} if have.get(name) != want.get(name))
    told = [_variable(name, have, want) for name in names if not name.startswith(NOT_TOLD)]
    return ", ".join(told) or ("one of sparkrail's own" if names else "a secret one")


def _variable(name: str, have: Mapping[str, str], want: Mapping[str, str]) -> str:
    if name not in want:
        return f"without {name}"
    return f"{name}={want[name]}" + (f" instead of {have[name]}" if name in have else "")


def recorded(
    releases: Sequence[Release], node: str, digest: str
) -> tuple[Release, ContainerSpec] | None:
    """The release that made a container with that label, and its spec."""
    for release in releases:
        for spec in release.containers.get(node, ()):
            if spec.digest == digest:
                return release, spec
    return None


def explained(
    releases: Sequence[Release],
    node: str,
    digest: str,
    want: ContainerSpec,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> str:
    """How a container that bears another digest differs from the wanted one; nothing if unknown."""
    found = recorded(releases, node, digest)
    if found is None:
        return ""
    release, have = found
    said = []
    for words in between(have, want):
        if words == FILES[1] and node in release.nodes:
            words += f" ({changed_variables(release.nodes[node].environment, environment)})"
        if words == FILES[2]:
            words += f" ({changed_words(release.arguments, arguments)})"
        said.append(words)
    return "; ".join(said)

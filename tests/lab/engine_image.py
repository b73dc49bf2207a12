"""The lab's engine image: Debian, vLLM for CPUs, Ray, and the plugin that joins them.

Built without docker and without a registry, in three layers, so that a changed plugin is a new
layer of a few kilobytes.
"""

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.lab import engine_packages
from tests.lab.base import locked, mirror
from tests.lab.command import run, say
from tests.lab.docker_archive import (
    Image,
    Layer,
    Member,
    file_member,
    file_members,
    link_member,
    tree_members,
    write_archive,
    write_layer,
)

TAG = "sparkrail/engine:lab"
# To be raised when the code below makes other layers of the same recipe.
VERSION = 1
SUITE = "bookworm"
# libnuma1 for vLLM's kernels, the wheel of pip to install with, busybox for people and tiny images.
DEBIAN_PACKAGES = ("python3", "python3-pip-whl", "ca-certificates", "libnuma1", "busybox-static")
DROPPED_FROM_BASE = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache", "var/log")
# Folders whose content belongs to a running system.
EMPTY = ("dev", "proc", "sys", "run", "tmp")
APPLETS = ("sh", "cat", "echo", "env", "false", "ls", "sleep", "true")
ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    # There is no compiler in the image: without this the first completion fails.
    "TORCHDYNAMO_DISABLE": "1",
    # vLLM's default for CPUs is a share of all memory, which nodes on one machine do not have.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PLUGIN = Path(__file__).with_name("engine")
BUILD_SECONDS = 1800


def build(cache: Path) -> Path:
    """The archive of the engine image; made on the first call, which takes two to three minutes."""
    with locked(_folder(cache) / "lock"):
        return _archive(cache, "engine", _engine(cache, TAG), keep=1)


def variant(
    cache: Path,
    tag: str,
    *,
    top_files: Mapping[str, bytes] | None = None,
    entrypoint: Sequence[str] | None = None,
    architecture: str | None = None,
    env: Mapping[str, str] | None = None,
    complete: bool = True,
) -> Path:
    """The engine image with another last layer or config.

    Not `complete`: without the layers of the engine image, for a node that has loaded it (and keeps
    images in overlay2; the containerd store refuses an archive without them).
    """
    with locked(_folder(cache) / "lock"):
        image = _engine(cache, tag, top_files or {}, entrypoint, architecture, env or {})
        left_out = () if complete else image.layers[:-1]
        return _archive(cache, "variant", image, left_out, keep=4)


def tiny_image(
    cache: Path,
    tag: str,
    *,
    top_files: Mapping[str, bytes] | None = None,
    entrypoint: Sequence[str] | None = None,
    architecture: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Path:
    """A runnable image of two megabytes: a static busybox, and a layer of `top_files`."""
    with locked(_folder(cache) / "lock"):
        layers = (_busybox_layer(cache), _files_layer(cache, top_files or {}))
        image = Image(
            tag,
            layers,
            architecture or machine_architecture(),
            {"PATH": ENV["PATH"], **(env or {})},
            entrypoint,
        )
        return _archive(cache, "tiny", image, keep=64)


def machine_architecture() -> str:
    """Docker's word for this machine's architecture."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _folder(cache: Path) -> Path:
    return cache / "engine"


def _engine(
    cache: Path,
    tag: str,
    files: Mapping[str, bytes] | None = None,
    entrypoint: Sequence[str] | None = None,
    architecture: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Image:
    base = _base_layer(cache)
    layers = (
        base,
        _packages_layer(cache, base),
        _files_layer(cache, {**plugin_files(), **(files or {})}),
    )
    arch = architecture or machine_architecture()
    return Image(tag, layers, arch, {**ENV, **(env or {})}, entrypoint)


def plugin_files() -> dict[str, bytes]:
    """The image's last layer: what stands in `tests/lab/engine`, at its place in the image."""
    places = {"bin": "usr/local/bin", "plugin": engine_packages.SITE}
    return {
        f"{place}/{path.relative_to(PLUGIN / source)}": path.read_bytes()
        for source, place in places.items()
        for path in sorted((PLUGIN / source).rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def _archive(
    cache: Path, kind: str, image: Image, left_out: Sequence[Layer] = (), *, keep: int
) -> Path:
    recipe = [image.tag, image.config().decode(), [layer.diff_id for layer in left_out]]
    file = _folder(cache) / f"{kind}-{_key(recipe)}.tar"
    if not file.exists():
        partial = file.with_suffix(".partial")
        write_archive(image, partial, left_out)
        partial.rename(file)
    _prune(cache, kind, file, keep)
    return file


def _cached_layer(
    cache: Path, kind: str, recipe: object, members: Callable[[Path], Iterable[Member]]
) -> Layer:
    """The layer of this recipe; `members` makes it, with a folder to work in."""
    prefix = f"{kind}-{_key([VERSION, recipe])}"
    for file in _folder(cache).glob(f"{prefix}.*.layer"):
        return Layer(file, file.suffixes[0].removeprefix("."))
    work, partial = _folder(cache) / "work", _folder(cache) / f"{prefix}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    diff_id = write_layer(members(work), partial)
    file = partial.rename(_folder(cache) / f"{prefix}.{diff_id}.layer")
    shutil.rmtree(work)
    _prune(cache, kind, file, keep=1)
    return Layer(file, diff_id)


def _prune(cache: Path, kind: str, used: Path, keep: int) -> None:
    """Forget all but the last used files of a kind, and what interrupted builds left."""
    used.touch()
    files = sorted(_folder(cache).glob(f"{kind}-*"), key=lambda file: -file.stat().st_mtime)
    for file in files:
        if file.suffix == ".partial" or file in files[keep:]:
            file.unlink()


def _key(recipe: object) -> str:
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def _base_layer(cache: Path) -> Layer:
    recipe = [SUITE, machine_architecture(), DEBIAN_PACKAGES, DROPPED_FROM_BASE, EMPTY]
    return _cached_layer(cache, "base", recipe, _debian)


def _debian(work: Path) -> Iterable[Member]:
    say("installing Debian for the lab's engine image (once, about a minute) ...")
    root = work / "root"
    source = mirror()
    packages = f"--include={','.join(DEBIAN_PACKAGES)}"
    create = ["debootstrap", "--variant=minbase", packages, SUITE, str(root)]
    # In namespaces of its own, what debootstrap mounts cannot outlive it.
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    run([*isolated, *create, *([source] if source else [])], timeout=BUILD_SECONDS)
    for name in (*DROPPED_FROM_BASE, "var/lib/apt/lists"):
        shutil.rmtree(root / name)
        (root / name).mkdir()
    for name in ("etc/hostname", "etc/resolv.conf", "etc/machine-id"):
        # What debootstrap copied from this machine.
        (root / name).unlink(missing_ok=True)
    engine_packages.compile_modules(root, "/usr/lib/python3.11", "/usr/lib/python3")
    (root / "usr/bin/python").symlink_to("python3")
    return tree_members(root, empty=EMPTY)


def _packages_layer(cache: Path, base: Layer) -> Layer:
    recipe = [base.diff_id, engine_packages.recipe()]

    def members(work: Path) -> Iterable[Member]:
        say("installing vllm and ray for the lab's engine image (once, about two minutes) ...")
        root = work / "root"
        root.mkdir()
        run(["tar", "--extract", f"--file={base.path}", f"--directory={root}"], timeout=600)
        engine_packages.install(root, work)
        return tree_members(root, engine_packages.SITE)

    return _cached_layer(cache, "packages", recipe, members)


def _busybox_layer(cache: Path) -> Layer:
    base = _base_layer(cache)

    def members(work: Path) -> Iterable[Member]:
        unpack = ["tar", "--extract", f"--file={base.path}", f"--directory={work}"]
        run([*unpack, "usr/bin/busybox"])
        yield from file_members({})
        yield file_member("bin/busybox", (work / "usr/bin/busybox").read_bytes())
        yield from (link_member(f"bin/{name}", "busybox") for name in APPLETS)

    return _cached_layer(cache, "busybox", [base.diff_id, APPLETS], members)


def _files_layer(cache: Path, files: Mapping[str, bytes]) -> Layer:
    content = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    return _cached_layer(cache, "files", content, lambda _: file_members(files))

"""The head's docker folder with the engine image in it: loaded once, then reproduced by links."""

import fnmatch
import os
import shutil
from pathlib import Path

from tests.lab.command import run

# What an image's layers consist of. The engine never writes into them: containers change copies in
# layers of their own. So these files can be the same ones in every lab; all others are copied.
LAYERS = (
    "overlay2/*/diff",
    "containerd/daemon/io.containerd.snapshotter.v1.overlayfs/snapshots/*/fs",
    "containerd/daemon/io.containerd.content.v1.content/blobs",
)


def template(cache: Path, base: Path, image: Path, *, containerd_store: bool) -> Path:
    """Where the folder for this archive and this engine is kept; both names tell the content."""
    store = "containerd" if containerd_store else "classic"
    return cache / "docker" / f"{image.stem}.{base.name}.{store}"


def keep(data: Path, template: Path) -> None:
    """Keeps a closed docker folder as the template, and drops those of other archives."""
    reproduce(data, template)
    archive = template.name.partition(".")[0]
    for other in template.parent.iterdir():
        if other.is_dir() and other.name.partition(".")[0] != archive:
            shutil.rmtree(other)


def reproduce(source: Path, target: Path) -> None:
    """A docker folder of its own that shares the layers' files with the source."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_dev == partial.parent.stat().st_dev:
        run(["cp", "--archive", "--link", str(source), str(partial)], timeout=600)
        _unshare(partial)
    else:
        run(["cp", "--archive", str(source), str(partial)], timeout=600)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _unshare(folder: Path) -> None:
    """Replaces every link outside the layers by a copy."""
    for path, folders, files in os.walk(folder):
        below = Path(path).relative_to(folder)
        folders[:] = [name for name in folders if not _is_layer(below / name)]
        for name in files:
            file = Path(path, name)
            if file.is_file() and not file.is_symlink():
                aside = file.with_name(f"{name}.lab-copy")
                shutil.copy2(file, aside)
                os.chown(aside, file.stat().st_uid, file.stat().st_gid)
                aside.rename(file)


def _is_layer(path: Path) -> bool:
    depth = len(path.parts)
    return any(
        pattern.count("/") + 1 == depth and fnmatch.fnmatch(str(path), pattern)
        for pattern in LAYERS
    )

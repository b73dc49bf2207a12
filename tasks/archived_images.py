"""Archives that `docker save` wrote, as files on the control machine."""

import json
import tarfile
from pathlib import Path
from typing import IO, Any

from tasks.errors import SparkrailError


def archived_image(path: str, name: str) -> dict[str, Any]:
    """What docker would say about an image that was loaded from this file."""
    found, config = _described(path, name)
    return {
        "Id": found["Config"],
        "Architecture": config["architecture"],
        "Os": config["os"],
        "Config": config.get("config") or {},
        "RootFS": {"Layers": config["rootfs"]["diff_ids"]},
        "Size": Path(path).expanduser().stat().st_size,
    }


def archived_layers(path: str, name: str) -> dict[str, str]:
    """Which layer lies in which member of the file."""
    found, config = _described(path, name)
    return dict(zip(found["Layers"], config["rootfs"]["diff_ids"], strict=True))


def _described(path: str, name: str) -> tuple[Any, Any]:
    """The image's part of the manifest, and its config."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            found = _named(json.loads(_text(tar, "manifest.json")), name, file)
            config = json.loads(_text(tar, found["Config"]))
            if len(found["Layers"]) != len(config["rootfs"]["diff_ids"]):
                raise ValueError("its manifest and its config differ in the number of layers")
            return found, config
    except OSError as error:
        raise SparkrailError(
            f"cannot read the image archive {path} on the control machine: {error.strerror}",
            remedy="Correct image.archive in the spec.",
        ) from error
    except (tarfile.TarError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise SparkrailError(
            f"{path} is no archive of `docker save`",
            details=str(error),
            remedy="A compressed one must be unpacked first (gunzip, unzstd).",
        ) from error


def _named(images: list[Any], name: str, file: Path) -> Any:
    for image in images:
        if name in (image["RepoTags"] or ()):
            return image
    found = sorted(tag for image in images for tag in image["RepoTags"] or ())
    raise SparkrailError(
        f"the image archive {file} holds no image {name}",
        details=f"It holds: {', '.join(found) or 'images without a name'}",
        remedy=f"Make it anew: docker save -o {file} {name}",
    )


def _text(tar: tarfile.TarFile, member: str) -> bytes:
    found: IO[bytes] | None = tar.extractfile(member)
    if found is None:
        raise ValueError(f"{member} is no file")
    return found.read()

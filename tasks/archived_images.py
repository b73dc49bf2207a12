"""Archives that `docker save` wrote, as files on the control machine."""

import json
import tarfile
from pathlib import Path
from typing import IO, Any

from tasks.errors import SparkrailError


def archived_image(path: str, name: str) -> dict[str, Any]:
    """What docker would say about an image that was loaded from this file."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            return described(tar, name, file)
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


def described(tar: tarfile.TarFile, name: str, file: Path) -> dict[str, Any]:
    images = json.loads(_text(tar, "manifest.json"))
    for image in images:
        if name in (image["RepoTags"] or ()):
            break
    else:
        found = sorted(tag for image in images for tag in image["RepoTags"] or ())
        raise SparkrailError(
            f"the image archive {file} holds no image {name}",
            details=f"It holds: {', '.join(found) or 'images without a name'}",
            remedy=f"Make it anew: docker save -o {file} {name}",
        )
    config = json.loads(_text(tar, image["Config"]))
    return {
        "Id": image["Config"],
        "Architecture": config["architecture"],
        "Os": config["os"],
        "Config": config.get("config") or {},
        "RootFS": {"Layers": config["rootfs"]["diff_ids"]},
        "Size": file.stat().st_size,
    }


def _text(tar: tarfile.TarFile, member: str) -> bytes:
    found: IO[bytes] | None = tar.extractfile(member)
    if found is None:
        raise ValueError(f"{member} is no file")
    return found.read()

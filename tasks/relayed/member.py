"""What one member of a Ray cluster runs with; runs inside its container, prints one JSON document.

Reads the environment of the raylet itself, since that is what the ranks on this node inherit.
"""

import glob
import json
import sys
from importlib.metadata import PackageNotFoundError, version


def main() -> None:
    raylets = [found for found in map(raylet, glob.glob("/proc/[0-9]*")) if found is not None]
    document = {
        "python": sys.version.split()[0],
        "ray": installed("ray"),
        "vllm": installed("vllm"),
        "raylets": raylets,
    }
    print(json.dumps(document))


def raylet(folder: str) -> object:
    try:
        with open(f"{folder}/comm") as file:
            if file.read().strip() != "raylet":
                return None
        with open(f"{folder}/environ", "rb") as file:
            pairs = file.read().decode(errors="replace").split("\0")
    except OSError:
        return None
    values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    names = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME")
    return {name: values.get(name, "") for name in names}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()

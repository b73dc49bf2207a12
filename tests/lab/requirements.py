"""What the lab needs from its host, asked before anything is done."""

import os
import shutil
import sys

from tests.lab.errors import LabError

# program: the Debian package that brings it
PROGRAMS = {
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "pivot_root": "util-linux",
    "mount": "mount",
    "ssh-keygen": "openssh-client",
    "mkfs.ext4": "e2fsprogs",
}


def check() -> None:
    if sys.platform != "linux":
        raise LabError("the lab needs Linux: its nodes are made of namespaces")
    if os.geteuid() != 0:
        raise LabError("the lab needs root, for namespaces and mounts")
    missing = {name: package for name, package in PROGRAMS.items() if not shutil.which(name)}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise LabError(
            f"programs missing on this machine: {', '.join(missing)}\n"
            f"install them with: apt-get install {packages}"
        )

"""The node base: a small Debian made by debootstrap once, and kept for all labs."""

import fcntl
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.command import run, say
from tests.lab.errors import LabError, log_tail

PACKAGES = (
    "openssh-server",
    "openssh-client",
    "docker.io",
    "rsync",
    "python3",
    "iproute2",
    "iptables",
    "procps",
    "ca-certificates",
)
# From trixie on the command line of docker is a package of its own.
EXTRA = {"bookworm": (), "trixie": ("docker-cli",)}
SETUP = (
    "useradd --create-home --uid 1000 --shell /bin/bash --groups docker --password '*' op",
    # Keys and identities belong to a node, not to what all nodes share.
    "rm -f /etc/ssh/ssh_host_* /etc/machine-id /etc/hostname",
    "mkdir -p /models /usr/local/sbin",
    "apt-get clean",
    "rm -rf /var/lib/apt/lists/*",
)
BUILD_SECONDS = 1800


def key(suite: str) -> str:
    """Changes with whatever defines the base."""
    recipe = json.dumps([suite, PACKAGES, EXTRA[suite], SETUP])
    return f"{suite}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def ensure(cache: Path, suite: str) -> Path:
    """The folder of the base; made on the first call, which takes about a minute."""
    base = cache / "base" / key(suite)
    with locked(base.with_suffix(".lock")):
        if not base.exists():
            say(f"building the node base {base.name} (once, about a minute) ...")
            _build(base, suite)
    return base


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits until no other process has this lock; the kernel frees it when a holder dies."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that works on {file.stem.strip('.')} ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def mirror() -> str | None:
    """The Debian archive that this machine's apt uses, if it uses one."""
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    for file in files:
        if file.suffix in (".list", ".sources") and file.is_file():
            for uri, suites in _entries(file.read_text()):
                if any(re.fullmatch("bookworm|trixie|(old)?stable", name) for name in suites):
                    return uri
    return None


def _entries(text: str) -> Iterator[tuple[str, list[str]]]:
    """URI and suites of each entry, in apt's one-line style and in its paragraph style."""
    for match in re.finditer(r"^deb\s+(?:\[[^]]*\]\s+)?(https?://\S+)\s+(\S+)", text, re.M):
        yield match[1], [match[2]]
    for paragraph in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", paragraph, re.M))
        for uri in fields.get("URIs", "").split():
            yield uri, fields.get("Suites", "").split()


def _build(base: Path, suite: str) -> None:
    began = time.monotonic()
    partial, log = base.with_suffix(".partial"), base.with_suffix(".log")
    shutil.rmtree(partial, ignore_errors=True)
    packages = ",".join((*PACKAGES, *EXTRA[suite]))
    source = mirror()
    # In namespaces of its own, what debootstrap mounts and starts cannot outlive it.
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    create = ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(partial)]
    try:
        log.write_text(
            run([*isolated, *create, *([source] if source else [])], timeout=BUILD_SECONDS)
        )
        run([*isolated, "chroot", str(partial), "sh", "-ec", "\n".join(SETUP)])
    except LabError as error:
        detail = log_tail(partial / "debootstrap/debootstrap.log")
        raise LabError(f"the node base could not be built: {error}\n{detail}") from None
    partial.rename(base)
    say(f"the node base is built ({time.monotonic() - began:.0f} s)")

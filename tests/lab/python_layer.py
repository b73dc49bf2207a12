"""What makes an image run python3, taken from a node: the program, its libraries and modules."""

import io
import subprocess
import tarfile
from collections.abc import Iterator

from tests.lab import lab
from tests.lab.docker_archive import Member
from tests.lab.layout import Lab

# Files at the ends of links, so that they stand where the loader looks for them.
PACK = """\
modules=$(python3 -c 'import sys; print("/usr/lib/python%d.%d" % sys.version_info[:2])')
libraries=$(ldd /usr/bin/python3 "$modules"/lib-dynload/*.so | grep -o '/[^ :]* (' | sort -u)
tar --create --dereference --exclude=test --exclude=lib2to3 --exclude=config-* \
    /usr/bin/python3 "$modules" $(echo "$libraries" | tr -d '(') 2>/dev/null"""


def python_members(where: Lab, node: str) -> Iterator[Member]:
    """As members of a layer."""
    argv = lab.command_line(where, node, ["sh", "-ec", PACK])
    packed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert packed.returncode == 0, packed.stderr
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        for info in tar:
            content = tar.extractfile(info) if info.isreg() else None
            yield info, content or io.BytesIO()

"""Removes files inside a folder, and the folders below it that are then empty; tells what stays.

Relayed to the node; standard library only. Arguments: the folder, and the files' paths in it as a
JSON list. A file that only a link to another folder brings in is not inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys


def remove(folder: str, path: str) -> None:
    top = os.path.realpath(folder)
    parent = os.path.realpath(os.path.join(folder, os.path.dirname(path)))
    if parent != top and not parent.startswith(top + os.sep):
        raise OSError(0, f"lies in {parent}")
    os.unlink(os.path.join(parent, os.path.basename(path)))
    with contextlib.suppress(OSError):
        while parent != top:
            os.rmdir(parent)
            parent = os.path.dirname(parent)


def main(_program: str, folder: str, paths: str) -> None:
    stay = {}
    for path in json.loads(paths):
        try:
            remove(folder, path)
        except FileNotFoundError:
            pass
        except OSError as error:
            stay[path] = error.strerror
    print(json.dumps({"stay": stay}))


if __name__ == "__main__":
    main(*sys.argv[1:])

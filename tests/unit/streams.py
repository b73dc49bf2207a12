"""The programs that send and receive weights, as real processes on loopback addresses."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.manifests import Manifest, differing
from tasks.programs import program
from tasks.talks import LOADER

TOKEN = "5a" * 32


class Program:
    """One relayed program that talks with us."""

    def __init__(self, name: str, document: dict[str, Any], *prefix: str) -> None:
        text = program(name)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-IS", "-c", LOADER, str(len(text)), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(text + json.dumps(document).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, *kinds: str) -> Any:
        """What it says next of one of these kinds; nothing when it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            for kind in kinds:
                if kind in said:
                    return said[kind]
        return None

    def hang_up(self) -> int:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return self.process.wait(10)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Site:
    """A node: its folder of the model, what it remembers, and its programs."""

    def __init__(self, root: Path, number: int) -> None:
        self.name = f"worker{number}" if number else "head"
        self.address = f"127.0.0.{number + 1}"
        self.home = root / self.name
        self.folder = self.home / "my model's $(id)"
        self.folder.mkdir(parents=True)
        self.state = self.home / "state" / "weights.json"
        self.programs: list[Program] = []
        self.port = 0

    @property
    def program(self) -> Program:
        """The one that was started last."""
        return self.programs[-1]

    def close(self) -> None:
        for each in self.programs:
            each.kill()
            each.hang_up()

    def write(self, name: str, content: bytes) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    def manifest(self, mode: str = "keep") -> Manifest:
        done = subprocess.run(
            [sys.executable, "-", "manifest", str(self.folder), str(self.state), mode],
            input=program("manifest"),
            capture_output=True,
            timeout=60,
            check=True,
        )
        return Manifest.model_validate_json(done.stdout.splitlines()[-1])

    def _document(self, token: str) -> dict[str, Any]:
        return {
            "address": self.address,
            "token": token,
            "folder": str(self.folder),
            "state": str(self.state),
        }

    def send(self, want: Manifest, token: str = TOKEN) -> None:
        document = {**self._document(token), "paths": sorted(want.files)}
        self.programs.append(Program("weights_send", document))
        self.port = self.program.hear("listening")

    def receive(
        self,
        want: Manifest,
        sources: Iterable["Site"],
        *,
        token: str = TOKEN,
        connections: int = 4,
        prefix: tuple[str, ...] = (),
    ) -> None:
        paths = sorted(want.files)
        lacking = differing(want, self.manifest())
        document = {
            **self._document(token),
            "files": [{"path": p, **want.files[p].model_dump()} for p in paths],
            "lacking": [paths.index(path) for path in lacking],
            "sources": [(each.name, each.address, each.port) for each in sources],
            "connections": connections,
        }
        self.programs.append(Program("weights_receive", document, *prefix))

    def listening(self) -> int:
        self.port = self.program.hear("listening")
        return self.port

    def done(self) -> dict[str, Any]:
        """What it says when it has all; a failure fails the test."""
        said = self.program.hear("done", "failed")
        assert said is not None and "fetched" in said, said
        return dict(said)

    def failed(self) -> dict[str, str]:
        said = self.program.hear("done", "failed")
        assert said is not None and "kind" in said, said
        return dict(said)

    def wait_for(self, size: int) -> None:
        """Until so many bytes have come."""
        while (said := self.program.hear("progress", "failed", "done"))["bytes"] < size:
            assert "of" in said, said

    def parts(self) -> list[str]:
        stage = self.folder / ".sparkrail-part"
        return sorted(path.name for path in stage.iterdir()) if stage.exists() else []

    def files(self) -> dict[str, bytes]:
        """All that is published."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and ".sparkrail-part" not in path.parts
        }

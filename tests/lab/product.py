"""The product as a user runs it on a lab, and a look at what that leaves on the nodes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.lab import base as node_base
from tests.lab import cgroups, docker_data, engine_image, lab, node, spec
from tests.lab.layout import REPOSITORY, Lab, Node, Shape, cache_home, nodes

SPARKRAIL = Path(sys.executable).with_name("sparkrail")
STUB_TAG = "sparkrail/engine:stub"
STUB = Path(__file__).with_name("stub_vllm.py")
DONE, FAILED, INVALID, BLOCKED, LOCKED = range(5)

T = TypeVar("T")


def lab_command(where: Lab, *arguments: str) -> str:
    """The lab's own command line; the lab's name follows the action."""
    action, *rest = arguments
    argv = [sys.executable, "-m", "tests.lab", action, f"--name={where.name}", *rest]
    done = subprocess.run(
        argv,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def poll(
    look: Callable[[], T],
    timeout: float = 20,
    every: float = 0.05,
    what: Callable[[], object] | None = None,
) -> T:
    """What `look` sees once that is something; `what` tells what there is instead."""
    deadline = time.monotonic() + timeout
    while not (found := look()):
        if time.monotonic() > deadline:
            instead = what() if what else found
            raise AssertionError(f"still {instead!r} after {timeout:g} s")
        time.sleep(every)
    return found


@dataclass(frozen=True)
class Said:
    """How one command of sparkrail ended."""

    code: int
    document: dict[str, Any]
    stderr: str
    seconds: float

    @property
    def outcome(self) -> str:
        return str(self.document["outcome"])

    @property
    def rows(self) -> list[str]:
        """The rows, such as `worker join on worker1`, in their order."""
        return [f"{row['step']} on {row['node']}" for row in self.document["steps"]]

    def table(self, name: str) -> list[dict[str, str]]:
        """What was found out, under that name."""
        return list(self.document["tables"][name])

    @property
    def error(self) -> str:
        """What the document says went wrong; where there is none, all that was said."""
        return str(self.document["error"]) if self.document else self.stderr

    @property
    def changed(self) -> set[str]:
        """The rows that are not `unchanged`, such as `worker join on worker1`."""
        rows = self.document["steps"]
        return {f"{row['step']} on {row['node']}" for row in rows if row["outcome"] != "unchanged"}

    def detail(self, step: str, node: str = "head") -> str:
        [found] = [
            str(row["detail"])
            for row in self.document["steps"]
            if (row["step"], row["node"]) == (step, node)
        ]
        return found


class Running:
    """A command of sparkrail in progress; its progress lines are in a file."""

    def __init__(self, argv: list[str], environment: Mapping[str, str], folder: Path) -> None:
        own = Path(tempfile.mkdtemp(prefix=f"{argv[1]}-", dir=folder))
        self._stdout, self._stderr = own / "stdout", own / "stderr"
        self._began = time.monotonic()
        # A background process of a script ignores SIGINT, and so would what it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                argv,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait(self, timeout: float = 300) -> Said:
        code = self.process.wait(timeout)
        seconds = time.monotonic() - self._began
        out = self._stdout.read_text()
        return Said(code, json.loads(out) if out else {}, self.stderr, seconds)

    def until(self, look: Callable[[], T], timeout: float = 300) -> T:
        """Wait for something while it runs; that it ends instead is a failure."""

        def alive() -> T:
            ended = self.process.poll() is not None
            found = look()
            assert found or not ended, f"it ended before:\n{self.stderr}{self._stdout.read_text()}"
            return found

        try:
            return poll(alive, timeout, every=0.02, what=lambda: self.stderr)
        except AssertionError:
            self.kill()
            raise

    def until_ended(self, *rows: str) -> None:
        """Wait for the progress lines of these rows, such as `facts on head`."""
        self.until(lambda: all(f"  {row}" in self.stderr for row in rows))

    def kill(self) -> None:
        """As a power cut does it: nothing of ours can run any more."""
        self.process.kill()
        self.process.wait(10)


@dataclass(frozen=True)
class Product:
    """sparkrail with one cluster spec on a lab."""

    lab: Lab
    shape: Shape
    folder: Path
    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.document["name"])

    @property
    def spec(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    @property
    def nodes(self) -> list[str]:
        return [each["name"] for each in (self.document["head"], *self.document["workers"])]

    @property
    def ray(self) -> str:
        return f"sparkrail-{self.name}-ray"

    @property
    def server(self) -> str:
        return f"sparkrail-{self.name}-serve"

    def but(self, folder: Path, change: Callable[[dict[str, Any]], object]) -> "Product":
        """The same with another spec, which `change` makes of a copy of this one."""
        document = json.loads(json.dumps(self.document))
        change(document)
        return Product(self.lab, self.shape, folder, document)

    # --- the command line -------------------------------------------------------------------------

    def write(self) -> None:
        """The spec file as a person edits it."""
        self.spec.write_text(yaml.safe_dump(dict(self.document)))

    def start(
        self,
        verb: str,
        *options: str,
        prefect: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Running:
        """One command, as a user of a shell starts it; without a Prefect API by default."""
        self.write()
        environment = prefect or {
            **{name: text for name, text in os.environ.items() if not name.startswith("PREFECT_")},
            "PREFECT_HOME": str(self.folder / "prefect"),
        }
        argv = [*prefix, str(SPARKRAIL), verb, str(self.spec), "--json", *options]
        return Running(argv, environment, self.folder)

    def run(self, verb: str, *options: str, timeout: float = 900) -> Said:
        return self.start(verb, *options).wait(timeout)

    def deploy(self, *options: str) -> Said:
        """A deploy that must succeed."""
        said = self.run("deploy", *options)
        assert said.code == DONE, said.error
        assert said.document["error"] is None
        return said

    def destroy(self) -> Said:
        said = self.run("destroy")
        assert said.code == DONE, said.error
        return said

    def clear(self) -> None:
        """End all containers that sparkrail started on this lab; a test's way, not a user's."""
        ours = "docker ps --all --quiet --filter label=sparkrail.cluster"
        for name in self.nodes:
            self.on(name, f"{ours} | xargs --no-run-if-empty docker rm --force --volumes")

    # --- the nodes --------------------------------------------------------------------------------

    def on(self, where: str, script: str, stdin: bytes = b"") -> str:
        """A shell script on a node or the control; it must succeed."""
        argv = lab.command_line(self.lab, where, ["bash", "-ec", script])
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def containers(self, where: str, *options: str) -> dict[str, str]:
        """The running containers of a node and their full ids, by name."""
        listed = self.on(
            where, f"docker ps --no-trunc --format '{{{{.Names}}}} {{{{.ID}}}}' {' '.join(options)}"
        )
        return dict(line.split() for line in listed.splitlines())

    def pids(self, where: str) -> set[int]:
        """The processes of a node, as this machine knows them."""
        return cgroups.pids(node.group(self.lab, lab.node_named(self.lab, where)))

    def named(self, where: str, command: str) -> list[int]:
        """The processes of that command name on a node, as this machine knows them."""
        return [pid for pid in self.pids(where) if _read(pid, "comm").strip() == command]

    def send_signal(self, where: str, command: str, number: int = signal.SIGKILL) -> None:
        """To the one process of that command name on a node."""
        [pid] = self.named(where, command)
        os.kill(pid, number)

    def runs(self, where: str, words: str) -> bool:
        """Whether a command line on a node begins with these words."""
        lines = (_read(pid, "cmdline").replace("\0", " ") for pid in self.pids(where))
        return any(f"{line} ".startswith(f"{words} ") for line in lines)

    def of_runs(self) -> dict[int, str]:
        """What runs on the nodes for a run of sparkrail: pid and command line."""
        found = {}
        for name in self.nodes:
            for pid in self.pids(name):
                variables = _read(pid, "environ").split("\0")
                if any(text.startswith(f"SPARKRAIL_RUN={self.name}/") for text in variables):
                    found[pid] = f"{name}: {_read(pid, 'cmdline')}".replace("\0", " ")
        return found

    def lock_owner(self) -> dict[str, Any] | None:
        """Who stands in the lock on the head."""
        folder = f"$HOME/.sparkrail/{self.name}/lock"
        text = self.on("head", f"cat {folder}/owner.json 2>/dev/null || true")
        return dict(json.loads(text)) if text else None

    def answer(self, prompt: str = "The quick brown fox", tokens: int = 8) -> str:
        """The greedy completion of the endpoint, asked on the head as a client would."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        port = self.document["serve"]["port"]
        said = json.loads(
            self.on(
                "head",
                f"python3 - http://127.0.0.1:{port}/v1/completions '{json.dumps(body)}' <<'END'\n"
                "import sys, urllib.request\n"
                "kind = {'Content-Type': 'application/json'}\n"
                "asked = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), kind)\n"
                "print(urllib.request.urlopen(asked, timeout=60).read().decode())\n"
                "END",
            )
        )
        return str(said["choices"][0]["text"])


def product(where: Lab, shape: Shape, folder: Path) -> Product:
    """sparkrail with the spec that the lab itself wrote."""
    return Product(where, shape, folder, spec.document(where, shape))


def preload(where: Lab, shape: Shape) -> None:
    """Give the nodes that never had a container the head's engine image, in seconds."""
    base = node_base.ensure(cache_home(), shape.base)
    archive = engine_image.build(cache_home())
    template = docker_data.template(
        cache_home(), base, archive, containerd_store=shape.containerd_store
    )
    for worker in nodes(shape)[1:]:
        if not _has_engine(where, worker):
            lab_command(where, "break", worker.name, "kill")
            docker_data.reproduce(template, where.places(worker).docker)
            lab_command(where, "break", worker.name, "boot")


def _has_engine(where: Lab, worker: Node) -> bool:
    listed = node.execute(where, worker, "docker", "image", "ls", "--quiet", engine_image.TAG)
    return bool(listed.strip())


def load_stub(product: Product) -> None:
    """The image of the fast engine, on every node: all of the engine image but `vllm`."""
    archive = engine_image.variant(
        cache_home(),
        STUB_TAG,
        top_files={"usr/local/bin/vllm": STUB.read_bytes()},
        complete=False,
    )
    for name in product.nodes:
        product.on(name, "docker load", stdin=archive.read_bytes())


def use_stub(document: dict[str, Any]) -> None:
    """Make a lab's spec one for the fast engine."""
    document["name"] = "stub"
    document["image"]["name"] = STUB_TAG
    document["serve"]["arguments"] = []
    document["canary"] = {"again_seconds": 0}
    # Its two imports of torch take longer than all other steps together.
    document["proof"] = {"enabled": False}


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""

"""The launch script, run for real by every shell here, with stubs in place of Ray and vLLM.

The stubs write down their arguments and variables.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from blocks import Cluster, Node
from tasks.topology import LAUNCH, STAY, Fabric, Secrets, files
from tests.unit.specs import spec

SHELLS = [
    pytest.param(list(words), id=" ".join(words))
    for words in (("sh",), ("dash",), ("bash", "--posix"), ("busybox", "sh"))
    if shutil.which(words[0])
]
STUB = """\
#!/bin/sh
{ echo "${0##*/}"; for word in "$@"; do echo "$word"; done; } >"$SAID/words"
env >"$SAID/env"
"""
NASTY = {
    "QUOTES": 'it\'s "quoted" `id` $HOME $(id)',
    "BLANKS": "two  blanks",
    "CHARACTERS": "a;b|c&d>e<f*?[x]~#! \\ größe",
}
FABRICS = {"head": Fabric(interface="eth1"), "worker1": Fabric(interface="eno1")}
SECRETS = Secrets(api_key="sk 'key'", environment={"HF_TOKEN": "hf"})
BASE = ["--block", "--disable-usage-stats", "--num-gpus=1"]


class Place:
    """A node's run folder, and the stub programs on a PATH."""

    def __init__(self, root: Path, cluster: Cluster, node: Node) -> None:
        self.run_folder, self._bin, self.said = root / "run", root / "bin", root / "said"
        for folder in (self.run_folder, self._bin, self.said):
            folder.mkdir(parents=True)
        for name, content, mode in files(cluster, node, FABRICS[node.name], SECRETS).items():
            (self.run_folder / name).write_bytes(content)
            (self.run_folder / name).chmod(mode)
        for name in ("ray", "vllm"):
            (self._bin / name).write_text(STUB)
            (self._bin / name).chmod(0o755)

    def launch(
        self, shell: list[str], *words: str, script: str | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = script or str(self.run_folder / "launch")
        env = {"PATH": f"{self._bin}:{os.environ['PATH']}", "SAID": str(self.said)}
        env |= {"VLLM_CONFIG_ROOT": str(self.said / "config root"), "HOME": "/root"}
        return subprocess.run(
            [*shell, path, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=20
        )

    @property
    def words(self) -> list[str]:
        return (self.said / "words").read_text().splitlines()

    @property
    def env(self) -> dict[str, str]:
        lines = (self.said / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def place(tmp_path: Path, name: str, cluster: Cluster | None = None) -> Place:
    cluster = cluster or spec(environment=NASTY)
    node = next(node for node in cluster.nodes if node.name == name)
    return Place(tmp_path, cluster, node)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_can_read_it(shell: list[str], tmp_path: Path) -> None:
    script = tmp_path / "launch"
    script.write_bytes(LAUNCH)
    checked = subprocess.run([*shell, "-n", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("node", "role", "words"),
    [
        pytest.param(
            "head",
            "head",
            ["--head", "--port=6379", "--include-dashboard=false"],
            id="head",
        ),
        pytest.param("worker1", "worker", ["--address=10.77.0.1:6379"], id="worker"),
    ],
)
def test_ray_is_started_in_the_foreground(
    shell: list[str], node: str, role: str, words: list[str], tmp_path: Path
) -> None:
    here = place(tmp_path, node)
    ended = here.launch(shell, role)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    address = "10.77.0.1" if node == "head" else "10.77.0.2"
    assert here.words == ["ray", "start", *words, *BASE, f"--node-ip-address={address}"]
    assert here.env["VLLM_HOST_IP"] == address
    assert here.env["GLOO_SOCKET_IFNAME"] == FABRICS[node].interface
    assert {name: here.env[name] for name in NASTY} == NASTY


def test_the_size_of_the_object_store_is_passed_on(tmp_path: Path) -> None:
    here = place(tmp_path, "worker1", spec(ray={"object_store_mib": 80}))
    assert here.launch(["sh"], "worker").returncode == 0
    assert here.words[-1] == "--object-store-memory=83886080"


@pytest.mark.parametrize("shell", SHELLS)
def test_vllm_is_started_with_every_word_as_it_is(shell: list[str], tmp_path: Path) -> None:
    odd = ["--override={\"a\": 'b c'}", "--stop=$HOME `id`", "-O", "3"]
    here = place(tmp_path, "head", spec(serve={"arguments": odd}, model={"path": "/models/a b"}))
    ended = here.launch(shell, "serve")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert here.words == [
        "vllm",
        "serve",
        "/models/a b",
        "--served-model-name=tiny",
        "--host=0.0.0.0",
        "--port=8000",
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=1",
        "--distributed-executor-backend=ray",
        *odd,
    ]
    assert here.env["RAY_ADDRESS"] == "10.77.0.1:6379"
    assert here.env["VLLM_API_KEY"] == "sk 'key'"


def test_vllm_leaves_the_head_s_interfaces_at_home(tmp_path: Path) -> None:
    here = place(tmp_path, "head")
    assert here.launch(["sh"], "serve").returncode == 0
    written = here.said / "config root" / "ray_non_carry_over_env_vars.json"
    assert json.loads(written.read_text()) == list(STAY)


@pytest.mark.parametrize("shell", SHELLS)
def test_env_prints_everything_but_secrets(shell: list[str], tmp_path: Path) -> None:
    here = place(tmp_path, "worker1")
    ended = here.launch(shell, "env")
    assert (ended.returncode, ended.stderr) == (0, "")
    printed = dict(line.split("=", 1) for line in ended.stdout.splitlines())
    assert {name: printed[name] for name in NASTY} == NASTY
    assert printed["VLLM_HOST_IP"] == "10.77.0.2"
    assert "HF_TOKEN" not in printed


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("script", ["launch", "./launch", "run/launch"])
def test_a_person_can_run_it_from_anywhere(shell: list[str], script: str, tmp_path: Path) -> None:
    here = place(tmp_path, "worker1")
    cwd = tmp_path if "run/" in script else here.run_folder
    ended = here.launch(shell, "env", script=script, cwd=cwd)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("SPARKRAIL_HEAD=10.77.0.1\n")


@pytest.mark.parametrize("words", [(), ("help",), ("worker1",)])
def test_another_role_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = place(tmp_path, "head").launch(["sh"], *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "usage: launch head|worker|serve|env\n"
    assert not (tmp_path / "said" / "words").exists()


def test_a_worker_cannot_serve(tmp_path: Path) -> None:
    """It has no arguments for vLLM."""
    here = place(tmp_path, "worker1")
    ended = here.launch(["sh"], "serve")
    assert ended.returncode != 0
    assert "serve.args" in ended.stderr
    assert not (here.said / "words").exists()


def test_its_own_name_may_need_quotes(tmp_path: Path) -> None:
    here = place(tmp_path / "it's a folder", "worker1")
    command = f"{shlex.quote(str(here.run_folder / 'launch'))} env"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")

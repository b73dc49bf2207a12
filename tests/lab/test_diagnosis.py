"""What runs, what it says, and what goes into a bug report: read-only, whatever state it is in."""

import base64
import contextlib
import json
import os
import secrets
import signal
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.secrets import EngineSecrets
from tests.lab.prefect_processes import Processes
from tests.lab.product import DONE, SPARKRAIL, STUB_TAG, Product, lab_command, poll

pytestmark = [pytest.mark.lab, pytest.mark.extended]
BLOCK = "planted"
# Ray's own way of running something on the worker: what it prints stands where ranks' words do.
SPEAK = """
import ray
ray.init(address="10.77.0.1:6379", log_to_driver=False)
@ray.remote(resources={"node:10.77.0.2": 0.001}, num_cpus=0)
def speak():
    print("a rank on the worker speaks", flush=True)
ray.get(speak.remote())
"""
SPOKEN = " | a rank on the worker speaks"


@pytest.fixture(scope="module")
def cluster(stub: Product) -> Product:
    stub.deploy()
    return stub


def environment(cluster: Product) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith("PREFECT_")}
    return {**own, "PREFECT_HOME": str(cluster.folder / "prefect")}


def sparkrail(
    cluster: Product, verb: str, *options: str, prefect: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command whose output is for people; without a Prefect API by default."""
    argv = [str(SPARKRAIL), verb, str(cluster.spec), *options]
    return subprocess.run(
        argv,
        cwd=cluster.folder,
        env=prefect or environment(cluster),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def states(cluster: Product, code: int = 0) -> dict[tuple[str, str], tuple[str, str]]:
    """The table of `status`: (state, what runs) by node and thing."""
    said = cluster.run("status")
    assert said.code == code, said.error
    rows = said.document["running"]
    return {(row["node"], row["what"]): (row["state"], row["runs"]) for row in rows}


def as_asked(cluster: Product) -> bool:
    return {state for state, _ in states(cluster).values()} == {"as asked"}


def test_healthy(cluster: Product) -> None:
    found = states(cluster)
    assert list(found) == [
        ("head", "Ray"),
        ("head", "server"),
        ("worker1", "Ray"),
        ("head", "endpoint"),
    ]
    assert {state for state, _ in found.values()} == {"as asked"}, found
    assert found["head", "endpoint"][1].startswith("answers ' of the stub' in ")
    shown = sparkrail(cluster, "status").stdout.splitlines()
    assert shown[0].split() == ["node", "what", "state", "asked", "runs"]
    assert [line.split()[:2] for line in shown[1:5]] == [list(key) for key in found]


# --- logs -----------------------------------------------------------------------------------------


def speak(cluster: Product) -> None:
    cluster.on("head", f"docker exec -i {cluster.ray} python3 -", SPEAK.encode())


def test_logs(cluster: Product) -> None:
    speak(cluster)
    said = sparkrail(cluster, "logs")
    assert (said.returncode, said.stderr) == (0, "")
    lines = said.stdout.splitlines()
    assert any(line.startswith("head serve | INFO serving tiny on port ") for line in lines)
    for node in cluster.nodes:
        ray = [line for line in lines if line.startswith(f"{node} ray | ")]
        assert any("Ray runtime started." in line for line in ray)
    spoken = [line for line in lines if line.endswith(SPOKEN)]
    assert len(spoken) == 1
    assert spoken[0].startswith("worker1 rank ")

    one = sparkrail(cluster, "logs", "--node", "worker1", "--lines", "1")
    assert one.returncode == 0
    assert [line for line in one.stdout.splitlines() if line.startswith("ray | ")][1:] == []
    assert "worker1" not in one.stdout.partition(" | ")[0]
    other = sparkrail(cluster, "logs", "--node", "worker9")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == "stub has no node worker9; it has head, worker1\n"


def readers(cluster: Product) -> list[str]:
    """What reads logs on the nodes."""
    found = []
    for name in cluster.nodes:
        for pid in cluster.pids(name):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "docker logs" in words or "docker exec" in words or "session_latest" in words:
                    found.append(f"{name}: {words}")
    return found


@contextlib.contextmanager
def followed(cluster: Product, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`logs --follow` as a person runs it, and the file of what it shows."""
    shown = folder / "shown"
    argv = [str(SPARKRAIL), "logs", str(cluster.spec), "--follow"]
    with shown.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=folder, env=environment(cluster), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process, shown
    finally:
        process.kill()
        process.wait(10)


def completions(shown: Path) -> int:
    return shown.read_text().count('"POST /v1/completions HTTP/')


def test_follow_until_ctrl_c(cluster: Product, tmp_path: Path) -> None:
    with followed(cluster, tmp_path) as (process, shown):
        poll(lambda: "head serve | INFO serving" in shown.read_text(), 60, what=shown.read_text)
        poll(lambda: "worker1 ray | " in shown.read_text(), what=shown.read_text)
        assert any("docker logs" in line for line in readers(cluster))
        before = completions(shown)
        assert states(cluster)["head", "endpoint"][0] == "as asked"
        # While we still follow: nothing is held back until the end.
        poll(lambda: completions(shown) > before, what=shown.read_text)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    poll(lambda: not readers(cluster), what=lambda: readers(cluster))
    assert as_asked(cluster)


def test_follow_goes_on_with_the_next_container(cluster: Product, tmp_path: Path) -> None:
    """Over a redeploy, say: what is gone is told, and what comes is shown from its beginning."""
    with followed(cluster, tmp_path) as (process, shown):
        poll(lambda: "head serve | INFO serving" in shown.read_text(), 60, what=shown.read_text)
        cluster.on("head", f"docker rm -f {cluster.server}")
        gone = f"head serve | [there is no container {cluster.server}: not deployed, or removed]"
        poll(lambda: gone in shown.read_text(), what=shown.read_text)
        absent = sparkrail(cluster, "logs", "--node", "head")
        assert absent.returncode == 0
        assert gone.removeprefix("head ") in absent.stdout.splitlines()
        assert states(cluster)["head", "server"][0] == "not there"
        cluster.deploy()
        after = f"{gone}\n"
        poll(
            lambda: "head serve | INFO serving" in shown.read_text().partition(after)[2],
            what=shown.read_text,
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    poll(lambda: not readers(cluster), what=lambda: readers(cluster))


# --- status of what is not as asked ---------------------------------------------------------------


def test_an_older_image(cluster: Product) -> None:
    old = cluster.on("head", f"docker image inspect --format '{{{{.Id}}}}' {STUB_TAG}")
    build = f"docker build -q -t {STUB_TAG} -"
    new = cluster.on("head", build, f"FROM {STUB_TAG}\nLABEL made=anew\n".encode())
    try:
        found = states(cluster)
        for key in (("head", "Ray"), ("head", "server"), ("worker1", "Ray")):
            assert found[key][0] == "older image"
            assert found[key][1].startswith(f"runs an older image: {STUB_TAG} (")
        assert found["head", "endpoint"][0] == "as asked"
    finally:
        cluster.on("head", f"docker tag {old} {STUB_TAG} && docker image rm {new}")
    assert as_asked(cluster)


def test_a_lost_rank(cluster: Product) -> None:
    """Its raylet hangs, which Ray finds out; its container lives on."""
    speak(cluster)
    cluster.send_signal("worker1", "raylet", signal.SIGSTOP)
    try:
        found = poll(lambda: lost(cluster), 120, every=2)
        assert found is not None
        state, runs = found
        assert state == "rank lost"
        assert "its rank is lost: 10.77.0.2 is not alive in Ray" in runs
        assert cluster.ray in cluster.containers("worker1")
    finally:
        cluster.send_signal("worker1", "raylet", signal.SIGKILL)
    # Ray ends with its raylet, and docker tells why.
    poll(lambda: states(cluster)["worker1", "Ray"][0] == "ended", 60, every=1)
    said = sparkrail(cluster, "logs", "--node", "worker1")
    assert said.returncode == 0
    assert SPOKEN in said.stdout
    assert "has ended: it is exited]" in said.stdout
    cluster.deploy()
    assert as_asked(cluster)


def lost(cluster: Product) -> tuple[str, str] | None:
    found = states(cluster)["worker1", "Ray"]
    return found if found[0] != "as asked" else None


def test_a_rebooted_node(cluster: Product, tmp_path: Path) -> None:
    lab_command(cluster.lab, "break", "worker1", "kill")
    found = states(cluster, code=1)
    assert found["worker1", "Ray"][0] == "unreachable"
    assert "no SSH connection to " in found["worker1", "Ray"][1]
    assert found["head", "Ray"][0] == "as asked"
    away = sparkrail(cluster, "logs")
    assert away.returncode == 1
    assert "worker1: no SSH connection" in away.stderr
    assert "head serve | INFO serving" in away.stdout
    content = bundled(cluster, tmp_path / "away.tar.gz")
    assert b"no SSH connection" in content["nodes/worker1/not-read.txt"]
    assert "nodes/head/serve.log" in content

    lab_command(cluster.lab, "break", "worker1", "boot")
    found = states(cluster)
    assert found["worker1", "Ray"][0] == "rebooted since"
    assert found["worker1", "Ray"][1].startswith("the node was rebooted since this was deployed; ")
    assert found["head", "Ray"][0] == "as asked"
    cluster.deploy()
    assert as_asked(cluster)


# --- bundle ---------------------------------------------------------------------------------------


def bundled(
    cluster: Product, file: Path, prefect: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """The archive's files by their name."""
    said = sparkrail(cluster, "bundle", "-o", str(file), "--json", prefect=prefect)
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    assert document["file"] == str(file)
    assert file.stat().st_mode & 0o777 == 0o600
    found = {}
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            found[member.name.partition("/")[2]] = content.read()
    return found


def forms(value: str) -> list[bytes]:
    """A secret as it is, as JSON and Python write it, and the longest part that none must quote."""
    quoted = json.dumps(value)[1:-1], repr(value)[1:-1], base64.b64encode(value.encode()).decode()
    plain = max(value.replace("'", " ").replace("\\", " ").split(), key=len)
    return [text.encode() for text in (value, *quoted, plain)]


def assert_clean(content: dict[str, bytes], planted: dict[str, str]) -> None:
    shown = {
        (name, file)
        for name, value in planted.items()
        for file, data in content.items()
        for form in forms(value)
        if form in data
    }
    assert shown == set()


@pytest.fixture(scope="module")
def planted() -> dict[str, str]:
    """Secrets as people have them; one needs quotes in every language."""
    return {"API key": secrets.token_hex(12), "variable": f"a'b\"c\\{secrets.token_hex(6)} d$e"}


@pytest.fixture
def secretive(
    cluster: Product,
    planted: dict[str, str],
    prefect: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Product:
    """The fast engine, which is given secrets and tells all that it was given."""

    def change(document: dict[str, Any]) -> None:
        document["secrets"] = BLOCK
        document["environment"]["STUB_TELL"] = "1"

    made = cluster.but(tmp_path_factory.mktemp("secretive"), change)
    with temporary_settings({PREFECT_API_URL: f"{prefect.ui}/api"}):
        EngineSecrets(
            api_key=planted["API key"], environment={"SITE_WORD": planted["variable"]}
        ).save(BLOCK, overwrite=True)
    said = made.start("deploy", prefect=prefect.environment).wait()
    assert said.code == DONE, said.error
    return made


def test_a_bundle_has_all_but_secrets(
    secretive: Product, planted: dict[str, str], prefect: Processes, tmp_path: Path
) -> None:
    cluster = secretive
    assert planted["API key"] in cluster.on("head", f"docker logs {cluster.server} 2>&1")
    before = {name: cluster.on(name, "find ~/.sparkrail -type f | sort") for name in cluster.nodes}
    content = bundled(cluster, tmp_path / "all.tar.gz", prefect.environment)
    assert_clean(content, planted)
    # Neither does it show where the block is not read at all.
    said = sparkrail(cluster, "logs").stdout
    assert "'SITE_WORD': " in said
    assert_clean({"logs": said.encode()}, planted)
    assert b"'SITE_WORD': " in content["nodes/head/serve.log"]
    assert b"export SITE_WORD=***\n" in content["nodes/head/run/node.env"]
    assert b"export VLLM_API_KEY=***\n" in content["nodes/head/run/node.env"]
    assert b"export VLLM_HOST_IP=10.77.0.2\n" in content["nodes/worker1/run/node.env"]
    for node in cluster.nodes:
        assert json.loads(content[f"nodes/{node}/facts.json"])["boot_id"]
        inspected = json.loads(content[f"nodes/{node}/containers.json"])
        assert f"/{cluster.ray}" in {each["Name"] for each in inspected}
        assert b"Ray runtime started." in content[f"nodes/{node}/ray.log"]
        assert content[f"nodes/{node}/run/launch"].startswith(b"#!/bin/sh")
        assert f"nodes/{node}/not-read.txt" not in content
    status = json.loads(content["status.json"])
    assert {row["state"] for row in status["running"]} == {"as asked"}
    assert json.loads(content["nodes/head/releases.json"])[0]["image"] == STUB_TAG
    assert {"sparkrail", "prefect", "python"} <= set(json.loads(content["versions.json"]))
    assert b"secrets: planted" in content["spec.yaml"]
    assert content["report.md"].startswith(b"stub: completed, changed\n")
    assert before == {
        name: cluster.on(name, "find ~/.sparkrail -type f | sort") for name in cluster.nodes
    }

"""A deploy that fails goes back to the last good release, and is not tried again by itself."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.steps import UNATTENDED
from tests.lab import engine_image
from tests.lab.flow_runs import FlowRuns
from tests.lab.holds import FREE, OCCUPY
from tests.lab.layout import cache_home
from tests.lab.nights import ENDS_AT_ONCE
from tests.lab.prefect_processes import Processes
from tests.lab.product import DONE, FAILED, STUB, STUB_TAG, Product, Said, poll

pytestmark = [pytest.mark.lab, pytest.mark.long]

TOO_LONG = "--max-model-len=999999"


@pytest.fixture
def fresh(stub: Product) -> Iterator[Product]:
    """Nothing of ours is on the nodes."""
    stub.destroy()
    yield stub
    stub.destroy()


@pytest.fixture
def good(fresh: Product) -> Product:
    """A release runs and answers."""
    fresh.deploy()
    return fresh


def with_arguments(product: Product, *arguments: str) -> Product:
    return product.but(product.folder, lambda spec: spec["serve"].update(arguments=[*arguments]))


def all_containers(product: Product) -> dict[str, set[str]]:
    return {name: set(product.containers(name, "--all")) for name in product.nodes}


def as_deployed(product: Product) -> dict[str, set[str]]:
    return {"head": {product.ray, product.server}, "worker1": {product.ray}}


def files(product: Product, node: str) -> str:
    """What the containers of a node read."""
    return product.on(node, f"cd /root/.sparkrail/{product.name}/run && sha256sum * && stat -c%a *")


def rolled_back(said: Said, product: Product, step: str) -> None:
    """The old release answers, the report tells the cause, and what was done."""
    assert (said.code, said.document["state"], said.outcome) == (FAILED, "failed", "rolled-back")
    assert said.error.startswith(f"{step}: ")
    assert "Rolled back: release " in said.error
    assert product.answer() == " of the stub"
    assert all_containers(product) == as_deployed(product)
    assert product.lock_owner() is None
    assert said.document["outage_seconds"] > 0


def set_image(product: Product, vllm: bytes) -> None:
    """Put another engine under the image's name on the head."""
    archive = engine_image.variant(
        cache_home(), STUB_TAG, top_files={"usr/local/bin/vllm": vllm}, complete=False
    )
    product.on("head", "docker load", stdin=archive.read_bytes())


def a_bad_argument(good: Product) -> Product:
    return with_arguments(good, TOO_LONG)


def a_worker_that_cannot_start(good: Product) -> Product:
    def change(spec: dict[str, Any]) -> None:
        spec["workers"][0]["environment"] = {"PATH": "/nonexistent"}

    return good.but(good.folder, change)


@pytest.mark.parametrize(
    ("make", "step", "cause"),
    [
        pytest.param(
            a_bad_argument, "vLLM serve on head", "max_model_len (999999)", id="a bad argument"
        ),
        pytest.param(
            a_worker_that_cannot_start,
            "worker join on worker1",
            "ray: not found",
            id="a worker that does not join",
        ),
    ],
)
def test_back_to_the_last_good_release(
    good: Product, make: Callable[[Product], Product], step: str, cause: str
) -> None:
    before = {name: files(good, name) for name in good.nodes}
    bad = make(good)
    said = bad.run("deploy")
    rolled_back(said, good, step)
    assert cause in said.error
    assert {name: files(good, name) for name in good.nodes} == before
    log = good.on("head", f"cd /root/.sparkrail/{good.name}/failed && stat -c '%a %n' *")
    assert f"600 {good.ray}.log" in log.splitlines()

    # A person's deploy tries it once more; then no run does, and what serves is not touched.
    rolled_back(bad.run("deploy"), good, step)
    containers = [good.containers(name) for name in good.nodes]
    again = bad.run("deploy")
    assert (again.code, again.outcome) == (FAILED, "unchanged")
    assert "is not tried again: it failed 2 times; it was rolled back at " in again.error
    assert cause in again.error
    assert "--force" in again.error
    assert [good.containers(name) for name in good.nodes] == containers

    # It is healed when it dies, although the spec asks for the one that is not tried again.
    good.send_signal("head", "vllm", signal.SIGKILL)
    poll(lambda: good.server not in good.containers("head"))
    healed = bad.run("deploy")
    assert (healed.code, healed.outcome) == (FAILED, "rolled-back")
    assert "is not tried again" in healed.error
    assert "had stopped, and was started again." in healed.error
    assert good.answer() == " of the stub"

    # The spec as it was: nothing to do, and the failed one may be tried again.
    containers = [good.containers(name) for name in good.nodes]
    assert good.deploy().changed == {"breaker on head"}
    assert [good.containers(name) for name in good.nodes] == containers
    rolled_back(bad.run("deploy", "--force"), good, step)
    other = with_arguments(good, "--max-model-len=2048")
    assert other.deploy().outcome == "changed"
    assert [row["arguments"].split()[-1] for row in other.run("releases").table("releases")] == [
        "--max-model-len=2048",
        "--distributed-executor-backend=ray",
    ]


def images(product: Product, node: str) -> list[str]:
    listed = product.on(node, "docker image ls --format '{{.Repository}}:{{.Tag}}'").split()
    return sorted(set(listed) - {"sparkrail/engine:lab"})


def test_a_bad_image(good: Product) -> None:
    """The old image has lost its name on every node, and serves on."""
    try:
        set_image(good, ENDS_AT_ONCE)
        said = good.run("deploy")
        rolled_back(said, good, "vLLM serve on head")
        assert "this image is no good" in said.error
        rolled_back(good.run("deploy"), good, "vLLM serve on head")
        assert "is not tried again" in good.run("deploy").error
    finally:
        set_image(good, STUB.read_bytes())
    assert good.deploy().outcome == "changed"
    assert good.answer() == " of the stub"
    assert good.deploy().outcome == "unchanged"
    # Nothing is left of the bad one.
    for name in good.nodes:
        assert good.on(name, "docker image ls --quiet --filter dangling=true") == ""
    assert not [image for image in images(good, "head") if "-failed:" in image]
    good.destroy()
    for name in good.nodes:
        assert not [image for image in images(good, name) if image.startswith("sparkrail/stub-")]


def test_a_first_deploy_that_fails_leaves_nothing(fresh: Product) -> None:
    said = with_arguments(fresh, TOO_LONG).run("deploy")
    assert (said.code, said.outcome) == (FAILED, "changed")
    assert said.error.startswith("vLLM serve on head: ")
    assert "There is no release to go back to: everything of this deploy was stopped." in said.error
    assert all_containers(fresh) == {"head": set(), "worker1": set()}
    assert fresh.of_runs() == {}
    for name in fresh.nodes:
        assert fresh.on(name, "docker volume ls --quiet") == ""
        assert "run" not in fresh.on(name, f"ls /root/.sparkrail/{fresh.name}").split()
    # It may be tried again: nobody was harmed.
    assert "vLLM serve on head: " in with_arguments(fresh, TOO_LONG).run("deploy").error
    assert fresh.deploy().outcome == "changed"


def test_a_rollback_that_fails_too(good: Product) -> None:
    """Everything of ours is stopped, both causes are told, and no run tries it again."""
    held = good.but(good.folder, lambda spec: spec["environment"].update(STUB_HOLD="1"))
    running = held.start("deploy")
    running.until_ended("cluster verification on head")
    running.until(lambda: held.named("head", "vllm"))
    good.on("head", OCCUPY)
    try:
        poll(lambda: good.on("head", "ss -Hltn 'sport = :8000'"))
        held.send_signal("head", "vllm", signal.SIGKILL)
        said = running.wait()
        assert (said.code, said.outcome) == (FAILED, "broken")
        assert said.error.startswith("vLLM serve on head: its container is exited")
        assert "The rollback to release " in said.error
        assert "another process " in said.error.partition("The rollback to release ")[2]
        assert all_containers(good) == {"head": set(), "worker1": set()}
    finally:
        good.on("head", FREE)
    for verb in ("releases", "status"):
        [row] = good.run(verb).table("not tried again")
        assert "its rollback failed too" in row["why"]
    # By hand, to the one that was good.
    assert good.run("rollback").code == DONE
    assert good.answer() == " of the stub"
    assert "is not tried again" in held.run("deploy").error
    assert good.deploy().changed == {"breaker on head"}


def test_rollback_by_hand(good: Product) -> None:
    other = with_arguments(good, "--max-model-len=2048")
    deployed = other.deploy()
    # Only an argument is another: the outage is the engine's own start and little more.
    own = sum(row["seconds"] for row in deployed.document["steps"] if row["step"] == "vLLM serve")
    print(f"outage {deployed.document['outage_seconds']} s, the engine's own start {own} s")
    assert deployed.document["outage_seconds"] < own + 5
    second, first = [row["release"] for row in good.run("releases").table("releases")]
    dry = good.run("rollback", "--dry-run")
    assert (dry.code, dry.outcome) == (DONE, "planned")

    said = other.run("rollback")
    assert (said.code, said.outcome) == (DONE, "changed"), said.error
    assert [row["release"] for row in good.run("releases").table("releases")] == [first, second]
    # The spec still asks for the other one: no nightly run undoes what a person did.
    assert "it was rolled back by hand" in other.run("deploy").error
    assert good.deploy().changed == {"breaker on head"}

    assert good.run("rollback", second[:6]).code == DONE
    assert other.deploy().changed == {"breaker on head"}
    unknown = good.run("rollback", "none")
    assert "there is no release none" in unknown.error
    assert f"on record: {second} of " in unknown.error


def test_the_record_is_for_people(good: Product) -> None:
    """The last five, with what was deployed and on what, and no folder of any other."""
    for length in range(1001, 1007):
        with_arguments(good, f"--max-model-len={length}").deploy()
    text = good.on("head", f"cat /root/.sparkrail/{good.name}/releases.json")
    rows = json.loads(text)
    assert [row["arguments"][-1] for row in rows] == [
        f"--max-model-len={length}" for length in range(1006, 1001, -1)
    ]
    newest = rows[0]
    assert newest["versions"]["ray"] and newest["versions"]["vllm"]
    assert newest["canary"]["tokens_per_second"] > 0
    assert newest["nodes"]["worker1"]["environment"]["VLLM_HOST_IP"] == "10.77.0.2"
    boot_id = good.on("worker1", "cat /proc/sys/kernel/random/boot_id")
    assert newest["nodes"]["worker1"]["boot_id"] == boot_id
    assert newest["spec"]["serve"]["arguments"] == ["--max-model-len=1006"]
    for name in good.nodes:
        kept = good.on(name, f"ls /root/.sparkrail/{good.name}/releases").split()
        assert sorted(kept) == sorted(row["digest"] for row in rows)
        modes = good.on(name, f"stat -c %a /root/.sparkrail/{good.name}/releases/*/node.env")
        assert set(modes.split()) == {"600"}


def test_a_slower_release(good: Product) -> None:
    """It is told, or rolled back, as the spec says."""

    def slow(product: Product, on_slower: str) -> Said:
        def change(spec: dict[str, Any]) -> None:
            spec["environment"]["STUB_SLOW"] = "0.02"
            spec["canary"]["on_slower"] = on_slower

        return product.but(product.folder, change).run("deploy")

    said = slow(good, "fail")
    rolled_back(said, good, "canary on head")
    assert "slower by more than 30 % (canary.slower_percent): " in said.error

    said = slow(good, "warn")
    assert (said.code, said.outcome) == (DONE, "changed"), said.error
    [row] = [each for each in said.document["problems"] if each["check"] == "canary"]
    assert "tokens/s, with the last good release " in row["detail"]


def test_by_prefect(good: Product, prefect: Processes, runs: FlowRuns) -> None:
    """The state has a name of its own; no night tries it again, a person who retries it does."""
    assert prefect.is_running("worker")
    bad = with_arguments(good, TOO_LONG)
    bad.write()
    run = runs.start(cluster=str(bad.spec))
    first = runs.ended(run)
    assert first.state == "RolledBack"
    assert first.message.startswith("vLLM serve on head: its container is exited")
    assert "Rolled back: release " in first.message
    report = runs.artifacts(run)["report-stub"]
    assert report.startswith("# stub: failed, rolled-back")
    assert "The model did not answer for " in report
    refused = runs.ended(runs.start(tags=[UNATTENDED], cluster=str(bad.spec)))
    assert refused.state == "Failed"
    assert "is not tried again" in refused.message
    prefect.command("prefect", "flow-run", "retry", str(run))
    assert runs.ended(run, 2).state == "RolledBack"


def test_bench_keeps_its_history(good: Product) -> None:
    for count in (1, 2):
        said = good.run("bench")
        assert said.code == DONE, said.error
        rows = said.table("benchmarks")
        assert len(rows) == count
    assert float(rows[-1]["tokens/s by eight"]) > 0
    assert " tokens/s alone, " in said.detail("bench")
    kept = json.loads(good.on("head", f"cat /root/.sparkrail/{good.name}/bench.json"))
    [newest] = good.run("releases").table("releases")
    assert [row["release"] for row in kept] == [newest["release"]] * 2


DAMAGE = """
file=$(ls /models/tiny/*.safetensors | head -n 1)
printf X | dd of="$file" bs=1 seek=5000 conv=notrunc status=none
basename "$file"
"""


def test_diff_names_each_difference(good: Product, tmp_path: Path) -> None:
    assert good.run("diff").document.get("tables", {}).get("differences", []) == []

    def told(product: Product) -> set[str]:
        said = product.run("diff")
        assert said.code == DONE, said.error
        return {" ".join(row.values()) for row in said.table("differences")}

    # What the spec asks for.
    def change(spec: dict[str, Any]) -> None:
        spec["serve"]["arguments"] = ["--max-model-len=2048"]
        spec["environment"]["CHANGED"] = "1"

    other = good.but(tmp_path, change)
    lines = "\n".join(sorted(told(other)))
    assert "vLLM's arguments (with --max-model-len=2048)" in lines
    assert "the variables (CHANGED=1)" in lines
    assert "worker1 script relay write node.env" in lines

    # What became of the nodes.
    file = good.on("worker1", DAMAGE)
    good.on("head", f"echo '# edited' >> /root/.sparkrail/{good.name}/run/launch")
    good.on("worker1", f"docker tag sparkrail/engine:lab {STUB_TAG}")
    good.send_signal("worker1", "raylet")
    poll(lambda: good.ray not in good.containers("worker1"))
    lines = "\n".join(sorted(told(good)))
    assert "worker1 weights sync send 1 of " in lines and file in lines
    assert "head script relay write launch" in lines
    assert f"worker1 image transfer send {STUB_TAG} from head" in lines
    assert f"worker1 {good.ray} it is exited" in lines
    # A deploy acts on exactly that.
    assert good.deploy().changed == {
        "weights sync on worker1",
        "script relay on head",
        "image transfer on worker1",
        "stop on head",
        "stop on worker1",
        "worker join on worker1",
        "vLLM serve on head",
    }
    assert told(good) == set()


# --- the watch ------------------------------------------------------------------------------------


def in_container(product: Product, script: str) -> None:
    product.on("head", f"docker exec {product.server} sh -c '{script}'")


def test_the_watch(good: Product) -> None:
    """Only after failures in a row, once, and never while the server works for somebody."""
    watched = good.but(good.folder, lambda spec: spec.update(watch={"failures": 2}))
    before = [good.containers(name) for name in good.nodes]

    def look() -> Said:
        return watched.run("watch")

    assert (look().code, look().outcome) == (DONE, "unchanged")

    # It works for somebody: a completion that fails is none that counts.
    in_container(good, "touch /busy /dead")
    for _ in range(3):
        assert look().code == DONE
    in_container(good, "rm /busy")
    first = look()
    assert (first.code, first.outcome) == (FAILED, "unchanged")
    assert "not well, 1 of 2 times in a row" in first.error
    assert "the server does not answer: a completion: HTTP 500" in first.error
    assert [good.containers(name) for name in good.nodes] == before

    # The deploy flow finds that it does not answer, and starts what is lost.
    second = look()
    assert (second.code, second.outcome) == (DONE, "changed"), second.error
    assert {"stop on head", "vLLM serve on head"} <= second.changed
    assert look().code == DONE
    assert good.containers("worker1") == before[1]

    # Requests run, but nothing comes out any more.
    in_container(good, "touch /stuck")
    assert look().code == DONE
    assert "no token has come out since the last look" in look().error
    in_container(good, "rm /stuck")
    assert look().code == DONE


def test_the_watch_gives_up(good: Product) -> None:
    """A restart that does not help is the only one."""
    watched = good.but(good.folder, lambda spec: spec.update(watch={"failures": 1}))
    good.on(
        "worker1", "echo another >/run/boot; mount --bind /run/boot /proc/sys/kernel/random/boot_id"
    )
    try:
        restarted = watched.run("watch")
        assert "worker1 was rebooted" in restarted.stderr
        assert restarted.code == DONE
        gave_up = watched.run("watch")
        assert (gave_up.code, gave_up.outcome) == (FAILED, "broken")
        assert "the restart did not help, and there is no other" in gave_up.error
        again = watched.run("watch")
        assert (again.code, again.outcome) == (FAILED, "unchanged")
    finally:
        good.on("worker1", "umount /proc/sys/kernel/random/boot_id")

"""Whatever is not as it was made is healed, and nothing else is touched; Ray is real."""

from collections.abc import Callable, Iterator

import pytest

from tests.lab.product import STUB_TAG, Product

pytestmark = pytest.mark.lab

REJOINED = {"stop on head", "worker join on worker1", "vLLM serve on head"}
# Size and time stay as they were.
DAMAGE = """
file=$(ls /models/tiny/*.safetensors | head -n 1)
touch --reference="$file" /tmp/time
printf X | dd of="$file" bs=1 seek=5000 conv=notrunc status=none
touch --reference=/tmp/time "$file"
rm /tmp/time
"""
# Ours by its labels, but for the digest.
OTHER_SPEC = """
docker rm --force --volumes {name}
docker run --detach --name={name} --label=sparkrail.cluster={cluster} \
    --label=sparkrail.digest=another --entrypoint=sleep {image} 1000
"""


@pytest.fixture(scope="module")
def cluster(stub: Product) -> Iterator[Product]:
    stub.deploy()
    yield stub


def heal(cluster: Product) -> tuple[set[str], dict[str, set[str]]]:
    """The rows that changed, and the containers of before that are still there, by node."""
    before = {name: cluster.containers(name) for name in cluster.nodes}
    said = cluster.deploy()
    after = {name: cluster.containers(name) for name in cluster.nodes}
    assert cluster.answer() == " of the stub"
    assert set(after["head"]) == {cluster.ray, cluster.server}
    assert set(after["worker1"]) == {cluster.ray}
    stayed = {name: set(before[name].values()) & set(after[name].values()) for name in after}
    names = {
        name: {key for key in after[name] if after[name][key] in stayed[name]} for name in after
    }
    return said.changed, names


def test_files(cluster: Product) -> None:
    run = f"/root/.sparkrail/{cluster.name}/run"
    cluster.on("head", f"chmod 0644 {run}/node.env")
    cluster.on("worker1", f"echo '# edited' >> {run}/launch")
    cluster.on("worker1", DAMAGE)
    changed, stayed = heal(cluster)
    assert changed == {
        "script relay on head",
        "script relay on worker1",
        "weights sync on worker1",
    }
    assert stayed == {"head": {cluster.ray, cluster.server}, "worker1": {cluster.ray}}
    assert cluster.on("head", f"stat -c %a {run}/node.env") == "600"
    same = "cd /models/tiny && sha256sum *"
    assert cluster.on("head", same) == cluster.on("worker1", same)


def test_image_tag_moved(cluster: Product) -> None:
    cluster.on("worker1", f"docker tag sparkrail/engine:lab {STUB_TAG}")
    changed, stayed = heal(cluster)
    assert changed == {"image transfer on worker1"}
    assert stayed["worker1"] == {cluster.ray}
    inspect = f"docker image inspect --format '{{{{json .RootFS.Layers}}}}' {STUB_TAG}"
    assert cluster.on("worker1", inspect) == cluster.on("head", inspect)
    images = cluster.on("worker1", "docker image ls --format '{{.Repository}}:{{.Tag}}'").split()
    assert sorted(images) == ["sparkrail/engine:lab", STUB_TAG]


def remove_server(cluster: Product) -> None:
    cluster.on("head", f"docker rm --force --volumes {cluster.server}")


def kill_server(cluster: Product) -> None:
    cluster.send_signal("head", "vllm")


def remove_workers_ray(cluster: Product) -> None:
    cluster.on("worker1", f"docker rm --force --volumes {cluster.ray}")


def kill_workers_ray(cluster: Product) -> None:
    cluster.send_signal("worker1", "raylet")


def another_spec(cluster: Product) -> None:
    script = OTHER_SPEC.format(name=cluster.ray, cluster=cluster.name, image=STUB_TAG)
    cluster.on("worker1", script)


@pytest.mark.parametrize(
    ("break_it", "changed", "stayed"),
    [
        pytest.param(
            remove_server, {"vLLM serve on head"}, {"head", "worker1"}, id="server removed"
        ),
        pytest.param(
            kill_server,
            {"stop on head", "vLLM serve on head"},
            {"head", "worker1"},
            id="server killed",
        ),
        pytest.param(remove_workers_ray, REJOINED, {"head"}, id="the worker's Ray removed"),
        pytest.param(
            kill_workers_ray,
            {*REJOINED, "stop on worker1"},
            {"head"},
            id="the worker's Ray killed",
        ),
        pytest.param(
            another_spec,
            {*REJOINED, "stop on worker1"},
            {"head"},
            id="a container of ours with another spec",
        ),
    ],
)
def test_containers(
    cluster: Product, break_it: Callable[[Product], None], changed: set[str], stayed: set[str]
) -> None:
    break_it(cluster)
    found, kept = heal(cluster)
    assert found == changed
    assert {name for name in cluster.nodes if cluster.ray in kept[name]} == stayed


def test_all_is_well_in_the_end(cluster: Product) -> None:
    assert cluster.deploy().outcome == "unchanged"
    for name in cluster.nodes:
        assert len(cluster.named(name, "raylet")) == 1
    volumes = [cluster.on(name, "docker volume ls --quiet") for name in cluster.nodes]
    assert [len(found.splitlines()) for found in volumes] == [1, 1]

"""A whole lab: brought up, taken down, looked at."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lab import base as node_base
from tests.lab import (
    cgroups,
    docker_data,
    engine_image,
    faults,
    identity,
    network,
    node,
    spec,
    tiny_model,
)
from tests.lab.command import run, say
from tests.lab.errors import LabError
from tests.lab.layout import Lab, Node, Shape, cache_home, lab_home, nodes
from tests.lab.processes import end_all, in_namespaces

HEAD = Node(0)
LOAD_SECONDS = 600


def up(lab: Lab, shape: Shape) -> None:
    """Makes the lab whole: whatever is missing or down is brought up, the rest stays."""
    with _alone(lab):
        _claim(lab, shape)
        base = node_base.ensure(cache_home(), shape.base)
        image = engine_image.build(cache_home()) if shape.engine else None
        _ensure_network(lab, shape)
        identity.ensure(lab, shape, base)
        if image:
            _ensure_docker_data(lab, shape, base, image)
        _ensure_nodes(lab, shape, base)
        if image:
            _ensure_image(lab, shape, base, image)
            _ensure_model(lab)
        spec.write(lab, shape)


def down(lab: Lab) -> None:
    """Leaves nothing of the lab behind, in whatever state it is; the caches stay."""
    with _alone(lab):
        cgroups.thaw_all(lab.cgroup)
        end_all(lambda: _processes(lab))
        network.remove(lab)
        cgroups.remove(lab.cgroup)
        _unmount_below(lab.folder)
        # Never across a mount: what is mounted there is not the lab's to delete.
        if lab.folder.exists():
            run(["rm", "-rf", "--one-file-system", str(lab.folder)], timeout=300)
        lab.spec.unlink(missing_ok=True)


def every_lab() -> list[Lab]:
    """Whatever has a folder, a namespace or a control group on this machine."""
    folders = {path.parent.name for path in lab_home().glob("*/lab.json")}
    return [Lab(name) for name in sorted(folders | network.lab_names() | cgroups.lab_names())]


def shape_of(lab: Lab) -> Shape:
    """The shape of a lab that is up; raises when it is not."""
    try:
        return Shape(**json.loads(lab.state.read_text()))
    except (OSError, ValueError, TypeError):
        raise LabError(f"there is no lab {lab.name}; `up --name {lab.name}` makes it") from None


def node_named(lab: Lab, name: str) -> Node:
    found = {candidate.name: candidate for candidate in nodes(shape_of(lab))}
    if name not in found:
        raise LabError(f"{lab.name} has no node {name!r}; it has {', '.join(found)}")
    return found[name]


def command_line(lab: Lab, where: str, command: list[str]) -> list[str]:
    """What runs the command there; on the control, the file system is the host's."""
    if where == "control":
        shape_of(lab)
        return [*cgroups.joining(_control_group(lab)), *network.inside(lab, "control"), *command]
    return [*node.enter(lab, node_named(lab, where)), *command]


def break_node(lab: Lab, name: str, fault: str, mib: int | None) -> None:
    where = node_named(lab, name)
    with _alone(lab):
        if fault == "boot":
            _ensure_node(lab, shape_of(lab), where)
        elif fault == "hold-gpu":
            if mib is None or mib < 1:
                raise LabError("hold-gpu needs a number of MiB, e.g. `hold-gpu 11700`")
            print(faults.hold_gpu(lab, where, mib))
        else:
            faults.SIMPLE[fault](lab, where)


def status(lab: Lab) -> dict[str, Any]:
    shape = shape_of(lab)
    found = [_node_status(lab, shape, where) for where in nodes(shape)]
    return {"name": lab.name, "spec": str(lab.spec), "shape": asdict(shape), "nodes": found}


def _node_status(lab: Lab, shape: Shape, where: Node) -> dict[str, Any]:
    process = node.init(lab, where)
    state = "down" if process is None else "frozen" if node.is_frozen(lab, where) else "up"
    wired = network.is_up(lab, shape)
    return {
        "name": where.name,
        "state": state,
        "pid": process.pid if process else None,
        "fabric_address": where.fabric_address,
        "fabric_interface": where.fabric_interface,
        "link": "up" if wired and network.fabric_link_is_up(lab, where) else "down",
        "sshd": state == "up" and node.sshd_answers(lab, where),
        "docker": state == "up" and shape.docker and node.dockerd_answers(lab, where),
    }


@contextmanager
def _alone(lab: Lab) -> Iterator[None]:
    with node_base.locked(lab_home() / f".{lab.name}.lock"):
        yield


def _claim(lab: Lab, shape: Shape) -> None:
    if lab.state.exists() and (running := shape_of(lab)) != shape:
        raise LabError(
            f"{lab.name} is there with another shape ({running}), asked for was ({shape}); "
            f"run `down --name {lab.name}` first"
        )
    if not lab.state.exists() and network.namespace_files(lab):
        raise LabError(
            f"namespaces of a lab {lab.name} exist, but it is not in {lab_home()}: it belongs to "
            f"another SPARKRAIL_LAB_HOME; `down --name {lab.name}` removes it"
        )
    lab.folder.mkdir(parents=True, exist_ok=True)
    aside = lab.state.with_suffix(".new")
    aside.write_text(json.dumps(asdict(shape)))
    aside.rename(lab.state)


def _control_group(lab: Lab) -> str:
    # On cgroup v2 the lab's own group cannot hold processes: it has the nodes' groups below it.
    return f"{lab.cgroup}/control"


def _ensure_network(lab: Lab, shape: Shape) -> None:
    if network.is_up(lab, shape):
        return
    for where in nodes(shape):
        node.power_off(lab, where)
    end_all(lambda: _processes(lab))
    network.remove(lab)
    cgroups.prepare(_control_group(lab))
    network.build(lab, shape)


def _ensure_nodes(lab: Lab, shape: Shape, base: Path) -> None:
    for where in nodes(shape):
        if node.init(lab, where):
            faults.mend(lab, where)
        else:
            say(f"booting {where.name} ...")
            node.boot(lab, shape, where, base)
    for where in nodes(shape):
        node.wait_ready(lab, shape, where)


def _ensure_node(lab: Lab, shape: Shape, where: Node) -> None:
    if node.init(lab, where) is None:
        node.boot(lab, shape, where, node_base.ensure(cache_home(), shape.base))
    node.wait_ready(lab, shape, where)


def _ensure_docker_data(lab: Lab, shape: Shape, base: Path, image: Path) -> None:
    """A head that never had a docker folder gets the one with the image, if that is cached."""
    data = lab.places(HEAD).docker
    template = _template(shape, base, image)
    with node_base.locked(template.with_name("lock")):
        if template.exists() and not data.exists():
            say("reproducing the head's docker folder with the engine image ...")
            docker_data.reproduce(template, data)


def _ensure_image(lab: Lab, shape: Shape, base: Path, image: Path) -> None:
    if _has_image(lab):
        return
    say("loading the engine image into the head's docker (once, up to a minute) ...")
    with image.open("rb") as archive:
        run([*node.enter(lab, HEAD), "docker", "load"], stdin=archive, timeout=LOAD_SECONDS)
    if not _has_image(lab):
        raise LabError(f"{image} was loaded, but holds no image {engine_image.TAG}")
    if node.execute(lab, HEAD, "docker", "ps", "--all", "--quiet").strip():
        return
    # A docker folder without containers, as a new head should have it: worth keeping.
    template = _template(shape, base, image)
    with node_base.locked(template.with_name("lock")):
        if not template.exists():
            # Only a docker folder that its engine has closed is whole.
            node.shut_down(lab, HEAD)
            docker_data.keep(lab.places(HEAD).docker, template)
            _ensure_node(lab, shape, HEAD)


def _template(shape: Shape, base: Path, image: Path) -> Path:
    store = shape.containerd_store
    return docker_data.template(cache_home(), base, image, containerd_store=store)


def _has_image(lab: Lab) -> bool:
    listing = node.execute(lab, HEAD, "docker", "image", "ls", "--quiet", engine_image.TAG)
    return bool(listing.strip())


def _ensure_model(lab: Lab) -> None:
    process = node.init(lab, HEAD)
    assert process is not None
    target = Path(f"/proc/{process.pid}/root{spec.MODEL_PATH}")
    if not target.exists():
        aside = target.with_name(f".{target.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(tiny_model.build(cache_home()), aside)
        aside.rename(target)


def _processes(lab: Lab) -> set[int]:
    return cgroups.pids(lab.cgroup) | in_namespaces("net", network.inodes(lab))


def _unmount_below(folder: Path) -> None:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for target in reversed([line.split(" ")[4] for line in lines]):
        if Path(target).is_relative_to(folder):
            with suppress(LabError):
                run(["umount", "--lazy", target])

"""What makes a node itself: its name, its host keys, and who may log in; written once, at `up`."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.command import run
from tests.lab.layout import HEAD_ADDRESS, Lab, Node, Shape, nodes

KEY_KINDS = ("rsa", "ecdsa", "ed25519")
HERE = Path(__file__).parent
# Ours on the node, by the path it gets there.
PROGRAMS = {
    "usr/local/sbin/node-init": HERE / "node_init.py",
    "usr/local/bin/hold-gpu": HERE / "hold_gpu.py",
    "usr/bin/nvidia-smi": HERE / "nvidia_smi.py",
}


@dataclass(frozen=True)
class User:
    """Someone with a login on every node."""

    name: str
    uid: int
    home: str


USERS = (User("root", 0, "root"), User("op", 1000, "home/op"))


@dataclass(frozen=True)
class Tree:
    """A node's upper folder, over the base."""

    upper: Path
    base: Path

    def folder(self, path: str | Path, *, mode: int = 0o755, owner: int = 0) -> Path:
        """The folder in the upper layer; one that the base has keeps its mode and owner."""
        target = self.upper
        for part in Path(path).parts:
            target /= part
            if target.exists():
                continue
            target.mkdir()
            below = self.base / target.relative_to(self.upper)
            if below.exists():
                shutil.copystat(below, target)
                os.chown(target, below.stat().st_uid, below.stat().st_gid)
            else:
                target.chmod(mode)
                os.chown(target, owner, owner)
        return target

    def write(self, path: str, text: str, *, mode: int = 0o644, owner: int = 0) -> None:
        target = self.folder(Path(path).parent) / Path(path).name
        target.write_text(text)
        target.chmod(mode)
        os.chown(target, owner, owner)


def ensure(lab: Lab, shape: Shape, base: Path) -> None:
    """Gives every node its identity, unless it has one."""
    if lab.known_hosts.exists():
        return
    shutil.rmtree(lab.ssh, ignore_errors=True)
    lab.ssh.mkdir(parents=True)
    make_key(lab.key_file, "ed25519", f"control@{lab.name}")
    trees = {node: Tree(lab.places(node).upper, base) for node in nodes(shape)}
    for node, tree in trees.items():
        shutil.rmtree(tree.upper, ignore_errors=True)
        tree.upper.mkdir(parents=True)
        tree.upper.chmod(0o755)
        _write_system(tree, node, shape)
    fabric = [line for node, tree in trees.items() for line in host_lines(tree, node)]
    for user in USERS:
        _write_logins(lab, trees, user, fabric)
    management = host_lines(trees[Node(0)], Node(0), address=HEAD_ADDRESS)
    # Last: its presence says that all identities are whole.
    _write_whole(lab.known_hosts, [*management, *fabric])


def make_key(file: Path, kind: str, comment: str) -> None:
    run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(file)])


def host_lines(tree: Tree, node: Node, *, address: str | None = None) -> list[str]:
    """The node's lines in a known_hosts file."""
    folder = tree.upper / "etc/ssh"
    keys = ((folder / f"ssh_host_{kind}_key.pub").read_text().split()[:2] for kind in KEY_KINDS)
    return [" ".join([address or node.fabric_address, *key]) for key in keys]


def _write_system(tree: Tree, node: Node, shape: Shape) -> None:
    tree.write("etc/hostname", f"{node.name}\n")
    # The second line is what Debian and Ubuntu write: a name that resolves to loopback.
    hosts = f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n::1 localhost ip6-localhost\n"
    tree.write("etc/hosts", hosts)
    tree.write("etc/resolv.conf", "# No name server: nothing here can reach one.\n")
    if shape.containerd_store:
        tree.folder("etc/docker")
        tree.write("etc/docker/daemon.json", '{"features": {"containerd-snapshotter": true}}\n')
    for path, source in PROGRAMS.items():
        tree.write(path, source.read_text(), mode=0o755)
    for kind in KEY_KINDS:
        file = tree.folder("etc/ssh") / f"ssh_host_{kind}_key"
        make_key(file, kind, f"root@{node.name}")


def _write_logins(lab: Lab, trees: dict[Node, Tree], user: User, fabric: list[str]) -> None:
    """The control may log in everywhere, the head's user on the workers as the same user."""
    for node, tree in trees.items():
        ssh = tree.folder(f"{user.home}/.ssh", mode=0o700, owner=user.uid)
        allowed = [lab.key_file.with_suffix(".pub").read_text()]
        if node.is_head:
            make_key(ssh / "id_ed25519", "ed25519", f"{user.name}@{node.name}")
            for name in ("id_ed25519", "id_ed25519.pub"):
                os.chown(ssh / name, user.uid, user.uid)
            heads = ssh / "id_ed25519.pub"
            known = "".join(f"{line}\n" for line in fabric)
            tree.write(f"{user.home}/.ssh/known_hosts", known, owner=user.uid)
        else:
            allowed.append(heads.read_text())
        file = f"{user.home}/.ssh/authorized_keys"
        tree.write(file, "".join(allowed), mode=0o600, owner=user.uid)


def _write_whole(file: Path, lines: Iterable[str]) -> None:
    aside = file.with_suffix(".new")
    aside.write_text("".join(f"{line}\n" for line in lines))
    aside.rename(file)

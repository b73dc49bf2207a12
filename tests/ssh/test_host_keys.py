"""Host keys are checked on both hops; what is refused comes with the command that settles it."""

import shlex
import subprocess
import threading
from pathlib import Path

import pytest

from blocks import Cluster
from tasks import remote
from tasks.errors import HostKeyRefused
from tasks.remote import connect
from tests.ssh.conftest import Start
from tests.ssh.sshd import Sshd, make_key, poll, public, spec

Pair = tuple[Sshd, Sshd]
HOPS = [pytest.param(0, id="head"), pytest.param(1, id="worker")]


def cluster_knowing(pair: Pair, known_hosts: Path, key: Path) -> Cluster:
    head, worker = pair
    return spec(head.place("head"), worker.place("worker1"), known_hosts=known_hosts, key_file=key)


def follow(error: HostKeyRefused) -> None:
    """Do what the last line of the error says."""
    subprocess.run(("sh", "-c", str(error).splitlines()[-1]), check=True, capture_output=True)


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("ending", ["\n", "", None], ids=["whole", "cut", "absent"])
def test_an_unknown_key_is_refused_until_the_printed_command_is_run(
    pair: Pair, hop: int, ending: str | None, login_key: Path, tmp_path: Path
) -> None:
    """known_hosts may be there, lack its last line break, or not be there, nor its folder."""
    known = tmp_path / "my folder" / "known_hosts"
    if ending is not None:
        known.parent.mkdir()
        known.write_text(f"{pair[1 - hop].known.strip()}{ending}")
    elif hop == 1:
        pytest.skip("without a file the head comes first")
    cluster = cluster_knowing(pair, known, login_key)
    node, name = pair[hop], ("head", "worker1")[hop]
    logins = node.logins
    with pytest.raises(HostKeyRefused) as caught:
        connect(cluster, cluster.nodes[hop])
    line = shlex.quote(node.known.strip())
    path = shlex.quote(str(known))
    assert str(caught.value) == (
        f"{name}: unknown host key ssh-ed25519 {node.fingerprint} of {node.host}\n"
        "If that is what `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints on "
        f"{name} itself, trust it:\n"
        f"mkdir -p {shlex.quote(str(known.parent))} && printf '\\n%s\\n' {line} >> {path}"
    )
    assert node.logins == logins, "no key of ours is shown to a stranger"
    follow(caught.value)
    if hop == 0:
        with known.open("a") as file:
            file.write(pair[1].known)
    assert connect(cluster, cluster.nodes[hop]).run(("echo", "in")).stdout == "in\n"


@pytest.mark.parametrize("hop", HOPS)
def test_a_changed_key_is_refused_with_both_fingerprints(
    pair: Pair, hop: int, login_key: Path, tmp_path: Path
) -> None:
    other = make_key(tmp_path / "other")
    kind, text, *_ = public(other).split()
    node, name = pair[hop], ("head", "worker1")[hop]
    known = tmp_path / "known_hosts"
    known.write_text(f"{pair[1 - hop].known}{node.host} {kind} {text}\n")
    cluster = cluster_knowing(pair, known, login_key)
    with pytest.raises(HostKeyRefused) as caught:
        connect(cluster, cluster.nodes[hop])
    listing = subprocess.run(
        ("ssh-keygen", "-lf", str(other)), check=True, capture_output=True, text=True
    )
    assert str(caught.value) == (
        f"{name}: the host key of {node.host} has changed: "
        f"it shows ssh-ed25519 {node.fingerprint}, "
        f"known is ssh-ed25519 {listing.stdout.split()[1]}\n"
        "If the node was installed anew, forget the old key and run again:\n"
        f"ssh-keygen -f {known} -R {shlex.quote(node.host)}"
    )
    follow(caught.value)
    with pytest.raises(HostKeyRefused, match="unknown host key") as again:
        connect(cluster, cluster.nodes[hop])
    follow(again.value)
    assert connect(cluster, cluster.nodes[hop]).run(("echo", "in")).stdout == "in\n"


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_other_kinds_of_host_keys_are_known_too(
    start: Start, login_key: Path, tmp_path: Path, kind: str
) -> None:
    """sshd also has the kind that is not known; the known one must be asked for."""
    key = make_key(tmp_path / kind, kind=kind)
    node = start(f"HostKey {key}")
    known = tmp_path / "known"
    name, text, *_ = public(key).split()
    known.write_text(f"{node.host} {name} {text}\n")
    cluster = spec(node.place("head"), None, known_hosts=known, key_file=login_key)
    assert connect(cluster, cluster.head).run(("echo", "in")).stdout == "in\n"


def test_hashed_and_unreadable_lines_do_no_harm(
    pair: Pair, login_key: Path, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(pair[0].known)
    subprocess.run(("ssh-keygen", "-q", "-H", "-f", str(known)), check=True, capture_output=True)
    odd = "# comment\n\n@cert-authority *.example ssh-rsa AAAA\nnonsense\nhost ssh-ed25519 A\n"
    known.write_bytes(odd.encode() + b"\xff\xfe\n" + known.read_bytes())
    cluster = spec(pair[0].place("head"), None, known_hosts=known, key_file=login_key)
    assert connect(cluster, cluster.head).run(("echo", "in")).stdout == "in\n"


def test_a_known_hosts_that_cannot_be_read_is_named(
    pair: Pair, login_key: Path, tmp_path: Path
) -> None:
    cluster = spec(pair[0].place("head"), None, known_hosts=tmp_path, key_file=login_key)
    with pytest.raises(HostKeyRefused, match=r"ssh\.known_hosts cannot be read: .*Is a directory"):
        connect(cluster, cluster.head)


def test_a_refused_login_leaves_no_thread(pair: Pair, login_key: Path, tmp_path: Path) -> None:
    remote.disconnect()
    cluster = cluster_knowing(pair, tmp_path / "none", login_key)
    before = set(threading.enumerate())
    with pytest.raises(HostKeyRefused):
        connect(cluster, cluster.head)
    poll(lambda: set(threading.enumerate()) <= before, "the threads of the connection end")

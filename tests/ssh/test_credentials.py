"""Logging in by a saved ssh-credentials block: each way of giving a key, on a real sshd."""

import getpass
import re
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from blocks import Cluster
from blocks.secrets import SSHCredentials
from tasks.errors import LoginRefused
from tasks.remote import connect
from tests.flows.conftest import prefect_server  # noqa: F401 - a fixture
from tests.ssh.conftest import Start
from tests.ssh.sshd import Sshd, make_key, poll, public, spec

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    # Prefect leaves sockets of its clients to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
PASSPHRASE = "open sesame"
numbers = count()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "plain")


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    return make_key(tmp_path / "locked", passphrase=PASSPHRASE)


@pytest.fixture
def node(start: Start, key: Path, locked: Path, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    """It knows both keys; the home folder of who logs in has none."""
    server = start()
    (server.folder / "authorized_keys").write_text(public(key) + public(locked))
    monkeypatch.setenv("HOME", str(server.home))
    return server


@pytest.fixture
def agent(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A running agent that holds the key."""
    socket = tmp_path / "agent"
    process = subprocess.Popen(("ssh-agent", "-D", "-a", str(socket)), stdout=subprocess.DEVNULL)
    try:
        poll(socket.exists, "the agent starts")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(("ssh-add", "-q", str(key)), check=True, capture_output=True)
        yield
    finally:
        process.terminate()
        process.wait()


def by_block(node: Sshd, block: SSHCredentials) -> Cluster:
    """A spec that names the block, which is saved as a person saves it in the UI."""
    name = f"login-{next(numbers)}"  # A block is read once per process.
    block.save(name)
    known = node.folder / "known_hosts"
    known.write_text(node.known)
    return spec(node.place("head"), None, known_hosts=known, credentials=name)


def lets_in(node: Sshd, block: SSHCredentials) -> bool:
    cluster = by_block(node, block)
    said = connect(cluster, cluster.head).run(("id", "-un")).stdout
    return said == f"{getpass.getuser()}\n"


def refused(node: Sshd, block: SSHCredentials) -> str:
    cluster = by_block(node, block)
    with pytest.raises(LoginRefused) as caught:
        connect(cluster, cluster.head)
    return str(caught.value)


def test_a_key_as_text(node: Sshd, key: Path) -> None:
    assert lets_in(node, SSHCredentials(private_key=key.read_text()))


def test_a_key_as_text_of_a_form_that_lost_its_last_line_break(node: Sshd, key: Path) -> None:
    assert lets_in(node, SSHCredentials(private_key=key.read_text().strip()))


def test_an_encrypted_key_as_text(node: Sshd, locked: Path) -> None:
    text = locked.read_text()
    assert lets_in(node, SSHCredentials(private_key=text, passphrase=PASSPHRASE))


def test_a_key_file(node: Sshd, key: Path) -> None:
    assert lets_in(node, SSHCredentials(key_file=str(key)))


def test_a_key_file_in_the_home_folder(node: Sshd, key: Path) -> None:
    (node.home / "id").write_bytes(key.read_bytes())
    assert lets_in(node, SSHCredentials(key_file="~/id"))


def test_an_encrypted_key_file(node: Sshd, locked: Path) -> None:
    assert lets_in(node, SSHCredentials(key_file=str(locked), passphrase=PASSPHRASE))


@pytest.mark.usefixtures("agent")
def test_an_agent(node: Sshd) -> None:
    assert lets_in(node, SSHCredentials())


@pytest.mark.usefixtures("agent")
def test_an_agent_that_is_not_to_be_asked(node: Sshd) -> None:
    assert "we have no key to offer" in refused(node, SSHCredentials(use_agent=False))


def test_no_key_at_all(node: Sshd) -> None:
    assert "we have no key to offer" in refused(node, SSHCredentials())


def test_a_passphrase_that_is_missing_or_wrong(node: Sshd, locked: Path) -> None:
    text = locked.read_text()
    assert "is encrypted and no passphrase" in refused(node, SSHCredentials(private_key=text))
    wrong = SSHCredentials(private_key=text, passphrase="close sesame")
    said = refused(node, wrong)
    assert "the passphrase is wrong" in said
    assert "sesame" not in said


def test_a_key_file_that_is_not_there(node: Sshd) -> None:
    said = refused(node, SSHCredentials(key_file="/no/such/key"))
    assert re.match(r"key_file of the block login-\d+: /no/such/key: No such file", said)


def test_a_block_that_is_not_there(node: Sshd) -> None:
    cluster = by_block(node, SSHCredentials())
    other = cluster.model_copy(
        update={"ssh": cluster.ssh.model_copy(update={"credentials": "nope"})}
    )
    with pytest.raises(LoginRefused, match=r"^no ssh-credentials block named nope"):
        connect(other, other.head)

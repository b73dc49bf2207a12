"""Commands work whatever the login shell of the node's user is, and whatever it prints."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks import engines
from tasks.errors import LoginRefused
from tasks.remote import Remote
from tests.ssh.conftest import LogIn, Start
from tests.ssh.test_commands import ECHO
from tests.unit.test_local import DOCKER

WORDS = (
    "",
    " a  b ",
    "it's",
    '"',
    "$(id) $HOME `id`",
    "back\\slash\\",
    "line\nbreak",
    "wow!!",
    "ü",
)
BANNER = "Welcome to this node\nlast login: never"


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "csh", "tcsh", "fish", "zsh"])
def test_quoting_survives_the_login_shell(start: Start, only: LogIn, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} on this machine")
    # As sshd itself calls a login shell.
    node = only(start(f'ForceCommand exec {path} -c "$SSH_ORIGINAL_COMMAND"'))
    result = node.run((*ECHO, *WORDS), environment={"ODD": WORDS[4]}, stdin=b"in")
    assert json.loads(result.stdout) == list(WORDS)
    assert len(node.run(("echo", "x" * 40_000)).stdout) == 40_001


NOISE = f"printf '%s\\n' '{BANNER}'\nprintf 'without a line break'\n"


@pytest.fixture
def with_bashrc(start: Start, only: LogIn) -> Iterator[Callable[[str], Remote]]:
    """A node whose bash reads this before every command, as it does when sshd calls it."""
    read: list[Path] = []

    def log_in(bashrc: str) -> Remote:
        sshd = start('ForceCommand exec bash -c "$SSH_ORIGINAL_COMMAND"')
        read.append(sshd.home / "read")
        (sshd.home / ".bashrc").write_text(f"touch {read[0]}\n{bashrc}")
        return only(sshd)

    yield log_in
    assert all(each.exists() for each in read)


WithBashrc = Callable[[str], Remote]


def test_what_a_bashrc_prints_is_dropped(with_bashrc: WithBashrc) -> None:
    node = with_bashrc(NOISE)
    assert node.run(("echo", "clean")).stdout == "clean\n"
    told: list[str] = []
    node.run(("echo", "clean"), on_output=told.append)
    assert "".join(told) == "clean\n"


def test_a_command_that_talks_begins_behind_what_a_bashrc_prints(with_bashrc: WithBashrc) -> None:
    stream = with_bashrc(NOISE).start(("cat",), shown="talk")
    stream.sendall(b"clean")
    assert stream.recv(100) == b"clean"
    stream.close()


def test_docker_is_spoken_to_behind_what_a_bashrc_prints(
    with_bashrc: WithBashrc, tmp_path: Path
) -> None:
    stub = tmp_path / "docker"
    stub.write_text(DOCKER)
    stub.chmod(0o755)
    node = with_bashrc(f"{NOISE}export PATH={tmp_path}:$PATH\n")
    assert engines._client(node).version()["Version"] == "20.10.24"


def test_a_bashrc_that_sets_odd_options_does_not_matter(with_bashrc: WithBashrc) -> None:
    node = with_bashrc("set -e -u\nIFS=x\nalias env=false cat=false\nexport POSIXLY_CORRECT=1\n")
    assert node.run(("cat",), stdin=b"axb").stdout == "axb"
    assert node.run((sys.executable, "-c", "exit(3)"), ok=(3,)).code == 3


@pytest.mark.parametrize("code", [0, 1])
def test_a_login_shell_that_does_not_run_commands_is_named(
    start: Start, only: LogIn, code: int
) -> None:
    """A forced command that ends well is no success of ours."""
    said = "This account is currently not available."
    node = only(start(f"ForceCommand echo {said}; exit {code}"))
    with pytest.raises(LoginRefused) as caught:
        node.run(("echo", "hello"), ok=(0, 1))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(" did not run our command")
    assert lines[1] == said

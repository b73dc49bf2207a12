"""Commands on a node: words, streams and exit codes arrive as they are."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks import remote
from tasks.errors import CommandFailed
from tasks.remote import Remote
from tests.ssh.conftest import LogIn, Start
from tests.ssh.sshd import Sshd

PYTHON = sys.executable
NASTY = [
    pytest.param("", id="empty"),
    pytest.param(" two  blanks ", id="blanks"),
    pytest.param("'\"`", id="quotes"),
    pytest.param("$(touch /tmp/never) `id` $HOME ${PATH}", id="substitutions"),
    pytest.param("back\\slash \\n \\\\ \\", id="backslashes"),
    pytest.param("line\nbreak\r\n\ttab", id="line breaks"),
    pytest.param("wow!! !$ !-1", id="history"),
    pytest.param("größe 模型 🚀", id="unicode"),
    pytest.param("a;b|c&d>e<f(g){h}[i]*?~#%", id="shell characters"),
    pytest.param("-n", id="an option"),
    pytest.param("x" * 40_000, id="40 kB"),
]
ECHO = (PYTHON, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))")


@pytest.mark.parametrize("word", NASTY)
@pytest.mark.parametrize("node", ["head", "worker"])
def test_words_arrive_as_they_are(node: str, word: str, request: pytest.FixtureRequest) -> None:
    connection: Remote = request.getfixturevalue(node)
    said = connection.run((*ECHO, word, "next"), environment={"ODD": word}).stdout
    assert json.loads(said) == [word, "next"]
    shown = (PYTHON, "-c", "import json, os; print(json.dumps(os.environ['ODD']))")
    assert json.loads(connection.run(shown, environment={"ODD": word}).stdout) == word


def test_a_command_too_long_for_the_kernel_is_our_mistake(head: Remote) -> None:
    with pytest.raises(ValueError, match="too long for a command line: echo xx"):
        head.run(("echo", "x" * 100_000))


def test_programs_are_run_and_not_the_builtins_of_a_shell(head: Remote) -> None:
    """dash's own echo would turn the two characters into a line break."""
    assert head.run(("echo", r"a\nb")).stdout == "a\\nb\n"


def test_exit_code_zero_is_an_answer(head: Remote) -> None:
    result = head.run(("sh", "-c", "echo out; echo err >&2"))
    assert (result.stdout, result.stderr, result.code) == ("out\n", "err\n", 0)


def test_other_exit_codes_are_answers_where_we_say_so(head: Remote) -> None:
    assert head.run(("sh", "-c", "exit 3"), ok=(0, 3)).code == 3
    with pytest.raises(CommandFailed):
        head.run(("true",), ok=(1,))


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        pytest.param("exit 3", "exit code 3", id="exit code"),
        pytest.param("exit 255", "exit code 255", id="exit code above the signals"),
        pytest.param("kill -KILL $$", "killed by SIGKILL", id="signal"),
        pytest.param("kill -KILL 0", "killed", id="the whole session"),
    ],
)
def test_a_failure_says_how_it_ended(head: Remote, script: str, ended: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        head.run(("sh", "-c", f"echo before >&2; {script}"))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"head: {ended}: sh -c ")
    assert lines[1] == "before"


def test_a_killed_command_is_a_failure_even_where_minus_one_would_be_an_answer(
    head: Remote,
) -> None:
    with pytest.raises(CommandFailed, match="killed by SIGSEGV"):
        head.run(("sh", "-c", "kill -SEGV $$"), ok=(0, 1, 255))


def test_an_absent_program_is_code_127(head: Remote) -> None:
    assert head.run(("no-such-program",), ok=(127,)).code == 127


def test_standard_input_is_empty_unless_given(head: Remote) -> None:
    assert head.run(("cat",), timeout=10).stdout == ""


@pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_000])
def test_standard_input_arrives_whole(worker: Remote, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    assert worker.run(("wc", "-c"), stdin=data[:size]).stdout.split() == [str(size)]


def test_a_command_may_end_before_it_read_its_standard_input(head: Remote) -> None:
    assert head.run(("head", "-c", "3"), stdin=b"abc" + b"x" * 5_000_000).stdout == "abc"
    assert head.run(("sh", "-c", "exit 4"), stdin=b"x" * 5_000_000, ok=(4,)).code == 4


def test_input_and_output_flow_at_the_same_time(head: Remote) -> None:
    """A filter blocks on its output before it has read all of its input."""
    data = b"0123456789abcde\n" * 400_000
    assert len(head.run(("cat",), stdin=data).stdout) == len(data)


@pytest.mark.parametrize("node", ["head", "worker"])
def test_much_output_on_both_streams_does_not_hang(
    node: str, request: pytest.FixtureRequest
) -> None:
    connection: Remote = request.getfixturevalue(node)
    script = "yes out | head -c 6000000; yes err | head -c 6000000 >&2; echo end"
    result = connection.run(("sh", "-c", script), timeout=60)
    assert len(result.stdout) == 6_000_004
    assert len(result.stderr) == 6_000_000


def test_the_last_output_of_an_ended_command_is_not_lost(head: Remote) -> None:
    for _ in range(30):
        assert len(head.run(("head", "-c", "300000", "/dev/zero")).stdout) == 300_000


def test_a_background_child_that_keeps_the_output_open_does_not_hold_us(
    head: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LINGER", 0.5)
    assert head.run(("sh", "-c", "sleep 60 & echo started"), timeout=30).stdout == "started\n"


def test_output_that_is_no_utf8_is_replaced(head: Remote) -> None:
    assert head.run(("printf", r"\351t\351\n")).stdout == "\ufffdt\ufffd\n"


def test_output_is_told_while_it_comes(head: Remote) -> None:
    """And a character that arrives in two pieces stays whole."""
    told: list[str] = []
    script = r"printf 'a\303'; sleep 0.3; printf '\251b'"
    result = head.run(("sh", "-c", script), on_output=told.append)
    assert "".join(told) == result.stdout == "aéb"
    assert len(told) == 2


def test_what_is_told_need_not_be_kept(head: Remote) -> None:
    """A log that is followed for days must not fill our memory."""
    told: list[str] = []
    script = "seq 100000; echo lost >&2"
    result = head.run(("sh", "-c", script), on_output=told.append, keep=False)
    assert "".join(told).split() == [str(number) for number in range(1, 100_001)]
    assert (result.stdout, result.stderr, len(told) > 5) == ("", "lost\n", True)


def test_the_locale_does_not_depend_on_the_node(start: Start, only: LogIn) -> None:
    node = start(LC_ALL="de_DE.UTF-8", LANG="de_DE.UTF-8")
    connection = only(node)
    assert connection.run(("sh", "-c", "echo $LC_ALL")).stdout == "C.UTF-8\n"


def test_many_commands_at_once_share_the_sessions_of_one_connection(
    pair: tuple[Sshd, Sshd], head: Remote
) -> None:
    before = pair[0].logins
    with ThreadPoolExecutor(20) as pool:
        said = pool.map(lambda n: head.run(("sh", "-c", f"sleep 0.2; echo {n}")).stdout, range(20))
        assert list(said) == [f"{number}\n" for number in range(20)]
    assert pair[0].logins == before


def test_a_node_that_grants_fewer_sessions_is_waited_for(start: Start, only: LogIn) -> None:
    connection = only(start("MaxSessions 2"))
    with ThreadPoolExecutor(6) as pool:
        ends = pool.map(lambda _: connection.run(("sleep", "0.1")).code, range(6))
        assert list(ends) == [0] * 6


def test_a_command_that_talks_has_our_ends_of_its_streams(worker: Remote) -> None:
    stream = worker.start(("cat",), shown="talk")
    stream.settimeout(5)
    for word in (b"one", b"two"):
        stream.sendall(word)
        assert stream.recv(100) == word
    stream.shutdown_write()
    assert stream.recv(100) == b""
    stream.close()


def test_threads_do_not_mix_their_output(head: Remote) -> None:
    barrier = threading.Barrier(6)

    def say(letter: str) -> bool:
        barrier.wait()
        script = f"yes {letter} | head -c 200000"
        return set(head.run(("sh", "-c", script)).stdout) == {letter, "\n"}

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(say, "abcdef"))

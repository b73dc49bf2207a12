"""The command line: what it takes, what it prints, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import cli
from flows.steps import Steps, conduct
from tasks.report import Report

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        pytest.param(["check", "lab"], {"verb": "check", "json": False}, id="check"),
        pytest.param(["status", "lab", "--json"], {"verb": "status", "json": True}, id="status"),
        pytest.param(
            ["deploy", "lab"],
            {
                "verb": "deploy",
                "json": False,
                "dry_run": False,
                "restart": "if-changed",
                "force": False,
            },
            id="deploy",
        ),
        pytest.param(
            ["deploy", "--dry-run", "--restart=always", "--force", "lab", "--json"],
            {"verb": "deploy", "json": True, "dry_run": True, "restart": "always", "force": True},
            id="deploy with everything",
        ),
        pytest.param(
            ["rollback", "lab"],
            {"verb": "rollback", "json": False, "dry_run": False, "release": ""},
            id="rollback",
        ),
        pytest.param(
            ["rollback", "lab", "1a2b", "--dry-run"],
            {"verb": "rollback", "json": False, "dry_run": True, "release": "1a2b"},
            id="rollback to one release",
        ),
        pytest.param(
            ["rollback", "lab", "--json", "1a2b"],
            {"verb": "rollback", "json": True, "dry_run": False, "release": "1a2b"},
            id="rollback with the release behind an option",
        ),
        pytest.param(["releases", "lab"], {"verb": "releases", "json": False}, id="releases"),
        pytest.param(["diff", "lab"], {"verb": "diff", "json": False}, id="diff"),
        pytest.param(
            ["destroy", "lab", "--dry-run"],
            {"verb": "destroy", "json": False, "dry_run": True},
            id="destroy",
        ),
        pytest.param(
            ["logs", "lab"],
            {"verb": "logs", "node": None, "follow": False, "lines": 200},
            id="logs",
        ),
        pytest.param(
            ["logs", "lab", "--node=head", "--follow", "--lines=9"],
            {"verb": "logs", "node": "head", "follow": True, "lines": 9},
            id="logs with everything",
        ),
        pytest.param(
            ["bundle", "lab"],
            {"verb": "bundle", "json": False, "output": None, "lines": 2000},
            id="bundle",
        ),
        pytest.param(
            ["bundle", "lab", "-o", "x.tar.gz", "--json", "--lines=9"],
            {"verb": "bundle", "json": True, "output": "x.tar.gz", "lines": 9},
            id="bundle with everything",
        ),
        pytest.param(
            ["register", "lab"], {"verb": "register", "json": False, "notify": None}, id="register"
        ),
        pytest.param(
            ["register", "lab", "--json", "--notify=slack-webhook/ops"],
            {"verb": "register", "json": True, "notify": "slack-webhook/ops"},
            id="register with everything",
        ),
    ],
)
def test_what_it_takes(words: list[str], chosen: dict[str, Any]) -> None:
    assert vars(cli.parse(words)) == chosen | {"cluster": "lab"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param([], "the following arguments are required: VERB", id="nothing"),
        pytest.param(["deploy"], "the following arguments are required: NAME", id="no name"),
        pytest.param(
            ["install", "lab"],
            "argument VERB: invalid choice: 'install'",
            id="another verb",
        ),
        pytest.param(["rollback", "lab", "a", "b"], "unrecognized arguments: b", id="two releases"),
        pytest.param(["check", "lab", "--dry-run"], "unrecognized arguments: --dry-run", id="flag"),
        pytest.param(
            ["deploy", "lab", "--restart", "never"],
            "argument --restart: invalid choice: 'never'",
            id="another value",
        ),
        pytest.param(
            ["logs", "lab", "--lines", "0"],
            "argument --lines: '0': allowed: a count, such as 500",
            id="no count",
        ),
        pytest.param(
            ["register", "lab", "--notify", "slack"],
            "argument --notify: 'slack': allowed: TYPE/NAME, such as slack-webhook/ops",
            id="a block without its type",
        ),
    ],
)
def test_usage_errors_are_told_on_stderr_with_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    assert said in printed.err


@pytest.mark.parametrize("words", [["--help"], ["deploy", "--help"], ["deploy"]])
def test_help_and_usage_errors_do_not_wait_for_prefect(words: list[str]) -> None:
    script = (
        "import sys\nfrom flows.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n"
        "    slow = {'prefect', 'pydantic', 'fabric', 'docker', 'rich'} & set(sys.modules)\n"
        "    print(ended.code, sorted(slow), file=sys.stderr)\n"
    )
    argv = [sys.executable, "-c", script, *words]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    code = 0 if "--help" in words else 2
    assert said.stderr.splitlines()[-1] == f"{code} []"


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words.endswith(
        "exit codes: 0 done; 1 failed; 2 bad spec or usage; 3 blocked by preflight; "
        "4 locked by another run"
    )


# --- without a Prefect API ----------------------------------------------------------------------


def report(code: int) -> Report:
    error = None if code == 0 else "it broke"
    return Report(
        cluster="sparks",
        state="failed" if code else "completed",
        outcome="unchanged",
        seconds=1.0,
        error=error,
        exit_code=code,
    )


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_is_the_report_s(
    code: int, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._tell(report(code), as_json=as_json, every_check=False) == code
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["state"] == ("failed" if code else "completed")
    else:
        assert out.splitlines()[-1] == (
            f"sparks: {'failed' if code else 'completed'}, unchanged, 1.0 s"
        )


VERBS = "check deploy status releases rollback diff bench watch destroy"


@pytest.mark.parametrize("verb", VERBS.split())
def test_every_verb_has_a_flow_and_the_same_body(verb: str) -> None:
    flow, body = cli._flow(verb)
    assert flow.name == verb
    assert body("no-such-cluster", {}).exit_code == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        pytest.param(None, "", id="none is configured"),
        pytest.param("http://127.0.0.1:9/api", "does not answer", id="it does not answer"),
        pytest.param("127.0.0.1:9", "does not answer", id="it is no URL"),
    ],
)
def test_without_a_prefect_api_it_runs_by_itself(
    url: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with temporary_settings({PREFECT_API_URL: url}):
        assert cli._prefect_api() is None
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (said in printed.err) and bool(said) == bool(printed.err)


def test_ctrl_c_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_options: Any) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["deploy", "lab", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "interrupted: what ran on the nodes for this run was ended\n"


@pytest.mark.parametrize("verb", ["logs", "bundle"])
def test_a_cluster_without_a_spec_is_a_usage_error(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with temporary_settings({PREFECT_API_URL: None}):
        assert cli.main([verb, "no-such-cluster"]) == 2
    printed = capsys.readouterr()
    assert "no-such-cluster.yaml: no such file" in printed.out + printed.err


def test_a_run_that_never_began_is_a_report() -> None:
    def body(_steps: Steps) -> None:
        pytest.fail("it must not begin")

    assert conduct("no-such-cluster", body).exit_code == 2

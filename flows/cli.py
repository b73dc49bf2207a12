"""The command line: `sparkrail VERB NAME`."""

import argparse
import http.client
import logging
import os
import sys
import urllib.request
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.report import Report

# Importing Prefect takes seconds: `--help` and usage errors must not wait for it, so that every
# import of ours stands inside the function that needs it.

EPILOG = """\
exit codes: 0 done; 1 failed; 2 bad spec or usage; 3 blocked by preflight; 4 locked by another run
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="sparkrail",
        description="Bring up, prove and redeploy a large language model over several GPU nodes.",
        epilog=EPILOG,
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in (
        ("check", "report every problem on every node; changes nothing"),
        ("deploy", "bring the model up, or leave it alone when nothing has changed"),
        ("status", "tell what runs where against what was asked; changes nothing"),
        ("logs", "show what the server, Ray and the ranks say; changes nothing"),
        ("bundle", "write an archive for a bug report, without secrets; changes nothing"),
        ("releases", "list what was deployed, newest first; changes nothing"),
        ("rollback", "start a release on record again"),
        ("diff", "name how the nodes differ from the spec and the record; changes nothing"),
        ("bench", "measure how fast the running model is"),
        ("watch", "look at the running model once, as the watch does every few minutes"),
        ("destroy", "stop everything of ours and take our files away"),
        ("register", "create or update what Prefect needs to deploy it by itself, and nightly"),
    ):
        command = verbs.add_parser(verb, help=text, description=text, epilog=EPILOG)
        command.add_argument(
            "cluster", metavar="NAME", help="deployments/clusters/NAME.yaml, or a path"
        )
        if verb != "logs":
            command.add_argument("--json", action="store_true", help="print one JSON document only")
        if verb == "logs":
            command.add_argument("--node", metavar="N", help="of this node only")
            command.add_argument(
                "--follow", action="store_true", help="go on with what comes, until Ctrl-C"
            )
        if verb in ("logs", "bundle"):
            command.add_argument(
                "--lines",
                metavar="COUNT",
                type=_count,
                default=200 if verb == "logs" else 2000,
                help="the last ones of each log (default: %(default)s)",
            )
        if verb == "bundle":
            command.add_argument(
                "-o", "--output", metavar="FILE", help="default: sparkrail-NAME-TIME.tar.gz here"
            )
        if verb == "rollback":
            command.add_argument(
                "release",
                metavar="RELEASE",
                nargs="?",
                default="",
                help="as `releases` lists it, or its beginning; the newest that does not run",
            )
        if verb in ("deploy", "destroy", "rollback"):
            command.add_argument(
                "--dry-run", action="store_true", help="say what would be done, change nothing"
            )
        if verb == "deploy":
            command.add_argument(
                "--restart",
                choices=("if-changed", "always"),
                default="if-changed",
                help="always: start anew even when nothing has changed",
            )
            command.add_argument(
                "--force", action="store_true", help="try a release again that failed before"
            )
        if verb == "register":
            command.add_argument(
                "--notify",
                metavar="TYPE/NAME",
                type=_block,
                help="a notification block, such as slack-webhook/ops: told when a deploy failed, "
                "was rolled back, did not start, or works again",
            )
    return top


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: a count, such as 500")
    return int(text)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of one command; RELEASE may also stand behind them."""
    top = parser()
    options, left = top.parse_known_args(argv)
    # argparse takes an optional word only right behind the one before it (bpo-14191).
    words = [word for word in left if not word.startswith("-")]
    if getattr(options, "release", None) == "" and len(left) == len(words) == 1:
        options.release = words[0]
    elif left:
        top.error(f"unrecognized arguments: {' '.join(left)}")
    return options


def _block(text: str) -> str:
    kind, _, name = text.partition("/")
    if not kind or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: TYPE/NAME, such as slack-webhook/ops")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = parse(argv)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")
    # As in deployments/prefect.yaml: a run that is silent for longer is taken for dead.
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    if options.verb == "register":
        return _register(options)
    if options.verb == "logs":
        return _logs(options)
    try:
        if options.verb == "bundle":
            return _bundle(options)
        report = _run(options)
    except KeyboardInterrupt:
        print("interrupted: what ran on the nodes for this run was ended", file=sys.stderr)
        return 1
    return _tell(report, as_json=options.json, every_check=options.verb == "check")


def _tell(report: "Report", *, as_json: bool, every_check: bool) -> int:
    from flows import terminal
    from tasks.report import as_json as document

    if as_json:
        print(document(report))
    else:
        terminal.show(report, every_check=every_check)
    return report.exit_code


def _register(options: argparse.Namespace) -> int:
    from flows import terminal
    from flows.register import register
    from flows.registration.changes import as_json

    registration = register(options.cluster, notify=options.notify)
    if options.json:
        print(as_json(registration))
    else:
        terminal.show_registration(registration)
    return registration.exit_code


def _logs(options: argparse.Namespace) -> int:
    from flows.logs import logs
    from tasks.log_streams import Wanted

    return logs(options.cluster, Wanted(options.lines, options.follow), options.node)


def _bundle(options: argparse.Namespace) -> int:
    from flows.bundle import bundle
    from flows.steps import LISTENER
    from flows.terminal import Terminal

    terminal = Terminal()
    watching = LISTENER.set(terminal)
    try:
        made = bundle(options.cluster, options.lines, options.output, prefect=bool(_prefect_api()))
    finally:
        LISTENER.reset(watching)
        terminal.stop()
    print(made.as_json() if options.json else made.told)
    return made.exit_code


def _run(options: argparse.Namespace) -> "Report":
    import httpx

    from flows.steps import LISTENER
    from flows.terminal import Terminal

    flow, body = _flow(options.verb)
    names = ("dry_run", "restart", "force", "release")
    chosen = {name: getattr(options, name) for name in names if name in options}
    terminal = Terminal()
    watching = LISTENER.set(terminal)
    try:
        if _prefect_api():
            return _through_prefect(flow, options.cluster, chosen)
        return body(options.cluster, chosen)
    except httpx.HTTPError as error:
        away = f"the Prefect API is away ({error})"
        if terminal.report is None:
            raise SystemExit(away) from error
        print(f"{away}: it will not learn how this run ended", file=sys.stderr)
        return terminal.report
    finally:
        LISTENER.reset(watching)
        terminal.stop()


def _flow(verb: str) -> tuple[Any, Callable[[str, dict[str, Any]], "Report"]]:
    from flows import bench, check, deploy, destroy, diff, oversee, releases, rollback, status
    from flows.steps import conduct

    def roll_back(cluster: str, chosen: dict[str, Any]) -> "Report":
        release = chosen.pop("release", "")
        return conduct(cluster, rollback.going_back(release), **chosen)

    if verb == "rollback":
        return rollback.rollback, roll_back
    flows: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "check": (check.check, check.look, {"dry_run": True}),
        "deploy": (deploy.deploy, deploy.bring_up, {}),
        "status": (status.status, status.tell, {"dry_run": True}),
        "releases": (releases.releases, releases.list_releases, {"dry_run": True}),
        "diff": (diff.diff, diff.tell_differences, {"dry_run": True}),
        "bench": (bench.bench, bench.measure, {}),
        "watch": (oversee.watch, oversee.oversee, {}),
        "destroy": (destroy.destroy, destroy.take_down, {}),
    }
    flow, body, fixed = flows[verb]
    return flow, lambda cluster, chosen: conduct(cluster, body, **fixed, **chosen)


def _through_prefect(flow: Any, cluster: str, chosen: dict[str, Any]) -> "Report":
    from prefect import tags

    from flows.steps import RunFailed
    from tasks.report import Report

    # From its start: automations know a cluster's runs by their tag.
    with tags(*_tag(cluster)):
        state = flow(cluster=cluster, **chosen, return_state=True)
    result = state.result(raise_on_failure=False)
    report = result.report if isinstance(result, RunFailed) else result
    if not isinstance(report, Report):
        raise SystemExit(f"the flow run ended as {state.name}: {state.message}")
    return report


def _tag(cluster: str) -> list[str]:
    from tasks.errors import InvalidSpec
    from tasks.inventory import load_cluster

    try:
        return [f"cluster:{load_cluster(cluster).name}"]
    except InvalidSpec:  # The run itself tells what is wrong with it.
        return []


def _prefect_api() -> str | None:
    """The Prefect API to run under, if one is configured and answers."""
    from prefect.settings import PREFECT_API_URL

    url: str | None = PREFECT_API_URL.value()
    if not url:
        return None
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=3):
            return url
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(
            f"the Prefect API at {url} does not answer ({error}); running without it",
            file=sys.stderr,
        )
        return None

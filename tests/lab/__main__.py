"""The lab's command line: `python -m tests.lab up|down|status|exec|break`."""

import argparse
import json
import os
import sys
import time

from tests.lab import faults, lab, requirements
from tests.lab.command import say
from tests.lab.errors import LabError
from tests.lab.layout import BASES, Lab, Shape


def main() -> int:
    options = parser().parse_args()
    try:
        requirements.check()
        options.action(options)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; `down` removes what is there", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.lab", description=lab.__doc__)
    actions = top.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, help_line: str) -> argparse.ArgumentParser:
        found = actions.add_parser(name, help=help_line, description=help_line)
        found.set_defaults(action=globals()[f"{name}_command"])
        found.add_argument("--name", default="lab", help="lab (the default) or lab-...")
        return found

    _add_shape(action("up", "bring a lab up, or make a running one whole"))
    down = action("down", "leave nothing of a lab behind")
    down.add_argument("--all", action="store_true", help="every lab on this machine")
    action("status", "what is up").add_argument("--json", action="store_true")
    run = action("exec", "run a command on the control or on a node")
    run.add_argument("node", help="control, head, worker1, ..")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    breaks = action("break", "break something on a node, or mend it")
    breaks.add_argument("node", help="head, worker1, ..")
    breaks.add_argument("fault", choices=faults.NAMES)
    breaks.add_argument("mib", nargs="?", type=int, help="how much hold-gpu holds")
    return top


def _add_shape(up: argparse.ArgumentParser) -> None:
    up.add_argument("--workers", type=int, default=1, metavar="N")
    up.add_argument("--base", choices=BASES, default=BASES[0], help="the nodes' Debian")
    up.add_argument("--fabric-rate", metavar="RATE", help="limit of each fabric link: 400mbit")
    up.add_argument("--containerd-store", action="store_true", help="docker's other image store")
    up.add_argument("--no-engine", action="store_true", help="no engine image and no model")
    up.add_argument("--no-docker", action="store_true", help="nodes without a docker engine")


def up_command(options: argparse.Namespace) -> None:
    began = time.monotonic()
    where = Lab(options.name)
    shape = Shape(
        workers=options.workers,
        base=options.base,
        fabric_rate=options.fabric_rate,
        docker=not options.no_docker,
        engine=not (options.no_engine or options.no_docker),
        containerd_store=options.containerd_store,
    )
    lab.up(where, shape)
    say(f"{where.name} is up ({time.monotonic() - began:.1f} s); its cluster spec is {where.spec}")


def down_command(options: argparse.Namespace) -> None:
    for where in lab.every_lab() if options.all else [Lab(options.name)]:
        lab.down(where)
        say(f"{where.name} is down")


def status_command(options: argparse.Namespace) -> None:
    found = lab.status(Lab(options.name))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for node in found["nodes"]:
        services = [name for name in ("sshd", "docker") if node[name]]
        print(
            f"{node['name']:<8} {node['state']:<6} {node['fabric_address']:<10} "
            f"{node['fabric_interface']:<13} link {node['link']:<4} {' '.join(services)}"
        )


def exec_command(options: argparse.Namespace) -> None:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LabError("exec needs a command: exec NODE -- CMD ...")
    argv = lab.command_line(Lab(options.name), options.node, command)
    sys.stdout.flush()
    os.execvp(argv[0], argv)


def break_command(options: argparse.Namespace) -> None:
    lab.break_node(Lab(options.name), options.node, options.fault, options.mib)


if __name__ == "__main__":
    sys.exit(main())

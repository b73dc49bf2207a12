"""`make bench`: transfers against what one would do by hand, side by side on labs of this machine.

Every figure is the median of several repetitions. Needs root. Exit code 1: something wanted was
missed.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from dataclasses import asdict

from tests.bench.rows import Row, table

MODULES = ("images", "weights")


def measured(module: str, repetitions: int) -> list[Row]:
    """The rows of one module, each of which brings a lab up and takes it down."""
    found = importlib.import_module(f"tests.bench.{module}")
    rows: list[Row] = found.measure(repetitions)
    return rows


def main() -> int:
    there = [name for name in MODULES if importlib.util.find_spec(f"tests.bench.{name}")]
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(there)}")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    unknown = set(options.modules) - set(there)
    if unknown or options.repetitions < 1:
        parser.error(f"no module {', '.join(sorted(unknown))}" if unknown else "no repetitions")
    rows = [
        row for module in options.modules or there for row in measured(module, options.repetitions)
    ]
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else table(rows))
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

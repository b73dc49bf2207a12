"""What the measurements of `make bench` have in common: one row of its table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure, beside what it is compared to and what it should be."""

    name: str
    value: float
    unit: str
    compared_to: str = ""
    ratio: float | None = None
    wanted: str = ""
    met: bool | None = None  # Where something is wanted.


def compared(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    other: str,
    others: Sequence[float],
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """The medians of two series from one run, and how they relate."""
    value, reference = statistics.median(values), statistics.median(others)
    ratio = value / reference
    wanted = [f"<= {at_most:g}"] if at_most is not None else []
    wanted += [f">= {at_least:g}"] if at_least is not None else []
    met = (at_most is None or ratio <= at_most) and (at_least is None or ratio >= at_least)
    return Row(
        name=name,
        value=round(value, 3),
        unit=unit,
        compared_to=f"{other}: {reference:.3g} {unit}",
        ratio=round(ratio, 3),
        wanted=", ".join(wanted),
        met=met if wanted else None,
    )


def table(rows: Sequence[Row]) -> str:
    """All rows in Markdown, as the README shows them."""
    lines = [
        "| measured | median | compared to | ratio | wanted |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        wanted = row.wanted + {True: "", False: " (missed)", None: ""}[row.met]
        value = f"{row.value:.3g} {row.unit}"
        lines.append(f"| {row.name} | {value} | {row.compared_to} | {ratio} | {wanted} |")
    return "\n".join(lines)

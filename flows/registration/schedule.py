"""When a schedule runs, by the code of the Prefect server itself, before a server is asked."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from prefect.server.schemas.schedules import CronSchedule

from blocks.cluster import Nightly
from tasks.errors import InvalidSpec

AHEAD = timedelta(days=400)  # Every yearly clock change comes at least once.


def next_run(nightly: Nightly, now: datetime) -> datetime:
    """The first run after now, on the clock of the schedule's zone."""
    try:
        times = _times(nightly.cron, nightly.timezone, now, now + timedelta(days=5 * 366))
    except ValueError:  # As of a date that no calendar has.
        times = []
    if not times:
        raise InvalidSpec(
            f"nightly.cron: {nightly.cron} never comes",
            remedy="Nothing was touched. Give a day that exists, such as 0 4 * * *.",
        )
    return times[0].astimezone(ZoneInfo(nightly.timezone))


def clock_changes(nightly: Nightly, now: datetime) -> list[str]:
    """What the zone's clock changes of the coming year do to the schedule, in a line for each."""
    zone = ZoneInfo(nightly.timezone)
    return [
        line
        for moment in _changes(zone, now.astimezone(UTC), now.astimezone(UTC) + AHEAD)
        if (line := _effect(nightly, zone, moment))
    ]


def _effect(nightly: Nightly, zone: ZoneInfo, moment: datetime) -> str:
    before, after = (_wall(at, zone) for at in (moment - timedelta(seconds=1), moment))
    before += timedelta(seconds=1)
    first, last = min(before, after), max(before, after)
    # On a clock that never changes, these are the times that stand in the spec.
    touched = [
        time
        for time in _times(nightly.cron, "UTC", first.replace(tzinfo=UTC), last.replace(tzinfo=UTC))
        if first <= time.replace(tzinfo=None) < last
    ]
    if not touched:
        return ""
    times = ", ".join(f"{time:%H:%M}" for time in touched[:3])
    if after > before:
        what, so = "skip", "that run comes later than you wrote, or not at all"
    else:
        what, so = "repeat", "which of the two counts is the scheduler's choice"
    return (
        f"nightly: clocks in {nightly.timezone} {what} {first:%H:%M} to {last:%H:%M} on "
        f"{first:%Y-%m-%d}, and {times} with it: {so}. An hour outside is steady, such as 04:00."
    )


def _changes(zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[datetime]:
    """The moments at which clocks are put forward or back."""
    day, offset = start, start.astimezone(zone).utcoffset()
    while day < end:
        following = day + timedelta(days=1)
        if following.astimezone(zone).utcoffset() != offset:
            yield _moment(zone, day, following)
            offset = following.astimezone(zone).utcoffset()
        day = following


def _moment(zone: ZoneInfo, early: datetime, late: datetime) -> datetime:
    old = early.astimezone(zone).utcoffset()
    while late - early > timedelta(seconds=1):
        middle = early + (late - early) / 2
        if middle.astimezone(zone).utcoffset() == old:
            early = middle
        else:
            late = middle
    return late.replace(microsecond=0)


def _wall(moment: datetime, zone: ZoneInfo) -> datetime:
    return moment.astimezone(zone).replace(tzinfo=None)


def _times(cron: str, timezone: str, start: datetime, end: datetime) -> list[datetime]:
    schedule = CronSchedule(cron=cron, timezone=timezone)
    found = asyncio.run(schedule.get_dates(n=100, start=start, end=end))
    # Prefect's own kind of time is on its way out, with a warning at each use.
    return [datetime.fromtimestamp(time.timestamp(), UTC) for time in found]

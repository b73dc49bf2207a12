"""The proof that what was stopped is gone and its memory is back, and the evidence of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from blocks import Cluster
from tasks.converge import Gone, Ready, Waiting
from tasks.gpu_holders import Holders
from tasks.gpu_looks import Look, Row
from tasks.owners import Held
from tasks.residue_policy import Room
from tasks.residue_steps import Have, Stop, judge

SETTLE = 3.0  # Seconds in which a supervisor would have started a bare process again.
SLACK = 0.05
LEAST_SLACK = 64
HIDDEN = 1024  # MiB that a driver takes for itself at most.


@dataclass(frozen=True)
class Done:
    """What was done about one owner."""

    stop: Stop
    said: str


def proof(before: Have, now: Have, done: Sequence[Done], seconds: float) -> Ready | Waiting | Gone:
    """Ready when no row of a stopped one is left, nothing came back, and the memory did."""
    again = [back for each in done for back in came_back(each.stop, before, now)]
    if again:
        return Gone(
            f"came back: {'; '.join(again)}",
            remedy="Something starts it again; stop that, or name it instead.",
        )
    rest = [left for each in done for left in remaining(each.stop, now.holders.look)]
    if rest:
        return Waiting(f"still listed: {'; '.join(rest)}", progress=len(rest))
    if now.outlived:
        pids = tuple(process.pid for process in now.outlived)
        return Waiting(f"ours still run: {', '.join(map(str, now.outlived))}", progress=pids)
    missing = [lack for lack in shortfall(before, now, rows_of(before, done)) if lack]
    if missing and not (now.room and now.room.enough):
        return Waiting(f"memory is not back: {'; '.join(missing)}", progress=tuple(missing))
    bare = any(each.stop.processes for each in done)
    if bare and seconds < SETTLE:
        return Waiting("it may be started again")
    return Ready(now)


def remaining(stop: Stop, now: Look) -> list[str]:
    """The rows of what was stopped; one whose pid another process has now is none."""
    started = {process.pid: process.started for process in stop.held.processes}
    found = []
    for row in now.rows:
        process = now.process(row.pid)
        gone = process is not None and (process.ended or process.started != started.get(row.pid))
        if row.pid in {each.pid for each in stop.held.rows} and not gone:
            found.append(f"pid {row.pid} ({row.name})")
    return found


def came_back(stop: Stop, before: Have, now: Have) -> list[str]:
    """What holds memory or runs again in the place of what was stopped."""
    since = before.holders.look.ticks
    owner = stop.held.owner
    if owner.kind in ("container", "unit"):
        return [
            f"{held.owner} as {process}"
            for held in now.holders.held
            if (held.owner.kind, held.owner.name) == (owner.kind, owner.name)
            for process in held.processes
            if process.started > since
        ]
    commands = {(each.user, each.command) for each in stop.processes if each.command}
    return [
        f"{owner} as {process}"
        for process in now.holders.look.processes
        if process.started > since
        and not process.ended
        and (process.user, process.command) in commands
    ]


def rows_of(before: Have, done: Sequence[Done]) -> list[Row]:
    """What was held by all that is gone now."""
    ended = {row.pid for each in done for row in each.stop.held.rows}
    ended |= {process.pid for process in before.outlived}
    return [row for row in before.holders.look.rows if row.pid in ended]


def shortfall(before: Have, now: Have, rows: Sequence[Row]) -> list[str]:
    """Where less came back than was held; what the driver does not tell cannot be missed."""
    first, last = before.holders.look, now.holders.look
    if before.room is None:
        return []
    if before.room.unified:
        held = sum(row.used_mib or 0 for row in rows)
        back = last.memory.available_mib - first.memory.available_mib
        return [_short("", held, back)]
    found = []
    after = {gpu.uuid: gpu for gpu in last.gpus}
    for gpu in first.gpus:
        held = sum(row.used_mib or 0 for row in rows if row.gpu == gpu.uuid)
        free = after[gpu.uuid].free_mib if gpu.uuid in after else None
        if gpu.free_mib is not None and free is not None:
            found.append(_short(f" of GPU {gpu.index}", held, free - gpu.free_mib))
    return found


def _short(where: str, held: int, back: int) -> str:
    if back >= held - max(LEAST_SLACK, int(SLACK * held)):
        return ""
    return f"{held} MiB{where} were held, {back} MiB are back"


def back(before: Have, now: Have, done: Sequence[Done]) -> str:
    """How much more there is where something was held, for people."""
    first, last = before.holders.look, now.holders.look
    if before.room is None or before.room.unified:
        return f"{last.memory.available_mib - first.memory.available_mib} MiB back"
    after = {gpu.uuid: gpu.free_mib or 0 for gpu in last.gpus}
    held = {row.gpu for row in rows_of(before, done)}
    sizes = {
        gpu.index: after.get(gpu.uuid, 0) - (gpu.free_mib or 0)
        for gpu in first.gpus
        if gpu.uuid in held
    }
    if len(first.gpus) == 1:
        return f"{sum(sizes.values())} MiB back"
    return ", ".join(f"{size} MiB back on GPU {index}" for index, size in sizes.items())


# --- what people are told ------------------------------------------------------------------------


def hidden(have: Have) -> list[str]:
    """Memory that is taken although nvidia-smi lists nobody who takes it."""
    look, found = have.holders.look, []
    for gpu in look.gpus:
        listed = sum(row.used_mib or 0 for row in look.rows if row.gpu == gpu.uuid)
        unknown = (gpu.used_mib or 0) - listed
        told = all(row.used_mib is not None for row in look.rows)
        if gpu.used_mib is not None and told and unknown > HIDDEN and not gpu.mig:
            found.append(f"an unknown holder has {unknown} MiB of GPU {gpu.index}")
    short = have.room is not None and have.room.unified and not have.room.enough
    if short and not have.holders.held:
        found.append(f"an unknown holder: {have.room}, and nvidia-smi lists nobody")
    if not found:
        return []
    return [*found, *suspects(look, with_sizes=short)]


def suspects(look: Look, *, with_sizes: bool) -> list[str]:
    """Who has the GPU open, and on unified memory who is largest."""
    opened = [str(found) for pid in look.openers if (found := look.process(pid))]
    said = [f"/dev/nvidia* is open in {', '.join(opened)}"] if opened else []
    if look.uid != 0:
        said.append(f"{look.user} sees only its own openers of /dev/nvidia*")
    if with_sizes and look.largest:
        sizes = [
            f"{found} {found.rss_mib} MiB" for pid in look.largest if (found := look.process(pid))
        ]
        said.append(f"largest: {', '.join(sizes)}")
    return said


def left_alone(cluster: Cluster, have: Have) -> list[str]:
    """Who else holds memory, and why nobody touches it; and what cannot be told."""
    said = [
        f"{held}; left alone: {found.why}" for held, found in judge(cluster, have) if not found.stop
    ]
    errors = (have.holders.look.rows_error, have.holders.look.gpus_error)
    if any(errors) and cluster.image.gpu_access == "nvidia":
        why = "; ".join(dict.fromkeys(error for error in errors if error))
        said.append(f"cannot tell who holds GPU memory: {why}")
    if have.holders.docker_error:
        said.append(f"docker does not tell whose containers these are: {have.holders.docker_error}")
    return said + hidden(have)


def still_short(room: Room | None) -> list[str]:
    if room is None or room.enough:
        return []
    return [f"too little memory: {room}"]


def evidence(
    cluster: Cluster, before: Have, now: Have | None, done: Sequence[Done], seconds: float
) -> list[dict[str, str]]:
    """The table of who held what, what was done, and what came of it."""
    rows = []
    for each in done:
        after = "not proven"
        if now is not None:
            after = f"gone, {back(before, now, done)} after {seconds:.1f} s"
        rows.append(_row(each.stop.held, each.said, after))
    for held, found in judge(cluster, before):
        if not found.stop:
            rows.append(_row(held, "left alone", found.why))
    return rows


def _row(held: Held, action: str, after: str) -> dict[str, str]:
    pids = ", ".join(dict.fromkeys(f"{row.pid} {row.name}" for row in held.rows))
    return {
        "owner": str(held.owner),
        "processes": pids,
        "held": held.size,
        "action": action,
        "after": after,
    }


def commands_of(stops: Sequence[Stop]) -> list[str]:
    return sorted({process.command for stop in stops for process in stop.processes} - {""})


def waits_for(cluster: Cluster, holders: Holders, ours: Sequence[Held]) -> Waiting | None:
    """Our own processes that have not let go yet, and rows that have outlived their process."""
    if ours:
        pids = tuple(row.pid for held in ours for row in held.rows)
        return Waiting(f"ours still hold memory: {'; '.join(map(str, ours))}", progress=pids)
    dead = [held for held in holders.held if held.owner.kind == "unknown"]
    if dead and cluster.image.gpu_access == "nvidia":
        return Waiting(f"ended processes still hold memory: {'; '.join(map(str, dead))}")
    return None

"""What the demo tells of a worker that came back: how long it took, what it took over, and what that cost its peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from recycle_plugin.observability.absences import Absence
from recycle_plugin.observability.run_history import Failure, RunHistory
from recycle_plugin.render import throughput
from recycle_plugin.runs import RunFailed

BEFORE_S, AFTER_S = 3.5, 8.0  # of the picture, before the kill and after the return


class NotBack(RunFailed):
    """The run had ended before the worker was back for long enough."""


def absence(history: RunHistory, killed: Sequence[Failure]) -> Absence:
    """How the first of the killed workers came back.  Raises RunFailed where it did not, or too late for a figure."""
    found = killed[0].absence
    if not found.is_over:
        raise NotBack(f"the worker of seat {found.seat} did not come back in {history.last} steps: give more --steps")
    if not found.restarted_at or not found.came_at or not found.caught_up_at:
        raise RunFailed(f"seat {found.seat} has a worker again, and the log does not tell how it came")
    if history.last <= found.back_step + 1:
        raise NotBack(f"the worker of seat {found.seat} came back in the last steps: give more --steps")
    return found


def figures(history: RunHistory, killed: Sequence[Failure]) -> dict:
    """The entry ``rejoined`` of report.json: seconds, bytes, and how much longer its peers' steps took meanwhile."""
    back = absence(history, killed)
    assert back.restarted_at and back.came_at and back.caught_up_at and back.back_at  # absence() has seen to it
    before = _steps(history, killed[0].step + 1, back.gone_at, back.came_at)
    during = _steps(history, killed[0].step + 1, back.came_at, back.caught_up_at)
    return {
        "seat": str(back.seat),
        "step": back.back_step,
        "start_up_s": round(back.came_at - back.restarted_at, 4),
        "catch_up_s": round(back.caught_up_at - back.came_at, 4),
        "away_s": round(back.lasted_s, 4),
        "bytes": back.bytes,
        "followed_bytes": back.followed_bytes,
        "peer_step_ratio": round(median(during) / median(before), 3) if before and during else None,
        "step_s_since": round(history.now_s, 4),
    }


def _steps(history: RunHistory, first: int, begins_at: float, ends_at: float) -> list[float]:
    """Seconds of the steps from ``first`` on of which any part lies between two times."""
    return [
        took
        for step, took in history.took.items()
        if step >= first and history.commits[step] > begins_at and history.commits[step] - took < ends_at
    ]


def draw(path: Path, fault_free: RunHistory, failed: RunHistory, killed: Sequence[Failure]) -> None:
    """Write the picture of the throughput over time: it falls with the loss, and comes back with the worker."""
    back = absence(failed, killed)
    on_its_way = (
        ("starts, and builds its model", back.restarted_at, back.came_at),
        ("catches up", back.came_at, back.caught_up_at),
        ("enters, no work yet", back.caught_up_at, back.back_at),
    )
    draw_absence(path, fault_free, failed, killed[0].struck_at, back, on_its_way)


def draw_absence(
    path: Path,
    fault_free: RunHistory,
    failed: RunHistory,
    struck_at: float,
    back: Absence,
    on_its_way: Iterable[tuple[str, float | None, float | None]],
) -> None:
    """Write the picture of the throughput around the absence ``back`` of a worker that was struck at ``struck_at``.

    ``on_its_way``: what it did meanwhile, and from when to when, in seconds, as far as that is known.
    """
    steps = [
        throughput.Step(at - failed.took[step] - struck_at, at - struck_at, failed.rate(failed.took[step], step))
        for step, at in sorted(failed.commits.items())
        if step in failed.took
    ]
    stretches = [
        throughput.Stretch(text, begins - struck_at, ends - struck_at)
        for text, begins, ends in on_its_way
        if begins is not None and ends is not None
    ]
    usual = fault_free.rate(fault_free.now_s, fault_free.last)
    throughput.draw(path, str(back.seat), steps, stretches, usual, -BEFORE_S, back.lasted_s + AFTER_S)


def told(found: dict) -> str:
    """How the worker came back, in a line."""
    sizes = f"{size_text(found['bytes'])} of state"
    if found["followed_bytes"]:
        sizes += f" and {size_text(found['followed_bytes'])} of gradients"
    ratio = found["peer_step_ratio"]
    meanwhile = "" if ratio is None else f", in which steps took {ratio:.2f} of what they had taken"
    return (
        f"seat {found['seat']} has work from step {found['step']} on, {found['away_s']:.1f} s after its loss: "
        f"{found['start_up_s']:.1f} s to start, {found['catch_up_s']:.1f} s to catch up ({sizes}){meanwhile}; since "
        f"then {found['step_s_since']:.3f} s a step"
    )


def size_text(count: int) -> str:
    """Bytes in words, with three digits."""
    for unit, name in ((1_000_000, "MB"), (1000, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"

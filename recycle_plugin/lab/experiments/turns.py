"""Jobs that take turns with the machine, so that their step times can be compared whatever else it does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import Random
from statistics import median
from typing import NamedTuple

from recycle_plugin.lab.experiments.measurements import TooShort
from recycle_plugin.runs import JobRun

RESAMPLES, CONFIDENCE = 4000, 0.95


class Window(NamedTuple):
    """When a run had the machine, in seconds since the epoch, and the processor seconds that it used meanwhile."""

    began: float
    ended: float
    cpu_s: float


def take_turns(jobs: Mapping[str, JobRun], pairs: int, window_s: float) -> dict[str, list[Window]]:
    """Give each of the paused runs the machine in turn, ``pairs`` times, in the other order each time."""
    windows: dict[str, list[Window]] = {kind: [] for kind in jobs}
    for number in range(pairs):
        for kind in sorted(jobs, reverse=bool(number % 2)):
            began, used = time.time(), jobs[kind].cpu_s()
            jobs[kind].go_on()
            time.sleep(window_s)
            ended = time.time()
            jobs[kind].pause()
            windows[kind].append(Window(began, ended, jobs[kind].cpu_s() - used))
    return windows


def step_s(window: Window, commits: Sequence[float]) -> float:
    """Mean seconds of the steps that lie within a window.  Raises TooShort where there are none."""
    inside = [at for at in commits if window.began <= at <= window.ended]
    if len(inside) < 2:
        raise TooShort("a window has no whole step: make --window longer")
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the median, by bootstrap; the same for the same values."""
    draw = Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return medians[tail], medians[-1 - tail]

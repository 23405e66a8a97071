"""Jobs that use the machine in turns, so that their step times stay comparable whatever else it does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from statistics import median
from typing import NamedTuple

import psutil

from recycle_plugin.lab.experiments.measurements import TooShort
from recycle_plugin.lab.runs import JobRun, processes_with

RESAMPLES, CONFIDENCE = 4000, 0.95


class Window(NamedTuple):
    """When a run had the machine, in seconds since the epoch, and the processor seconds that it used."""

    began: float
    ended: float
    cpu_s: float


def pause(run: JobRun) -> None:
    """Stop all processes of the run until :func:`go_on`, so that another run has the machine to itself."""
    _signal(run, signal.SIGSTOP)


def go_on(run: JobRun) -> None:
    """Continue all processes of the run after :func:`pause`."""
    _signal(run, signal.SIGCONT)


def _signal(run: JobRun, number: int) -> None:
    for process in _processes(run):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def cpu_s(run: JobRun) -> float:
    """Return the processor seconds that the run's processes have used."""
    used = 0.0
    for process in _processes(run):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def memory_bytes(run: JobRun) -> int:
    """Return the bytes of memory of the run's processes; shared memory is divided among its users."""
    held = 0
    for process in _processes(run):
        with suppress(psutil.NoSuchProcess):
            held += process.memory_full_info().pss
    return held


def _processes(run: JobRun) -> Iterator[psutil.Process]:
    """Yield the run's processes, including forked workers, whose environment is not visible."""
    workers = {event["pid"] for event in run.events() if event["event"] == "worker"}
    for pid in sorted(workers | {process.pid for process in processes_with(run.mark)}):
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def take_turns(jobs: Mapping[str, JobRun], pairs: int, window_s: float) -> dict[str, list[Window]]:
    """Give each of the paused runs the machine in turn, ``pairs`` times, in alternating order."""
    windows: dict[str, list[Window]] = {kind: [] for kind in jobs}
    for number in range(pairs):
        for kind in sorted(jobs, reverse=bool(number % 2)):
            began, used = time.time(), cpu_s(jobs[kind])
            go_on(jobs[kind])
            time.sleep(window_s)
            ended = time.time()
            pause(jobs[kind])
            windows[kind].append(Window(began, ended, cpu_s(jobs[kind]) - used))
    return windows


def step_s(window: Window, commits: Sequence[float]) -> float:
    """Return the mean seconds of the steps within a window. Raises TooShort if there are none."""
    inside = [at for at in commits if window.began <= at <= window.ended]
    if len(inside) < 2:
        raise TooShort("a window has no whole step: make --window longer")
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval of the median, reproducibly."""
    draw = Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return medians[tail], medians[-1 - tail]

"""Goodput of a job, computed from its events: how much of its time its committed steps are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, nan
from typing import Any

from recycle_plugin.observability.run_history import GO_ON, RunHistory, trained

TIMED = 1000  # most undisturbed steps from which the usual step is taken


class TrainingTime:
    """The effective training time ratio (ETTR) of a job.

    Elsewhere (Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2025) it is the
    share of time in which a job made progress that it kept. Here a job also goes on more slowly, with fewer workers, so
    the committed work is counted::

        ETTR = samples of committed steps that stand × usual seconds a sample / seconds since the start event

    The usual seconds a sample are the median of this job's own steps before the first loss or leave, without the first
    steps (RunHistory.before_s). The ratio is NaN until two steps are committed, and for good if a worker was lost
    before that. The end of the job stops the clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._undisturbed: list[dict] = []  # as in the log: the start, batch sizes, and the first commits
        self._disturbed = False
        self._began = self._ended = nan
        self._step = self._batch = 0
        self._samples = 0
        self._loaded: int | None = None  # the checkpoint from which nothing was trained yet
        self._sizes: list[tuple[int, int]] = []  # (step, samples of each from it on) of steps that stand

    def take(self, kind: str, details: Mapping[str, Any], now: float) -> None:
        """Count an event that happened at ``now``, in seconds since the epoch."""
        if kind in GO_ON and self._loaded is not None:
            self._take_back(self._loaded)
            self._loaded = None
        match kind:
            case "start":
                self._began, self._ended, self._batch = now, inf, max(1, details["job"]["batch"])
            case "batch":
                self._batch = details["batch"]
            case "committed":
                step, size = details["step"], trained(self._batch, details)
                self._samples += size * (max(1, step - self._step) if self._sizes else 1)  # an outline has few steps
                self._step = step
                if not self._sizes or self._sizes[-1][1] != size:
                    self._sizes.append((self._step, size))
            case "loaded":
                self._loaded = details["step"]
            case "lost" | "leaving":
                self._disturbed = True
            case "end" | "finished":
                self._ended = min(self._ended, now)
        self._disturbed |= kind == "loaded" and self._samples > 0
        if not self._disturbed and kind in ("start", "batch", "committed") and len(self._undisturbed) < TIMED:
            self._undisturbed.append({"time": now, "event": kind, **details})

    def _take_back(self, to: int) -> None:
        """Go on from step ``to``: an earlier one, if the load costs anything."""
        while self._step > to and self._sizes:
            first, size = self._sizes[-1]
            after = max(first - 1, to)
            self._samples = max(0, self._samples - (self._step - after) * size)
            self._step = after
            if after < first:
                self._sizes.pop()
        self._step = to

    def ratio(self) -> float:
        since_s = min(self._clock(), self._ended) - self._began
        return self._samples * self._usual_s() / since_s if since_s > 0 else nan

    def _usual_s(self) -> float:
        if not self._undisturbed:
            return nan
        history = RunHistory(tuple(self._undisturbed))
        return history.before_s / max(1, history.batch_from(history.last)[1])


def goodput(history: RunHistory, now: float) -> float:
    """Return the effective training time ratio of a run at ``now``, in seconds since the epoch, NaN if not known."""
    time = TrainingTime(lambda: now)
    for event in history.events:
        time.take(event["event"], event, event["time"])
    return time.ratio()

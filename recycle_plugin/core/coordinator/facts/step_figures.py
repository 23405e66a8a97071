"""Figures of each committed step for observers of the job, from the workers' compute times."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.roster import WorkerId

RECENT = 20  # steps for the median: a loss or a checkpoint makes a few take longer


class StepFigures:
    """Sums of the workers' figures of a step. Figures that a lost worker did not report are missing."""

    def __init__(self) -> None:
        self._said: dict[int, dict[WorkerId, ComputeTime]] = {}  # by step
        self._committed_at: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds
        self._work: dict[int, deque[int]] = {}  # by stage, what all its workers compute in a step, us

    @property
    def step_s(self) -> float | None:
        """The duration of a step, in seconds; None until known."""
        return median(self._steps) if self._steps else None

    def work_s(self, stage: int) -> float | None:
        """Return what all workers of a stage together compute in a step, in seconds; None until known."""
        return median(self._work[stage]) / 1e6 if stage in self._work else None

    def add(self, worker: WorkerId, step: int, time: ComputeTime) -> None:
        """Record what ``step`` took a worker; if it applies the step again, the second time adds to the first."""
        said = self._said.setdefault(step, {})
        before = said.get(worker)
        if before is not None:
            spent_us, again_us = before.spent_us + time.spent_us, before.again_us + time.again_us
            time = replace(time, spent_us=spent_us, again_us=again_us)
        said[worker] = time

    def committed(self, step: int, live: Mapping[int, int], now: float) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the known figures of ``step``, and more that only the event log has; drop the messages behind them.

        ``live``: stage of each live worker, by rank. ``now``: seconds. Figures: ``step_s``, seconds since the commit
        before; ``bubble_share``: of the live workers' time since then, without compute; ``redone_share``: of the
        compute time, spent on a lost worker's work or on work done before. More: ``redone_s``, that time in seconds of
        all workers together; ``stage_bubbles``: the bubble share of each stage.
        """
        told = [
            pair for older in [each for each in self._said if each <= step] for pair in self._said.pop(older).items()
        ]
        spent, again = sum(time.spent_us for _, time in told), sum(time.again_us for _, time in told)
        took = now - self._committed_at if self._committed_at is not None else 0.0
        self._committed_at = now
        by_stage = _by_stage(told, live)
        for stage, computed in by_stage.items():
            self._work.setdefault(stage, deque(maxlen=RECENT)).append(computed)
        figures: dict[str, Any] = {"workers": len(live)}
        more: dict[str, Any] = {"redone_s": round(again / 1e6, 6)}
        if took > 0:
            self._steps.append(took)
            figures["step_s"] = round(took, 6)
        if took > 0 and spent:
            figures["bubble_share"] = _bubbles(spent, len(live), took)
            more["stage_bubbles"] = _stage_bubbles(by_stage, live, took)
        if spent:
            figures["redone_share"] = round(again / spent, 4)
        return figures, more


def _bubbles(spent_us: int, workers: int, took_s: float) -> float:
    return round(max(0.0, 1 - spent_us / (workers * took_s * 1e6)), 4)


def _by_stage(told: Iterable[tuple[WorkerId, ComputeTime]], live: Mapping[int, int]) -> Counter[int]:
    """Return the computing time of the live workers of each stage, in microseconds, without zeros."""
    spent: Counter[int] = Counter()
    for worker, time in told:
        if worker.rank in live:
            spent[live[worker.rank]] += time.spent_us
    return +spent


def _stage_bubbles(spent: Counter[int], live: Mapping[int, int], took_s: float) -> list[float]:
    return [_bubbles(spent[stage], workers, took_s) for stage, workers in sorted(Counter(live.values()).items())]

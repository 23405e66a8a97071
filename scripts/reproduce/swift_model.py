"""SWIFT's figures by a model: the time of a training with failures and checkpoints at an interval, and of a recovery.

Its constants are in configs/reproduce/swift_job.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace
from typing import NamedTuple

from swift_jobs import Recovery

REPLAY, REPLAY_ALONE, REROUTE = "replay with helpers", "replay alone", "rerouting"
RESTART, CHECKFREQ, ELASTIC = "checkpoint-restart", "CheckFreq-style", "Elastic-Horovod-style"


class Total(NamedTuple):
    """Seconds of a training from its first step to its last, and its seconds of start-up after failures."""

    seconds: float
    start_up_s: float

    @property
    def trained_s(self) -> float:
        """Without start-up."""
        return self.seconds - self.start_up_s


@dataclass(frozen=True)
class Method:
    """The costs of a recovery method, in seconds. ``step_s``: a fault-free step, ``redo_s``: a lost step, redone;
    ``save_s``: training stops for a checkpoint, ``persist_s``: from then until it is durable; ``notice_s``: until
    a failure is known, ``start_s``: a start after that, ``load_s``: its checkpoint.
    """

    name: str
    step_s: float
    redo_s: float
    save_s: float
    persist_s: float
    notice_s: float
    start_s: float
    load_s: float

    def total(self, steps: int, failures_every: int, every: int) -> Total:
        """Return the mean over all steps of the first failure, so that no interval suits only one of them."""
        found = [self.total_from(steps, failures_every, every, first) for first in range(1, failures_every + 1)]
        return Total(*(fmean(each) for each in zip(*found)))

    def total_from(self, steps: int, failures_every: int, every: int, first: int) -> Total:
        """Of ``steps`` steps with failures before ``first`` and then every ``failures_every`` steps, and a checkpoint
        after each multiple of ``every``.  One is there at the beginning.
        """
        now, start_up = 0.0, 0.0
        written = [(0.0, 0)]  # the time at which each checkpoint is durable, and its step
        for step in range(1, steps + 1):
            if step >= first and (step - first) % failures_every == 0:
                durable = max(of for at, of in written if at <= now)
                start_up += self.notice_s + self.start_s
                now += self.notice_s + self.start_s + self.load_s + (step - 1 - durable) * self.redo_s
                written = [(at, of) for at, of in written if of <= durable]
            now += self.step_s
            if step % every == 0:
                now += self.save_s
                written.append((now + self.persist_s, step))
        return Total(now, start_up)

    def best_interval(self, steps: int, failures_every: int) -> int:
        """Return the interval with the least total time."""
        return min(range(1, steps + 1), key=lambda every: (self.total(steps, failures_every, every).seconds, every))

    def recovery(self, steps: int) -> Recovery:
        """Return the recovery from a failure so many steps after the last durable checkpoint."""
        return Recovery(self.notice_s, self.start_s, self.load_s, steps * self.redo_s, self.step_s, steps)


def methods(constants: Mapping[str, float]) -> tuple[Method, ...]:
    """Return the methods of a job without replicas."""
    c = SimpleNamespace(**constants)
    own = (c.own_copy_s, c.own_persist_s, c.notice_one_s, c.start_one_s, c.own_load_s)
    peers = (c.notice_job_s, c.start_job_s, c.load_s)
    return (
        Method(REPLAY, c.own_step_s, c.replay_s, *own),
        Method(REPLAY_ALONE, c.own_step_s, c.replay_alone_s, *own),
        Method(RESTART, c.step_s, c.step_s, c.save_s, 0.0, *peers),
        Method(CHECKFREQ, c.step_s, c.step_s, c.copy_s, c.persist_s, *peers),
    )

"""How long empty stages may be silent: deadlines for a start, and for a replayed step.

Each follows from a prediction, if that was measured in this job (core/coordinator/recovery_ways.py):
* A replayed step may take ``FACTOR`` times what one worker needs for it alone, at least ``FLOOR_S``, and at least what
  the user lets an instruction compute (``busy_timeout_s``). The factor is ten because a step may take its own time,
  five seconds and four times its share until late helpers are found and their blocks are dealt anew
  (core/worker/shared_replay.py). Also, a machine that starts the other lost processes may be several times slower than
  in training. The floor covers the time in which helpers make the stage.
* After that the replaying process is given up, if another one may take its place. That one gets twice the time, so that
  a machine that is slow for good comes through in the end. With live companions nobody is given up, since they wait for
  each other.
* The job ends, and waiting workers give up, after that limit or ``wait_timeout_s``, whichever is longer: a user's
  setting is never cut short.
* A start may take ``FACTOR`` times what starts in this job have taken, at least ``wait_timeout_s``. Nobody is given up
  for it, since what a script does before its first step is its own.

What was not measured has only the deadline ``wait_timeout_s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recycle_plugin.core.coordinator.facts.joining import NewcomerRecord, Phase
from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.coordinator.recovery_ways import Time, groups, step_of, times_of
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import Expected

FACTOR = 10
FLOOR_S = 30.0
LATER_S = 10.0  # how much longer workers wait than the coordinator: they hear why the job ends


class Patience(NamedTuple):
    """The patience with empty stages. ``what`` is waited for, ``predicted`` to take so long. After ``give_up_s`` silent
    seconds the replaying workers are given up (None: never), after ``end_s`` the job ends.
    """

    what: str
    predicted: Time
    give_up_s: float | None
    end_s: float

    def __str__(self) -> str:
        return f"{self.what}, predicted to take {self.predicted}"


def patience(state: JobState, empty: Sequence[int]) -> Patience:
    """Return the patience with the ``empty`` stages."""
    assert state.job is not None, "a lost worker has taken part in a job"
    deadlines, times = state.job.deadlines, times_of(state)
    if not replaying(state):
        limit = 0.0 if times.start.how else FACTOR * times.start.seconds
        return Patience("the start of the next process", times.start, None, max(deadlines.wait_timeout_s, limit))
    step = step_of(times.work, groups([*empty, *state.logs.along(state.committed, empty)]))
    predicted = Time(step.seconds + times.load.seconds, step.how)  # the first step comes after a load
    if step.how:
        return Patience("the next replayed step", predicted, None, deadlines.wait_timeout_s)
    limit = max(FLOOR_S, deadlines.busy_timeout_s, FACTOR * predicted.seconds) * 2**state.replay.given_up
    give_up = None if state.replay.has_companions else limit  # companions wait for each other: who is to blame?
    return Patience("the next replayed step", predicted, give_up, max(deadlines.wait_timeout_s, limit))


def replaying(state: JobState) -> list[NewcomerRecord]:
    """Return the newcomers that replay a stage. O(newcomers)."""
    return [each for each in state.joining if each.phase is Phase.REPLAYING]


def tell(state: JobState, empty: Sequence[int]) -> None:
    """Tell workers that wait for ``empty`` stages the next expected event, and how long to wait for it."""
    found = patience(state, empty)
    state.tell(WORKERS, Expected(str(found), found.end_s + LATER_S))


def give_up_silent(state: JobState, empty: Sequence[int], silent_s: float) -> bool:
    """Give up replaying newcomers that are silent for too long, if all are replaceable. Return whether that was so."""
    found, late = patience(state, empty), replaying(state)
    if found.give_up_s is None or silent_s <= found.give_up_s or not all(_has_next(state, each) for each in late):
        return False
    state.replay.given_up += 1
    for each in late:
        why = f"nothing was heard of its replay for {silent_s:.1f} s: {found} (deadline {found.give_up_s:.1f} s)"
        state.say("warning", f"{each.member} is given up, and another process is to replay its stage: {why}")
        state.fence(each.member.worker, why)
    return True


def _has_next(state: JobState, newcomer: NewcomerRecord) -> bool:
    waiting = any(each.stage == newcomer.stage and each.phase is Phase.WAITING for each in state.joining)
    return waiting or state.vacancies.may_follow(newcomer.member.rank)

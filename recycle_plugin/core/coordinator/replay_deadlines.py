"""How long stages that nobody holds may be silent: the deadlines of those who wait for a start, or for a replayed step.

Each follows from what is predicted of it, where that was measured in this job (core/coordinator/recovery_ways.py):

* A replayed step may take ``FACTOR`` times what one worker would need for it without any help, and never less than
  ``FLOOR_S``, or than the time that the user lets an instruction compute (``busy_timeout_s``).  Ten times: until all
  helpers have been found late and their blocks are dealt anew, a step takes up to its own time, five seconds, and four
  times its share (core/worker/shared_replay.py); a machine that also starts the other lost processes may be some times
  slower than when it trained.  The floor covers the making of the stage by who helps.
* Past it the process that replays is given up, as long as another one may take its place, which is given twice that:
  a machine that is slow for good comes through in the end.  Not where live stages replay along, which wait for it too.
* The job ends, and whoever waits gives up, past that or ``wait_timeout_s``, whichever is longer: what a user has set is
  never cut short.
* A start may take ``FACTOR`` times what starts in this job have taken, and never less than ``wait_timeout_s``; nobody
  is given up for it, since what a script does before its first step is its own.

What was not measured has no deadline but ``wait_timeout_s``.
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
LATER_S = 10.0  # by how much who waits waits longer than the coordinator, so that it hears why the job ends


class Patience(NamedTuple):
    """The patience with stages that nobody holds: ``what`` is waited for, which is ``predicted``; after ``give_up_s``
    seconds without a word who replays is given up, None: never; after ``end_s`` the job ends.
    """

    what: str
    predicted: Time
    give_up_s: float | None
    end_s: float

    def __str__(self) -> str:
        return f"{self.what}, predicted to take {self.predicted}"


def patience(state: JobState, empty: Sequence[int]) -> Patience:
    """The patience with the stages that are ``empty``, as far as they are."""
    assert state.job is not None, "who is lost has taken part in a job"
    deadlines, times = state.job.deadlines, times_of(state)
    if not replaying(state):
        limit = 0.0 if times.start.how else FACTOR * times.start.seconds
        return Patience("the start of the next process", times.start, None, max(deadlines.wait_timeout_s, limit))
    step = step_of(times.work, groups([*empty, *state.logs.along(state.committed, empty)]))
    predicted = Time(step.seconds + times.load.seconds, step.how)  # the first one comes behind a load
    if step.how:
        return Patience("the next replayed step", predicted, None, deadlines.wait_timeout_s)
    limit = max(FLOOR_S, deadlines.busy_timeout_s, FACTOR * predicted.seconds) * 2**state.replay.given_up
    give_up = None if state.replay.has_companions else limit  # these wait for each other: nobody knows who is to blame
    return Patience("the next replayed step", predicted, give_up, max(deadlines.wait_timeout_s, limit))


def replaying(state: JobState) -> list[NewcomerRecord]:
    """Who replays a stage.  Costs one look at each newcomer."""
    return [each for each in state.joining if each.phase is Phase.REPLAYING]


def tell(state: JobState, empty: Sequence[int]) -> None:
    """Tells those who wait for the stages that are ``empty`` what to expect, and how long to wait for it."""
    found = patience(state, empty)
    state.tell(WORKERS, Expected(str(found), found.end_s + LATER_S))


def give_up_silent(state: JobState, empty: Sequence[int], silent_s: float) -> bool:
    """Gives up who replays, where nothing has been heard of that for ``silent_s`` seconds, and that is too long, and
    others can take their places; returns whether it was so.
    """
    found, late = patience(state, empty), replaying(state)
    if found.give_up_s is None or silent_s <= found.give_up_s or not all(_has_next(state, each) for each in late):
        return False
    state.replay.given_up += 1
    for each in late:
        why = f"nothing was heard of its replay for {silent_s:.1f} s: {found} (deadline {found.give_up_s:.1f} s)"
        state.say("warning", f"{each.member} is given up, and another one is to replay its stage: {why}")
        state.fence(each.member.worker, why)
    return True


def _has_next(state: JobState, newcomer: NewcomerRecord) -> bool:
    waiting = any(each.stage == newcomer.stage and each.phase is Phase.WAITING for each in state.joining)
    return waiting or state.vacancies.may_follow(newcomer.member.rank)

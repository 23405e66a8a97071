"""The ways to recover from a loss, and the times from which a replay's deadlines follow.

There are three ways, each more expensive than the one before; the job takes the first possible one:
* *reroute*: other workers of the stage take the lost worker's work.
* *replay*: stages without a worker are replayed from the logs, while all other workers wait and keep their data
  (core/coordinator/replays.py).
* *end*: the job ends, and names the last checkpoint.

Times are measured in this job (steps by core/coordinator/facts/step_figures.py, starts and loads by
core/coordinator/facts/recovery_times.py). Until then they come from the planner's cost model and usual values, and are
reported as assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from recycle_plugin.core.coordinator.facts.restarts import FIRST_S
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.vocabulary.roster import Member

START_UP_S = 9.0  # from a process's start until its model is ready, unmeasured: 4 to 8 s with small models
NAMED = 3  # workers or numbers named in an event
MEASURED, ASSUMED, UNKNOWN = "", "assumed", "not known"


class Time(NamedTuple):
    """Seconds, and how they are known: MEASURED, ASSUMED, or UNKNOWN, for which they are 0."""

    seconds: float
    how: str = MEASURED

    def __str__(self) -> str:
        if self.how == UNKNOWN:
            return UNKNOWN
        return f"{self.seconds:.3g} s" + f", {self.how}" * bool(self.how)


@dataclass(frozen=True)
class Times:
    """The times of a replay. ``start``: from a loss until the next process has its model. ``load``: to load a stage's
    state from a checkpoint. ``work``: by stage, one worker's compute of a step.
    """

    start: Time
    load: Time
    work: tuple[Time, ...]


class Group(NamedTuple):
    """Neighbouring stages that are replayed together: empty ones, and live ones with unlogged boundaries to these."""

    first: int
    last: int

    @property
    def stages(self) -> range:
        return range(self.first, self.last + 1)


def groups(stages: Sequence[int]) -> tuple[Group, ...]:
    """Split ``stages`` into runs of neighbouring stages, in order. Neighbours wait for each other."""
    ordered = sorted(stages)
    firsts = [ordered[0], *(after for before, after in pairwise(ordered) if after != before + 1)]
    lasts = [*(before for before, after in pairwise(ordered) if after != before + 1), ordered[-1]]
    return tuple(map(Group, firsts, lasts))


def step_of(work: Sequence[Time], together: Iterable[Group]) -> Time:
    """Return the time of a replayed step: that of the slowest group, since its stages wait for each other."""
    of_groups = [[work[stage] for stage in group.stages] for group in together]
    slowest = max(of_groups, key=lambda times: sum(time.seconds for time in times))
    return Time(sum(time.seconds for time in slowest), max(time.how for time in slowest))


def times_of(state: JobState) -> Times:
    """Return the times of a job that trains, measured as far as possible."""
    assert state.job is not None, "a lost worker has taken part in a job"
    measured, job = state.recovery_times, state.job
    wait = 0.0 if state.vacancies.has_spares else FIRST_S
    known, load = measured.start_up_s, measured.load_s
    alone = [job.costs.alone_s(stage, job.policy.split_backward, len(job.shape.batch)) for stage in range(job.stages)]
    spent = map(state.steps.figures.work_s, range(job.stages))
    return Times(
        Time(wait + (START_UP_S if known is None else known), ASSUMED if known is None else MEASURED),
        Time(0.0, UNKNOWN) if load is None else Time(load),
        tuple(Time(guess, ASSUMED) if each is None else Time(each) for guess, each in zip(alone, spent, strict=True)),
    )


# --- told to the user ---------------------------------------------------------------------------------


def say_rerouted(state: JobState) -> None:
    """Report that the other workers of their stages now do the lost workers' work. Called once these have a plan."""
    lost = sorted((each for those in state.unsaid.values() for each in those), key=lambda each: each.worker)
    state.unsaid = {}
    assert state.job is not None, "a lost worker has taken part in a job"
    text = who_is_lost(lost, state.job.unit, state.job.policy.shrinks)
    state.say("recovery", text, way="reroute", seats=[str(member.seat) for member in lost])


def who_is_lost(lost: Sequence[Member], unit: str, shrinks: bool) -> str:
    """Return a sentence: the ``lost`` workers, or their replicas, and which workers take their work."""
    if unit == "replica":
        who = several("replica", sorted({member.seat.replica for member in lost}))
        return f"{who} lost as a whole: {'nobody does its work' if shrinks else 'other replicas take its work'}"
    if len(lost) > NAMED:
        return f"{len(lost)} workers are lost: other workers of their stages take the work"
    who = " and ".join(map(str, lost))
    return f"{who} {'is' if len(lost) == 1 else 'are'} lost: other workers of the stage take the work"


def several(what: str, numbers: Sequence[int]) -> str:
    """Return the subject of a sentence: at most NAMED ``numbers``, with "is" or "are"."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]} is"
    names = ", ".join(map(str, numbers)) if len(numbers) <= NAMED else f"{numbers[0]} to {numbers[-1]}"
    return f"{what}s {names} are"


def say_impossible(state: JobState, stages: Sequence[int], why: str, lacks: int | None = None) -> None:
    """Report ``why`` the empty ``stages`` can't be replayed. ``lacks``: the stage whose data is gone."""
    for stage in stages:
        state.unsaid.pop(stage, None)
    text = f"stage {', '.join(map(str, stages))} can't be replayed: {why}"
    state.say("recovery", text, way="end", stages=list(stages), why=why, lacks=lacks)


def say_replayed(
    state: JobState,
    stages: Sequence[int],
    along: Mapping[int, str] = MappingProxyType({}),
    again: str = "",
) -> None:
    """Report that empty ``stages`` are replayed. ``along``: further stages to replay, and why each. ``again``: why a
    replay begins anew.
    """
    for stage in stages:
        state.unsaid.pop(stage, None)
    behind = state.logs.behind(state.committed)
    meanwhile = "its script ends without the others" if state.ending.finishing else "the others wait"
    with_them = "".join(f" with stage {stage} ({reason})" for stage, reason in sorted(along.items())[:1])
    once_more = f" once more, since {again}" * bool(again)
    state.say(
        "recovery",
        f"{several('stage', stages)} without a worker: replayed from the logs{once_more}{with_them}, "
        f"{behind} step{'s' * (behind != 1)}; {meanwhile}",
        way="replay",
        stages=list(stages),
        along={str(stage): reason for stage, reason in sorted(along.items())},
        steps=behind,
        checkpoint=state.logs.checkpoint.step,
    )

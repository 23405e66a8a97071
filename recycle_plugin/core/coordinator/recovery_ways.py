"""Which way a loss goes, what that is predicted to cost, and what the other ways would have cost, or why they can't be.

There are four ways.  The first of them that can be is taken, since each gives up more than the one before:

* *reroute*: the other workers of its stage take a lost worker's work.  That costs a pause, and throughput until the
  seat is filled again.
* *replay*: stages that nobody is left in are replayed from the logs, with whatever belongs to their groups; all others
  wait with all that they have (core/coordinator/replays.py).
* *reload*: everybody goes back to the last checkpoint, and trains the steps since then once more.
* *end*: the job ends, and names that checkpoint.

Costs are seconds in which the job does not get on.  They are made of what was measured in this job (steps by
core/coordinator/step_figures.py, starts and loads by core/coordinator/recovery_times.py), and as long as nothing was,
of the planner's cost model and of what is usual: then they are said to be assumed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.restarts import FIRST_S
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.machine_constants import START_UP_S
from recycle_plugin.core.vocabulary.roster import Member

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course

NAMED = 3  # of those that a loss is about, so many are named
MEASURED, ASSUMED, UNKNOWN = "", "assumed", "not known"
NOBODY_LEFT = "nobody of the stage is left"
NOT_NEEDED = "somebody of the stage is left, and loses nothing"
BY_HAND = "no job goes back by itself; whoever starts it again does so"


class Time(NamedTuple):
    """Seconds, and how they are known: one of MEASURED, ASSUMED and UNKNOWN, and then they count as none."""

    seconds: float
    how: str = MEASURED

    def __str__(self) -> str:
        if self.how == UNKNOWN:
            return UNKNOWN
        return f"{self.seconds:.3g} s" + f", {self.how}" * bool(self.how)


class Part(NamedTuple):
    """A part of what a way costs; ``words``: what it is for people, where that is not its name."""

    name: str
    time: Time
    words: str = ""

    def __str__(self) -> str:
        return f"{self.words or self.name} {self.time}"


@dataclass(frozen=True)
class Times:
    """The times that costs are made of.  ``start``: from a loss until the next process has its model; ``load``: a
    stage's state from a checkpoint; ``step``: a step of the whole job; ``work``: of each stage, what it computes in a
    step, by one worker.
    """

    start: Time
    load: Time
    step: Time
    work: tuple[Time, ...]


@dataclass(frozen=True)
class Way:
    """A way that a loss may go.  ``parts``: of its cost, none where nobody can say what it costs; ``why_not``: why it
    can't be, or empty; ``more``: what there is to say of the cost beside.
    """

    name: str
    parts: tuple[Part, ...] = ()
    why_not: str = ""
    more: str = ""

    @property
    def seconds(self) -> float | None:
        """What it costs in all."""
        return sum(part.time.seconds for part in self.parts) if self.parts else None

    @property
    def cost(self) -> str:
        """What it costs, in words."""
        return f"{self.seconds:.3g} s ({'; '.join(map(str, self.parts))}{self.more})"

    @property
    def details(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "seconds": None if self.seconds is None else round(self.seconds, 4),
            "parts": {part.name: round(part.time.seconds, 4) for part in self.parts},
            "assumed": [part.name for part in self.parts if part.time.how],
        }


@dataclass(frozen=True)
class Decision:
    """All ``ways``, in the order in which they are tried; the last one can always be."""

    ways: tuple[Way, ...]

    @property
    def taken(self) -> Way:
        """The one that the loss goes."""
        return next(way for way in self.ways if not way.why_not)

    @property
    def details(self) -> dict[str, Any]:
        """All of it as data."""
        others = {way.name: {**way.details, "why": way.why_not} for way in self.ways if way is not self.taken}
        return {"way": self.taken.name, **self.taken.details, "instead": others}


# --- what each way costs ------------------------------------------------------------------------------


class Group(NamedTuple):
    """Stages that are replayed together, from ``first`` to ``last``: those that have nobody, and with them live ones
    where what crosses the boundary to these is in no log.
    """

    first: int
    last: int

    @property
    def stages(self) -> range:
        """All of them."""
        return range(self.first, self.last + 1)


def groups(stages: Sequence[int]) -> tuple[Group, ...]:
    """The groups of ``stages``, in their order, where every boundary is logged: neighbours wait for each other."""
    ordered = sorted(stages)
    firsts = [ordered[0], *(after for before, after in pairwise(ordered) if after != before + 1)]
    lasts = [*(before for before, after in pairwise(ordered) if after != before + 1), ordered[-1]]
    return tuple(map(Group, firsts, lasts))


class Sharing(NamedTuple):
    """How a step of a stage is shared that is replayed: among ``helpers`` and the one that replays it, of which the
    busiest makes ``share`` of the micro-batches.
    """

    helpers: int = 0
    share: float = 1.0


def shared(blocks: Blocks, live: int, limit: int | None) -> Sharing:
    """How ``blocks`` are shared where so many workers are ``live``, and no more than ``limit`` of them help; None: as
    many as there are.  Costs time in proportion to the micro-batches of a step.
    """
    sizes = [len(each) for each in blocks.members().values()]
    helpers = min(live, len(sizes) - 1, live if limit is None else limit)
    return Sharing(helpers, sum(sizes[:: helpers + 1]) / sum(sizes))


def step_of(work: Sequence[Time], together: Iterable[Group], sharing: Sharing = Sharing()) -> Time:
    """The time of one step of a replay.  Stages of a group wait for each other for each micro-batch, and so do nothing
    at the same time; groups do.
    """
    of_groups = [[work[stage] for stage in group.stages] for group in together]
    slowest = max(of_groups, key=lambda times: sum(time.seconds for time in times))
    return Time(sharing.share * sum(time.seconds for time in slowest), max(time.how for time in slowest))


def reroute(pause: Time, back: Time | None, throughput: float) -> Way:
    """The way of a loss after which the job has so much ``throughput``, of what it has with everybody there, until the
    seat is filled again, in ``back``; None: nobody will fill it.
    """
    if back is None:
        return Way("reroute", (Part("pause", pause),), more=f"; then {throughput:.0%} of the throughput, for good")
    slower = Time(back.seconds * (1 - throughput), back.how)
    until = f", at {throughput:.0%} of the throughput for {back.seconds:.3g} s until the seat is filled again"
    return Way("reroute", (Part("pause", pause), Part("slower", slower, "slower steps")), more=until)


def replay(times: Times, step: Time, steps: float, helpers: int = 0, why_not: str = "") -> Way:
    """The way of stages that are replayed over so many ``steps``, each of which takes ``step``."""
    who = f", shared with {helpers} helper{'s' * (helpers != 1)}" * bool(helpers)
    return Way("replay", _from_checkpoint(times, step, steps), why_not, who)


def reload(times: Times, steps: float) -> Way:
    """The way back to a checkpoint, ``steps`` behind which the job is, of all its processes, which start anew."""
    return Way("reload", _from_checkpoint(times, times.step, steps), BY_HAND)


def _from_checkpoint(times: Times, step: Time, steps: float) -> tuple[Part, ...]:
    again = Part("steps", Time(steps * step.seconds, step.how), f"{steps:g} step{'s' * (steps != 1)}")
    return Part("start", times.start), Part("load", times.load), again


def no(name: str, why: str) -> Way:
    """A way that can't be."""
    return Way(name, why_not=why)


END = Way("end")


# --- of a job -----------------------------------------------------------------------------------------


def times_of(course: Course) -> Times:
    """The times of a job that trains, as far as they were measured."""
    assert course.job is not None, "who is lost has taken part in a job"
    measured, figures, job = course.recovery_times, course.steps.figures, course.job
    wait = 0.0 if course.vacancies.has_spares else FIRST_S
    known, load, step = measured.start_up_s, measured.load_s, figures.step_s
    alone = [alone_s(job.costs, stage, job.policy.split_backward, len(job.shape.batch)) for stage in range(job.stages)]
    spent = map(figures.work_s, range(job.stages))
    return Times(
        Time(wait + (START_UP_S if known is None else known), ASSUMED if known is None else MEASURED),
        Time(0.0, UNKNOWN) if load is None else Time(load),
        Time(max(alone) / job.replicas, ASSUMED) if step is None else Time(step),
        tuple(Time(guess, ASSUMED) if each is None else Time(each) for guess, each in zip(alone, spent, strict=True)),
    )


def alone_s(costs: CostModel, stage: int, splits: bool, micro_batches: int) -> float:
    """What the cost model says that one worker takes for a step of ``micro_batches`` of a stage, in seconds.
    ``splits``: backwards are split.
    """
    backward = (Op.I, Op.W) if splits else (Op.B,)
    each = sum(costs.of(op, stage) for op in (Op.F, *backward))
    return (micro_batches * each + costs.of(Op.STEP, stage)) / 1e6


def sharing_of(course: Course, stages: Sequence[int]) -> Sharing:
    """How a step of ``stages`` would be shared, as far as the coordinator knows: a helper may yet be unable
    (core/worker/shared_replay.py).
    """
    job = course.job
    assert job is not None, "a job that trains has begun"
    if len(stages) > 1 or job.shape.tie(stages[0]) or job.rng != "keyed":
        return Sharing()
    live = 0 if course.ending.finishing else len(course.roster)
    return shared(job.policy.blocks(job.shape), live, job.helpers)


def of_stages(course: Course, stages: Sequence[int], why: str, along: Collection[int] = ()) -> Decision:
    """The decision for ``stages`` that nobody is left in.  ``why``: why they can't be replayed, or empty; ``along``:
    live ones that would be replayed with them.
    """
    return Decision((no("reroute", NOBODY_LEFT), *_back(course, [*stages, *along], why), END))


def of_seats(course: Course, lost: Sequence[Member], pause: Time, throughput: float) -> Decision:
    """The decision for seats whose stages have others, who go on with so much ``throughput`` after ``pause``."""
    stages = sorted({member.seat.stage for member in lost})
    times, vacancies = times_of(course), course.vacancies
    comes = all(vacancies.is_coming(member.rank) for member in lost)
    way = reroute(pause, times.start if comes else None, throughput)
    return Decision((way, *_back(course, stages, NOT_NEEDED), END))


def _back(course: Course, stages: Sequence[int], why: str) -> tuple[Way, Way]:
    """The ways that begin at a checkpoint: of ``stages``, unless there is a ``why`` not, and of everybody."""
    behind = course.logs.behind(course.committed)
    if behind is None:
        kept = "of the last checkpoint nobody has noted how far it is behind, which jobs with a log do"
        return no("replay", why), no("reload", kept if course.ending.checkpoint else "no checkpoint was saved")
    times, sharing = times_of(course), sharing_of(course, stages)
    step = step_of(times.work, groups(stages), sharing)
    return replay(times, step, behind, sharing.helpers, why), reload(times, behind)


def say_rerouted(course: Course, pause_s: float, throughput: float, out: CoordinatorOutput) -> None:
    """Says that the work of those who are lost, and whose stages have others, is these' now, once they have planned for
    it.
    """
    lost = sorted((each for those in course.unsaid.values() for each in those), key=lambda each: each.worker)
    course.unsaid = {}
    assert course.job is not None, "who is lost has taken part in a job"
    decision = of_seats(course, lost, Time(max(0.0, pause_s)), throughput)
    out.say(
        "recovery",
        f"{who_is_lost(lost, course.job.unit, course.job.policy.shrinks)}; {_costs(decision.taken, throughput)}",
        seats=[str(member.seat) for member in lost],
        throughput=throughput,
        **decision.details,
    )


def _costs(way: Way, throughput: float) -> str:
    """What rerouting costs, in words."""
    back = any(part.name == "slower" for part in way.parts)
    until = "until the seat is filled again" if back else f"and keeps throughput at {throughput:.0%}"
    return f"costs about {way.seconds:.3g} s {until}"


def who_is_lost(lost: Sequence[Member], unit: str, shrinks: bool) -> str:
    """Who is ``lost``, worker by worker or in whole replicas, and what becomes of the work."""
    if unit == "replica":
        who = several("replica", sorted({member.seat.replica for member in lost}))
        return f"{who} out whole: {'nobody does its work' if shrinks else 'others take its work'}"
    if len(lost) > NAMED:
        return f"{len(lost)} workers are lost: others of their stages take the work"
    who = " and ".join(map(str, lost))
    return f"{who} {'is' if len(lost) == 1 else 'are'} lost: others of the stage take the work"


def several(what: str, numbers: Sequence[int]) -> str:
    """The subject of a sentence: at most NAMED of them by number, with "is" or "are"."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]} is"
    names = ", ".join(map(str, numbers)) if len(numbers) <= NAMED else f"{numbers[0]} to {numbers[-1]}"
    return f"{what}s {names} are"


def say_of_stages(
    course: Course,
    stages: Sequence[int],
    why: str,
    out: CoordinatorOutput,
    along: Mapping[int, str] = MappingProxyType({}),
    again: str = "",
    lacks: int | None = None,
) -> None:
    """Says which way ``stages`` go that nobody is left in; see :func:`of_stages`.  ``along``: live stages that are
    replayed with them, each with the reason; ``again``: why that has changed since it was said last; ``lacks``: the
    stage that has sent what can't be had any more.
    """
    for stage in stages:
        course.unsaid.pop(stage, None)
    decision = of_stages(course, stages, why, along)
    if why:
        out.say(
            "recovery",
            f"stage {', '.join(map(str, stages))} can't be replayed: {why}",
            stages=list(stages),
            why=why,
            lacks=lacks,
            **decision.details,
        )
        return
    step, behind = course.logs.checkpoint.step, course.logs.behind(course.committed)
    whole = [*stages, *along]
    meanwhile = "its script ends without the others" if course.ending.finishing else "the others wait"
    with_them = "".join(f" with stage {stage} ({reason})" for stage, reason in sorted(along.items())[:1])
    once_more = f" once more, since {again}" * bool(again)
    out.say(
        "recovery",
        f"{several('stage', stages)} without a worker: replayed from the logs{once_more}{with_them}, "
        f"{behind} step{'s' * (behind != 1)}; {meanwhile}, about {decision.taken.seconds:.3g} s",
        stages=list(stages),
        along={str(stage): reason for stage, reason in sorted(along.items())},
        groups=[list(group) for group in groups(whole)],
        steps=behind,
        checkpoint=step,
        helpers=sharing_of(course, whole).helpers,
        **decision.details,
    )

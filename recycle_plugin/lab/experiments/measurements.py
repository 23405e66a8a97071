"""Costs computed from what runs left behind: event logs, traces, step times. No processes here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, RECEIVES, Instruction, Op
from recycle_plugin.core.vocabulary.span import Span, run_again

REPLACED = 3  # steps after a kill over which its cost is taken
WARM_UP = 2  # steps at the start of a run that medians leave out


class TooShort(ValueError):
    """A run has too few steps for the computation."""


@dataclass(frozen=True)
class Kill:
    """A kill by SIGKILL of the worker of ``seat``, ``at`` seconds since the epoch."""

    seat: Seat
    at: float


@dataclass(frozen=True)
class RecoveryCost:
    """The cost of one kill, in seconds.

    Suppose only the worker were lost, and none of its work. A kill at fraction f of a step would leave (1 - f) of that
    step and two more at the degraded speed; ``cost_s`` is how much later the third commit came. Its parts:
    ``detection_s`` until the coordinator knows; ``regroup_s`` from then until all go on, with ``plan_s`` of planning;
    ``redone_s`` of compute that ran a second time; and ``rest_s``, negative if survivors had work to go on with
    meanwhile. ``redone_s`` is of the survivor that had most of it: the step is at least so much longer. ``stall_s`` is
    the cost without it.

    Shares of the whole step's compute time: ``redone_share``, run a second time by all of them; ``finished_share``,
    uncommitted work of the lost worker; ``restart_share``, to be run again if the step had started anew.
    """

    seat: str
    phase: float
    detection_s: float
    regroup_s: float
    plan_s: float
    redone_s: float
    redone_share: float
    finished_share: float
    restart_share: float
    rest_s: float
    cost_s: float
    stall_s: float
    before_s: float
    after_s: float
    ahead: int


def recovery_costs(kills: Sequence[Kill], events: Sequence[Mapping], spans: Sequence[Span]) -> list[RecoveryCost]:
    """Return the costs of each kill of one run in their order; kills must be far enough apart. Raises TooShort."""
    resumed = [_resume_after(kill, events) for kill in kills]
    found = []
    for number, (kill, resume) in enumerate(zip(kills, resumed)):
        first = resumed[number - 1]["committed"] + 1 if number else WARM_UP
        last = resumed[number + 1]["committed"] if number + 1 < len(kills) else None
        found.append(_cost(kill, resume, events, spans, first, last))
    return found


@dataclass(frozen=True)
class LeaveCost:
    """The cost of one planned leave to the others, in seconds.

    It counts from the step of the request to the third step without the worker. ``before_s`` and ``after_s``: medians
    of the steps with and without the worker. ``extra_s``: how much longer the counted steps took than these medians;
    ``worst_s``: the most of one step.
    """

    seat: str
    before_s: float
    after_s: float
    extra_s: float
    worst_s: float


def leave_costs(leaves: Sequence[tuple[Seat, float]], events: Sequence[Mapping]) -> list[LeaveCost]:
    """Return the costs of a run's ``leaves`` (seat, s since the epoch), which are far enough apart. Raises TooShort."""
    commits = {event["step"]: event["time"] for event in events if event["event"] == "committed"}
    resumed = [resume["committed"] for resume in events if resume["event"] == "resume"]
    if len(resumed) <= len(leaves):
        raise TooShort(f"{len(leaves)} were to leave, and training went on {len(resumed) - 1} times without one")
    found = []
    for number, (seat, asked_at) in enumerate(leaves):
        began = resumed[number] + (REPLACED if number else WARM_UP)
        last, end = resumed[number + 1], [*resumed, max(commits)][number + 2]
        asked = min(step for step, at in commits.items() if at > asked_at)  # the step in which it was asked for
        before, after = _interval(commits, began, asked - 1), _interval(commits, last + REPLACED, end)
        extra = [
            commits[step] - commits[step - 1] - (before if step <= last else after)
            for step in range(asked, last + REPLACED + 1)
        ]
        found.append(LeaveCost(str(seat), before, after, sum(extra), max(extra)))
    return found


def _cost(
    kill: Kill, resume: Mapping, events: Sequence[Mapping], spans: Sequence[Span], first: int, last: int | None
) -> RecoveryCost:
    commits = {event["step"]: event["time"] for event in events if event["event"] == "committed"}
    step, lost = resume["committed"] + 1, _lost(kill, events)
    before = _interval(commits, first, step - 1)
    after = _interval(commits, step + REPLACED - 1, last if last is not None else max(commits))
    redone, *shares = _redone(spans, kill, step, resume["time"])
    phase = min(max(kill.at - commits[step - 1], 0.0) / before, 1.0)
    cost = commits[step + REPLACED - 1] - kill.at - (REPLACED - phase) * after
    detection, regroup = lost["time"] - kill.at, resume["time"] - lost["time"]
    return RecoveryCost(
        str(kill.seat),
        phase,
        detection,
        regroup,
        resume["timings"]["plan_s"],
        redone,
        *shares,
        cost - redone - detection - regroup,
        cost,
        cost - redone,
        before,
        after,
        resume["ahead"],
    )


def _redone(spans: Sequence[Span], kill: Kill, step: int, resumed: float) -> tuple[float, ...]:
    """Return what of the interrupted ``step`` and the next was run before ``kill`` and again after it.

    These are: seconds of the survivor that had most of it; and as shares of the step's compute the repeated work of
    all, the work of the lost worker, and all work done when training ``resumed``.
    """
    compute = [span for span in spans if span.instruction.op in COMPUTE and span.instruction.step in (step, step + 1)]
    by_seat: dict[Seat, int] = {}
    for first, again in run_again(compute).items():
        if first.start_us < kill.at * 1e6 <= again.start_us:
            by_seat[again.seat] = by_seat.get(again.seat, 0) + again.end_us - again.start_us
    once = {span.instruction: span.end_us - span.start_us for span in compute if span.instruction.step == step}
    whole = sum(once.values()) or 1
    done = [(span.seat, span.end_us - span.start_us) for span in compute if span.end_us <= resumed * 1e6]
    finished = sum(time for seat, time in done if seat == kill.seat)
    return (
        max(by_seat.values(), default=0) / 1e6,
        sum(by_seat.values()) / whole,
        finished / whole,
        sum(time for _, time in done) / whole,
    )


def _lost(kill: Kill, events: Sequence[Mapping]) -> Mapping:
    return next(event for event in events if event["event"] == "lost" and event["seat"] == str(kill.seat))


def _resume_after(kill: Kill, events: Sequence[Mapping]) -> Mapping:
    lost = _lost(kill, events)
    resume = next((event for event in events if event["event"] == "resume" and event["time"] >= lost["time"]), None)
    if resume is None:
        raise TooShort(f"the run ended before it went on without seat {kill.seat}")
    return resume


def _interval(commits: Mapping[int, float], first: int, last: int) -> float:
    return median(intervals(commits, first, last))


def intervals(commits: Mapping[int, float], first: int, last: int) -> list[float]:
    """Return seconds between the commits of the steps ``first`` to ``last``. Raises TooShort if there are no two."""
    taken = [
        commits[step + 1] - commits[step] for step in range(first, last) if step in commits and step + 1 in commits
    ]
    if not taken:
        raise TooShort(f"no two commits between steps {first} and {last}: let the run go on for longer")
    return taken


# --- machine constants ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """What this machine adds to the stated times of emulated layers, in microseconds; fields as in CostModel."""

    dispatch: int
    communication: int
    reduce: int
    step: int


def calibrate(spans: Sequence[Span], nominal_us: int) -> Constants:
    """Return the constants from the trace of a run whose F, I and W all take ``nominal_us``. Raises TooShort.

    Each is a median over places where a worker waited for nothing else. A cost in the planner's sense is the time from
    one start to the next start that it makes possible.
    """
    steps = [span.instruction.step for span in spans]
    kept = [span for span in spans if min(steps) + WARM_UP <= span.instruction.step < max(steps)]
    by_seat: dict[Seat, list[Span]] = {}
    for span in sorted(kept, key=lambda span: span.start_us):
        by_seat.setdefault(span.seat, []).append(span)
    dispatch = _median(_own_times(by_seat), "two computations in a row") - nominal_us
    communication = _median(_travel_times(by_seat), "a worker that waits for a tensor") - nominal_us - dispatch
    reduce = _median(_reductions(kept), "a sum of gradients") - dispatch
    step = _median(_closings(by_seat), "a step after a step") - dispatch
    return Constants(*(max(0, round(value)) for value in (dispatch, communication, reduce, step)))


def _own_times(by_seat: Mapping[Seat, list[Span]]) -> Iterator[int]:
    """Yield the time from a computation's start to the next one's, if no tensor had to arrive between them."""
    for spans in by_seat.values():
        since: Span | None = None
        for span in spans:
            op = span.instruction.op
            if op in COMPUTE:
                if since is not None:
                    yield span.start_us - since.start_us
                since = span
            elif op in RECEIVES or op in (Op.REDUCE, Op.STEP):
                since = None


def _travel_times(by_seat: Mapping[Seat, list[Span]]) -> Iterator[int]:
    """Yield the time from a computation's start to the start of one that waited for its result on another worker."""
    made = {
        (span.instruction.op, span.instruction.stage, span.instruction.micro_batch, span.instruction.step): span
        for spans in by_seat.values()
        for span in spans
    }
    for spans in by_seat.values():
        for before, receive in pairwise(spans):
            if receive.instruction.op not in RECEIVES:
                continue
            source = made.get(_producer(receive.instruction))
            consumer = made.get(_consumer(receive.instruction))
            if source is not None and consumer is not None and before.end_us < source.end_us:
                yield consumer.start_us - source.start_us


def _producer(receive: Instruction) -> tuple:
    forward = receive.op is Op.RECV_ACT
    return (Op.F if forward else Op.I), receive.stage + (-1 if forward else 1), receive.micro_batch, receive.step


def _consumer(receive: Instruction) -> tuple:
    return (Op.F if receive.op is Op.RECV_ACT else Op.I), receive.stage, receive.micro_batch, receive.step


def _reductions(spans: Sequence[Span]) -> Iterator[int]:
    """Yield the time from the last worker's arrival at a stage's sum until all have it."""
    joint: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.instruction.op is Op.REDUCE:
            joint.setdefault((span.instruction.stage, span.instruction.step), []).append(span)
    for members in joint.values():
        yield max(span.end_us for span in members) - max(span.start_us for span in members)


def _closings(by_seat: Mapping[Seat, list[Span]]) -> Iterator[int]:
    """Yield the time from the end of a sum to the next step's first forward on stage 0, which waits for no tensor."""
    for seat, spans in by_seat.items():
        ends = {
            span.instruction.step: span.end_us for span in spans if span.instruction.op is Op.REDUCE and seat.stage == 0
        }
        firsts: dict[int, int] = {}
        for span in spans:
            if span.instruction.op is Op.F:
                firsts.setdefault(span.instruction.step, span.start_us)
        yield from (firsts[step + 1] - end for step, end in ends.items() if step + 1 in firsts)


def _median(values: Iterator[int], what: str) -> float:
    taken = list(values)
    if not taken:
        raise TooShort(f"the trace nowhere shows {what}: let the calibration run for longer")
    return median(taken)

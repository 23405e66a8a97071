"""Campaigns of seeded failures against the production code of executor, loop, worker, membership and recovery plans.

lab/simulator/seeded.py draws a job and its troubles from a seed, lab/simulator/cluster.py runs it, and
lab/simulator/checkers.py finds what was wrong. While anything may happen, safety is checked. Once nothing new goes
wrong, progress is demanded. In :func:`run_takeover` the coordinator itself dies (lab/simulator/takeovers.py).
:func:`every_instant` kills every worker of one job before and after each of its instructions: of a step (``LOSS``), or
of all steps in which another worker comes back (``RETURN``) or another stage is replayed (``REPLAY``), and so on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import given_up, slow_replicas
from recycle_plugin.lab.simulator.checkers import Watcher
from recycle_plugin.lab.simulator.cluster import Cluster, redone_share
from recycle_plugin.lab.simulator.coordination import Coordination
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario
from recycle_plugin.lab.simulator.seeded import scenario, with_confusion
from recycle_plugin.lab.simulator.seeded_takeovers import with_a_takeover
from recycle_plugin.lab.simulator.takeovers import Takeovers

WEIGHTS = (3, 5, 7, 11, 13, 17)
LIMIT_US = 90_000 * MILLISECOND  # longer than all deadlines in a row, so all have ended
HARMLESS = (
    "kill",
    "stall",
    "mute",
    "deaf",
    "leave",
    "end",
    "finish",
    "rude",
    "vanish",
    "again",
    "confused",
)  # by these no tensor is lost or late


@dataclass(frozen=True)
class ScenarioOutcome:
    """The outcome of one scenario.

    ``redone``: compute run again, as a share of what was needed. ``story``: the coordinator's events. ``hits``: how
    often each kind of trouble struck a worker at each kind of instruction. ``exercised``: how often each rule of the
    protocol was needed (lab/simulator/exercised.py). ``replayed``: the instructions of replays, each with its seat.
    """

    name: str
    faults: tuple[str, ...]
    violations: tuple[str, ...]
    redone: float
    spans: tuple[Span, ...]
    story: tuple[str, ...]
    hits: Mapping[tuple[str, Op], int]
    exercised: Mapping[ProtocolRule, int]
    replayed: tuple[tuple[Seat, Instruction], ...] = ()


@dataclass(frozen=True)
class CampaignReport:
    """The outcome of many scenarios. ``violations``: outcomes with any. ``redone_share``: the mean."""

    seeds: int
    faults: int
    violations: tuple[ScenarioOutcome, ...]
    redone_share: float
    seconds: float
    hits: Mapping[tuple[str, Op], int]
    exercised: Mapping[ProtocolRule, int]


def initial_weights(shape: Topology) -> tuple[int, ...]:
    """Return each stage's first weight, equal within a tie."""
    return tuple(WEIGHTS[min(shape.tie(stage), default=stage)] for stage in range(shape.stages))


def run(name: str, given: Scenario, failure_detector: type[Watcher] = Watcher) -> ScenarioOutcome:
    """Run a scenario and check it with a ``failure_detector`` as watcher. Any exception is a violation."""
    weights = initial_weights(given.shape)
    late = (
        bool(given.heavy)
        or (given.logs and given.shape.replicas > 2)  # a worker that does all replicas' work alone is late
        or any(trouble.kind not in HARMLESS for trouble in given.troubles)
        or any(fault.kind != "kill" for fault in given.faults)
    )
    watcher = failure_detector(given, weights, late)
    cluster = Cluster(given, weights, watcher, Takeovers if given.takes_over else Coordination)
    try:
        cluster.run(LIMIT_US * given.shards)
        cluster.coordination.finished()
        watcher.finished(cluster, may_end(cluster))
        for wrong in slow_replicas.mistaken(cluster):
            watcher.say(wrong)
    except Exception as error:  # errors of the code under test are what the campaign looks for
        watcher.say(f"{type(error).__name__}: {error}")
    faults = (*map(str, given.troubles), *map(str, given.faults), *map(str, given.heavy))
    story = tuple(f"{at / 1000:10.3f} ms  {event.kind}: {event.text}" for at, event in cluster.events)
    return ScenarioOutcome(
        name,
        faults,
        tuple(watcher.violations),
        redone_share(cluster),
        tuple(cluster.spans),
        story,
        cluster.hits,
        dict(cluster.exercised),
        tuple(cluster.replayed),
    )


def may_end(cluster: Cluster) -> bool:
    """Return whether the troubles allow the job's end: an empty stage that can't be replayed, too few workers in touch,
    any loss before the start, or iterators' data that can't be had again.
    """
    if cluster.coordination.may_end:
        return True
    membership, gone = cluster.membership, cluster.gone()
    away = cluster.lost_seats | {worker.seat for worker in cluster.workers.values() if worker.stuck or worker.stopped}
    if cluster.scenario.unit == "replica":
        torn = {seat.replica for seat in away}
        away = {seat for seat in cluster.scenario.shape.seats if seat.replica in torn}
    left = {seat.stage for seat in cluster.scenario.shape.seats if seat not in away}
    without = (
        not membership.started
        or (len(left) < cluster.scenario.shape.stages and (not cluster.scenario.logs or given_up.rightly(cluster)))
        or (len(membership.unreachable) > len(membership.roster) and not cluster.scenario.loses_hosts)
    )
    ended = cluster.membership.ended
    by_data = cluster.scenario.iterators and (not cluster.scenario.logs or (ended and "iterators" in ended.reason))
    return without or bool(by_data and _data_may_be_gone(cluster, [cluster.workers[rank].seat for rank in gone]))


def _data_may_be_gone(cluster: Cluster, gone: list[Seat]) -> bool:
    """Return whether no replica has both ends, or both copies of a stage's batches are gone or never came."""
    shape, ends = cluster.scenario.shape, (0, cluster.scenario.shape.stages - 1)
    whole = [replica for replica in range(shape.replicas) if not {Seat(replica, stage) for stage in ends} & set(gone)]
    sources = set(whole) - cluster.homeless
    by_stage = Counter(seat.stage for seat in gone)
    if cluster.scenario.logs:  # a returned worker has nothing of uncommitted steps
        lost = {cluster.workers[worker.rank].seat for worker in cluster.membership.lost}
        by_stage = Counter(seat.stage for seat in lost)
        if shape.replicas == 1 and lost:
            return True
    return (
        not sources
        or any(by_stage[stage] > 1 for stage in ends)
        or any(trouble.kind in ("drop", "cut", "deafened", "walled") for trouble in cluster.scenario.troubles)
    )


def run_seed(seed: int) -> ScenarioOutcome:
    """Run the scenario of ``seed``."""
    return run(f"--seed {seed}", scenario(seed))


def run_confused(seed: int) -> ScenarioOutcome:
    """Run the scenario of ``seed`` with a confused worker."""
    return run(f"--confused --seed {seed}", with_confusion(seed))


def run_takeover(seed: int) -> ScenarioOutcome:
    """Run the scenario of ``seed`` in which others take the coordinator's place."""
    return run(f"--takeovers --seed {seed}", with_a_takeover(seed))


def campaign(
    seeds: Iterable[int], jobs: int = 1, run_one: Callable[[int], ScenarioOutcome] = run_seed
) -> CampaignReport:
    """Run the scenarios of all ``seeds``, each by ``run_one``, in ``jobs`` processes."""
    return _report(run_one, seeds, jobs)


@dataclass(frozen=True)
class Instants:
    """A job, and the steps in which each worker is killed around each of its instructions, one at a time."""

    option: str  # of ``recycle campaign``, to run one case again
    job: Scenario
    steps: range
    source: Seat | None = None  # if given, only it is killed, at each point of serving a newcomer

    def moments(self) -> list[str]:
        """Return the kills to try: before and after each instruction that runs in these steps, or in a replay, if
        nobody else is killed; and if a worker comes back, at each point of the regroups for that.
        """
        if self.source is not None:
            return [f"kill {self.source} at serving.{point}:{number}" for point, number in SERVED]
        back = {fault.seat for fault in self.job.faults}
        who = {seat: f"{seat}#1" if seat in back else str(seat) for seat in sorted(self.job.shape.seats)}
        outcome = run(self.option, self.job)
        ran = dict.fromkeys(
            [(who[seat], instruction) for seat, instruction in outcome.replayed]
            + [(who[span.seat], span.instruction) for span in outcome.spans if span.instruction.step in self.steps]
        )
        around = [
            f"kill {process} {when} {instruction}" for process, instruction in ran for when in ("before", "after")
        ]
        return around + [
            f"kill {process} at recovery.{point}:{number}"
            for process in who.values()
            for point in ("start", "report", "resume", *["parked"] * self.job.logs)
            for number in range(1, REGROUPINGS + 1)
            if back
        ]

    def run(self, fault: str) -> ScenarioOutcome:
        """Run the job with ``fault``, a kill in its text form."""
        return run(f"{self.option} --kill '{fault}'", self.one(fault))

    def one(self, fault: str) -> Scenario:
        """Return the scenario of the job with ``fault``, a kill in its text form."""
        return replace(self.job, faults=(*self.job.faults, Fault.parse(fault)), torn=sum(map(ord, fault)))


def _job(shape: Topology, steps: int, fault: str = "", shrinks: bool = False, **more: Any) -> Scenario:
    """Return a job in which ``fault``, if there is one, kills a worker, which comes back."""
    costs = CostModel.uniform(shape.stages, 5_000, 5_000, 5_000, 500, 3_000, 2_000)
    policy = Policy(split_backward=shape.stages > 1, activation_cap=2 * shape.stages, shrinks=shrinks)
    if fault:
        more |= {"faults": (Fault.parse(fault),), "rejoin": "always"}
    return Scenario(shape, costs, policy, steps, **more)


SERVED = (("told", 1), *(("given", number) for number in range(1, 9)), ("hash", 1))
LOSS = Instants("--every-instant", _job(Topology(3, 4, 6), 3), range(2, 3))
REGROUPINGS = 4  # for a start, a loss and a return
# from the newcomer's first message to the first step in which it has work again (a test checks that)
RETURN = Instants("--every-return", _job(Topology(3, 2, 4), 24, "kill 2.1 before 1F2.0@2"), range(11, 20))
# a replica is lost, and its step with it if not all have their sums; it comes back whole
SHRINK = Instants(
    "--every-shrink",
    _job(Topology(3, 2, 4), 30, "kill 2.1 before 1F2.0@2", shrinks=True, unit="replica"),
    range(1, 27),
)
# a replica of two ranks is lost whole, and comes back to scripts with loops of their own
PUSH = Instants(
    "--every-push",
    _job(
        Topology(3, 1, 2),
        40,
        "kill 2.0 before 0F2.0@2",
        unit="replica",
        shards=2,
        pushes=True,
        dawdles=0.3,
        clip=40.0,
    ),
    range(1, 13),
)
# a stage is lost in the middle of the fourth step, and the two steps after the checkpoint are replayed
REPLAY = Instants(
    "--every-replay",
    _job(
        Topology(1, 3, 4, ((0, 2),)),
        7,
        "kill 0.1 before 1F0.2@4",
        logs=True,
        clip=30.0,
        between=((1, "save"),),
    ),
    range(4, 6),
)
# a newcomer's only source is lost before or while it serves; then the stage is replayed from logs
SOURCE = Instants(
    "--every-source",
    _job(
        Topology(2, 2, 2),
        60,
        "kill 1.1 before 1F1.0@3",
        logs=True,
        between=((1, "save"), *((step, "pause") for step in range(2, 60))),
    ),
    range(3, 4),
    Seat(0, 1),
)
EVERY = {each.option: each for each in (LOSS, RETURN, REPLAY, SOURCE, SHRINK, PUSH)}


def every_instant(instants: Instants, every: int = 1, jobs: int = 1) -> CampaignReport:
    """Kill each seat around each (or each ``every``-th) of its instructions, one at a time, in ``jobs`` processes."""
    return _report(instants.run, instants.moments()[::every], jobs)


def _report(run_one: Callable[[Any], ScenarioOutcome], cases: Iterable[Any], jobs: int) -> CampaignReport:
    started = time.monotonic()
    count, faults, redone, wrong = 0, 0, 0.0, []
    hits: Counter[tuple[str, Op]] = Counter()
    exercised = Counter(dict.fromkeys(ProtocolRule, 0))
    for outcome in _outcomes(run_one, cases, jobs):
        hits.update(outcome.hits)
        exercised.update(outcome.exercised)
        count, faults, redone = count + 1, faults + len(outcome.faults), redone + outcome.redone
        if outcome.violations:
            wrong.append(outcome)
    return CampaignReport(
        count, faults, tuple(wrong), redone / max(1, count), time.monotonic() - started, hits, exercised
    )


def _outcomes(run_one: Callable[[Any], ScenarioOutcome], cases: Iterable[Any], jobs: int) -> Iterator[ScenarioOutcome]:
    if jobs == 1:
        yield from map(run_one, cases)
        return
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:  # forked processes inherit compiled code
        yield from pool.map(partial(_run_apart, run_one), cases, chunksize=16)


def _run_apart(run_one: Callable[[Any], ScenarioOutcome], case: Any) -> ScenarioOutcome:
    """Run one case. Drop spans and story if nothing was wrong, so that they need not travel."""
    outcome = run_one(case)
    return outcome if outcome.violations else replace(outcome, spans=(), story=())

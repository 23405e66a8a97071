"""A whole job in virtual time, coordinator and all, in which only clock, network and tensors are simulated.

Every worker runs ``core.loop`` over ``core.executor``; its messages go through ``core.protocol`` objects to the one
``core.membership``, whose answers come back over lines that take time, stop, or break.  Weights are exact numbers
(``simulator.exact``).  What may go wrong is in :class:`Trouble`; what must hold is checked while it runs and at the end
(``simulator.checks``).  The same seed gives the same events.

Unlike ``simulator.virtual``, which runs one membership at a time and answers how long things take, workers here learn of
changes one by one, at any instant, so this answers whether anything can break.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Callable

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.executor import Span
from recycle_plugin.core.instruction import COMPUTE, Op
from recycle_plugin.core.membership import Membership
from recycle_plugin.core.output import SUPERVISORS, WORKERS, Event, Output
from recycle_plugin.core.protocol import Beat, End, Exited, Fence, Pulse
from recycle_plugin.core.watch import TICK_S
from recycle_plugin.simulator.worker import MILLISECOND, REGROUP_S, Died, Planner, Scenario, Sum, Trouble, Worker

CONTROL_US = 300  # a control message's way
DATA_US = 500  # a boundary tensor's
DETECTION_US = 20 * MILLISECOND
BEAT_US = 200 * MILLISECOND


class Cluster:
    """Runs one scenario; ``watcher`` is told what it may want to check (``simulator.checks``)."""

    def __init__(self, scenario: Scenario, weights: tuple[int, ...], watcher: Any) -> None:
        self.scenario, self.watcher, self.random = scenario, watcher, Random(scenario.torn)
        self.membership = Membership(len(scenario.shape.seats))
        self.now, self._ticket = 0, count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.workers = {rank: Worker(self, rank, seat, weights[seat.stage]) for rank, seat in enumerate(scenario.shape.seats)}
        self.rank_of = {seat: rank for rank, seat in enumerate(scenario.shape.seats)}
        self.sums: dict[tuple[int, Op, int, int], Sum] = {}  # by generation, what it is, its first stage, step
        self.events: list[tuple[int, Event]] = []
        self.spans: list[Span] = []
        self.links: dict[tuple[int, int], tuple[str, int, int]] = {}  # kind, until, delay
        self.cut: set[int] = set()
        self.hits: Counter[tuple[str, Op]] = Counter()  # kind of trouble, and what the worker was at
        self.over = False
        self._watched = -1
        self.planner = Planner(scenario.costs, scenario.policy)
        self.blocks = scenario.policy.blocks(scenario.shape)

    def run(self, until_us: int) -> None:
        """Until nobody has anything left to do, or ``until_us``."""
        for rank, worker in self.workers.items():
            worker.life = worker.live()
            self.later(0, partial(self.advance, rank))
        for trouble in self.scenario.troubles:
            self.later(trouble.at_us, partial(self._strike, trouble))
        self.later(0, self._tick)
        self.later(0, self._beat)
        while self._agenda and self._agenda[0][0] <= until_us and any(worker.runs for worker in self.workers.values()):
            self.now, _, happen = heappop(self._agenda)
            happen()

    def later(self, after_us: int, happen: Callable[[], None]) -> None:
        heappush(self._agenda, (self.now + after_us, next(self._ticket), happen))

    # --- the coordinator and its lines --------------------------------------------------------------

    def tell_coordinator(self, rank: int, message: object) -> None:
        if rank not in self.cut:
            self.later(CONTROL_US, lambda: self._act(self.membership.receive(message, self.now / 1e6)))

    def _act(self, output: Output) -> None:
        self.events += [(self.now, event) for event in output.events]
        for whom, message in output.messages:
            if whom == SUPERVISORS:
                self._tell_supervisors(message)
                continue
            for rank in self.workers if whom == WORKERS else (whom,):
                if rank not in self.cut:
                    self.later(CONTROL_US, partial(self._deliver, rank, message))
        self.watcher.committed(self)
        number = self.membership.regrouping
        if number is not None and number != self._watched:
            self._watched = number
            self.later(int(REGROUP_S * 1e6), partial(self._overdue, number))

    def _overdue(self, number: int) -> None:
        if self.membership.regrouping == number:
            self._act(self.membership.regroup_overdue(REGROUP_S))

    def _deliver(self, rank: int, message: object) -> None:
        worker = self.workers[rank]
        if worker.alive:
            worker.line.take(End(0, message.reason, True) if isinstance(message, Fence) else message)
            self.wake(rank)

    def _tell_supervisors(self, message: object) -> None:
        if isinstance(message, Fence) and message.rank not in self.cut and not self.workers[message.rank].unfenced:
            self.later(CONTROL_US, partial(self.kill, message.rank))

    def _tick(self) -> None:
        self._act(self.membership.tick(self.now / 1e6))
        self.later(int(TICK_S * 1e6), self._tick)

    def _beat(self) -> None:
        """What a worker's own thread and its supervisor say of it."""
        for rank, worker in self.workers.items():
            if worker.alive:
                self.tell_coordinator(rank, Pulse(rank, worker.stopped))
                if not worker.stopped and worker.runs:
                    self.tell_coordinator(rank, Beat(rank, self.now, worker.done, *worker.at))
        self.later(BEAT_US, self._beat)

    # --- data ---------------------------------------------------------------------------------------

    def send(self, source: int, target: int, datum: Datum, value: Any, era: int) -> None:
        kind, until, delay = self.links.get((source, target), ("", 0, 0))
        if self.now < until and kind == "drop" or (source in self.cut) != (target in self.cut):
            return
        self.later(DATA_US + (delay if self.now < until else 0), partial(self._arrive, target, datum, value, era))

    def _arrive(self, target: int, datum: Datum, value: Any, era: int) -> None:
        worker = self.workers[target]
        if worker.alive:
            worker.arrive(datum, value, era)
            self.wake(target)

    # --- troubles -----------------------------------------------------------------------------------

    def _strike(self, trouble: Trouble) -> None:
        ranks = [self.rank_of[seat] for seat in trouble.seats]
        for rank in ranks:
            self.hit(trouble.kind, rank)
        match trouble.kind:
            case "kill":
                for rank in ranks:
                    self.kill(rank)
            case "stop" | "unfenced" | "stuck" | "slow":
                for rank in ranks:
                    self.trouble(rank, trouble)
            case "drop" | "delay":
                delay = trouble.for_us if trouble.kind == "delay" else 0
                self.links[ranks[0], self.rank_of[trouble.peer]] = (trouble.kind, self.now + trouble.for_us, delay)
            case "cut":
                self._cut_off(ranks)

    def hit(self, kind: str, rank: int) -> None:
        """Count it, for the table of what has been tried."""
        if self.workers[rank].current is not None and self.workers[rank].alive:
            self.hits[kind, self.workers[rank].current.op] += 1

    def trouble(self, rank: int, trouble: Trouble) -> None:
        worker = self.workers[rank]
        if trouble.kind == "slow":
            worker.percent = trouble.percent
        elif trouble.kind == "stuck":
            worker.stuck = True
        else:
            worker.stopped, worker.unfenced = True, trouble.kind == "unfenced"
            self.later(trouble.for_us, partial(self._wake_up, rank))

    def _wake_up(self, rank: int) -> None:
        self.workers[rank].stopped = False
        self.wake(rank)

    def kill(self, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.alive:
            return
        worker.alive, worker.stopped = False, False
        self._touch_sums(rank)
        at = self.now / 1e6
        if rank not in self.cut:
            self.later(DETECTION_US // 2, lambda: self._act(self.membership.connection_lost(rank, self.now / 1e6)))
            self.later(DETECTION_US, lambda: self._act(self.membership.receive(Exited(rank, -9, at), self.now / 1e6)))

    def _cut_off(self, ranks: list[int]) -> None:
        self.cut |= set(ranks)
        for rank in ranks:
            self._touch_sums(rank)
            self.later(DETECTION_US, lambda rank=rank: self._act(self.membership.connection_lost(rank, self.now / 1e6)))
            self.later(DETECTION_US, partial(self._lose_coordinator, rank))

    def _lose_coordinator(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.alive and worker.line.end is None:
            worker.line.end = End(0, "the coordinator's host is gone", failed=True)
            self.wake(rank)

    def _touch_sums(self, rank: int) -> None:
        for sum_ in self.sums.values():
            if rank in sum_.members:
                sum_.touched = True

    # --- the clock ----------------------------------------------------------------------------------

    def advance(self, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.alive or not worker.runs:
            return
        if worker.stopped:
            worker.waiting = True  # until it wakes up
            return
        worker.waiting = False
        try:
            wanted = next(worker.life)
        except StopIteration:
            worker.runs = False
            return
        except Died:
            self.kill(rank)
            return
        if isinstance(wanted, int):
            worker.busy = True
            self.later(wanted, partial(self._finish, rank))
        else:
            worker.waits_for, worker.waiting = wanted, True

    def _finish(self, rank: int) -> None:
        self.workers[rank].busy = False
        self.advance(rank)

    def wake(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.waiting and not worker.stopped and not worker.busy:
            worker.waiting = False
            self.later(0, partial(self.advance, rank))


def redone_share(cluster: Cluster) -> float:
    """Compute instructions run more than once, of all that were needed."""
    shape = cluster.scenario.shape
    seen = {span.instruction for span in cluster.spans if span.instruction.op in COMPUTE}
    ran = sum(span.instruction.op in COMPUTE for span in cluster.spans)
    return (ran - len(seen)) / max(1, len(seen)) if shape.batch else 0.0

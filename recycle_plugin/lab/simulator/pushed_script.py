"""A simulated training script that runs its own loop: forward, backward and step, and what is done between steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

from recycle_plugin.core.messages.activity import ELSEWHERE, Activity
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.pushed import Need, PushedSteps, follow, steps
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.pushed_machine import SimulatedPushedMachine
from recycle_plugin.lab.simulator.scenario import MILLISECOND
from recycle_plugin.lab.simulator.script import SimulatedScript

DAWDLES_US = 120 * MILLISECOND  # at most
CHANGES = 0.4  # share of the sums that a script changes


class PushedScript(SimulatedScript):
    """The script of the worker on ``machine``, which draws its own samples."""

    _machine: SimulatedPushedMachine

    def __init__(self, machine: SimulatedPushedMachine) -> None:
        super().__init__(machine)
        self._steps = PushedSteps(machine.pushed, partial(steps, self._loop))
        view = machine.control_view
        self._random = Random(f"a script's pauses in {self._scenario.torn} {view.rank} {view.incarnation}")

    def _train(self) -> Iterator[Any]:
        machine = self._machine
        if machine.newcomer is None:
            yield from self._loop.start()
            machine.set_for(1)
        else:
            yield from follow(machine.newcomer, machine.control_view)
            yield from self._steps.open()
            machine.met = machine.steps.stepped
        while machine.steps.stepped < self._scenario.steps:
            if (yield from self._run_micro_batch()):
                if self._scenario.by_hand:
                    machine.change_for(machine.steps.stepped + 1)
                    machine.set_for(machine.steps.stepped + 1)
                yield from self._do_between(machine.steps.stepped)

    def _run_micro_batch(self) -> Waits[bool]:
        """Draw a micro-batch, and run it forward and backward. Return whether that ends a step."""
        yield from self._dawdle()
        self._machine.draw()
        yield from self._steps.begin()
        view, told = self._machine.control_view, self._steps.at_boundary
        since = view.number
        yield 1 + self._scenario.costs.of(Op.F, self._machine.seat.stage) // 2 * self._machine.percent // 100
        yield from self._steps.run()
        if self._steps.need is Need.STEP and self._random.random() < CHANGES:
            self._machine.change = f"of rank {view.rank}"
        yield from self._dawdle()
        applied = yield from self._steps.close()
        if view.number == since:
            self._machine.cluster.watcher.told_boundary(self._machine, told, applied)
        self._machine.cluster.exercised[ProtocolRule.BOUNDARY_MOVED] += told and not applied
        return applied

    def _dawdle(self) -> Iterator[Any]:
        """Do something else between two calls, and hear nothing meanwhile."""
        if self._random.random() < self._scenario.dawdles:
            self._machine.at = Activity(ELSEWHERE, "the training script")
            yield self._random.randrange(DAWDLES_US) * self._machine.percent // 100

    def _do_between(self, step: int) -> Iterator[Any]:
        for _, what in (each for each in self._scenario.between if each[0] == step):
            yield from {"evaluate": self._meet, "save": self._save, "pause": self._pause}[what](step)

    def _meet(self, step: int) -> Iterator[Any]:
        """Call a collective of all ranks with work (runtime/collectives/in_flight.py), as to average evaluations."""
        machine = self._machine
        machine.met = step
        for other in machine.cluster.workers.values():
            machine.cluster.wake(other)
        while True:
            try:
                yield from machine.wait(f"the others at the mean behind step {step}", self._all_came)
                return
            except Interrupted:
                machine.cluster.exercised[ProtocolRule.HEARD_BETWEEN] += 1
                yield from self._hear()

    def _all_came(self) -> bool | None:
        cluster, view = self._machine.cluster, self._machine.control_view
        asking = (cluster.workers[each.rank] for each in view.roster)
        came = (other.met for other in asking if isinstance(other, SimulatedPushedMachine))
        return all(step >= self._machine.met for step in came) or None

    def _hear(self) -> Iterator[Any]:
        """Recover from a change of the membership between two steps."""
        assert self._steps.need is Need.NOTHING, "a step is over"
        yield from self._loop.catch_up()

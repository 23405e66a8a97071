"""The collectives of simulated workers: a REDUCE, and a TIE over the stages that share a weight. Nobody has the result
before all have come, and a death leaves some with it and some without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recycle_plugin.core.messages.activity import COMPUTES, Activity
from recycle_plugin.core.vocabulary.dataflow import of_layers
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator.exercised import ProtocolRule

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.cluster import Cluster
    from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine


@dataclass
class Sum:
    """A REDUCE or a TIE under way: its members, what each has brought, and whether it is done."""

    members: frozenset[int]
    brought: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    touched: bool = False  # a member died or was cut off before all had the result


def reduced(machine: SimulatedMachine, instruction: Instruction, have: StepStore, holder: Seat | None) -> Waits[Any]:
    """Return the sum of a REDUCE, made or taken from ``holder``, who has it already."""
    datum, stage = of_layers("reduced", machine.seat, instruction.step), (machine.seat.stage,)
    if holder is not None:
        brought = yield from _together(machine, instruction, stage, have[datum] if holder == machine.seat else None)
        machine.cluster.exercised[ProtocolRule.ROLLED_FORWARD] += datum not in have
        return brought[machine.control_view.roster.holding(holder, machine.held.shard).rank]
    counted = have.of("wgrad", instruction.step)
    brought = yield from _together(machine, instruction, stage, (counted, machine.numbers.sums(instruction.step)))
    machine.cluster.exercised[ProtocolRule.SUMMED_AGAIN] += machine.worker.running.resumed
    machine.cluster.watcher.summed(machine, instruction.step, {rank: part for rank, (part, _) in brought.items()})
    return machine.numbers.total([sums for _, sums in brought.values()])


def tied(machine: SimulatedMachine, instruction: Instruction, have: StepStore) -> Waits[Any]:
    """Return the sum over a tie; each stage's sum comes from any of its workers, which have the same."""
    brought = yield from _together(
        machine, instruction, machine.numbers.tie, have[of_layers("reduced", machine.seat, instruction.step)]
    )
    by_stage = {
        machine.cluster.workers[rank].seat.stage: value for rank, value in sorted(brought.items(), reverse=True)
    }
    machine.cluster.watcher.tied(
        machine,
        instruction.step,
        [(machine.cluster.workers[rank].seat.stage, value) for rank, value in brought.items()],
    )
    machine.cluster.exercised[ProtocolRule.TIED_AGAIN] += machine.worker.running.resumed
    return machine.numbers.over_tie(by_stage)


def changed(machine: SimulatedMachine, step: int, change: str | None) -> Waits[dict[int, str | None]]:
    """Return, by rank, what the scripts of all that are to apply ``step`` have made of its sum."""
    at, stage = Instruction(Op.STEP, machine.seat.chunk, None, step), (machine.seat.stage,)
    return (yield from _together(machine, at, stage, change, "what scripts have made of its sum"))


def confirmed(machine: SimulatedMachine, step: int) -> Waits[Any]:
    """Wait until all of them have that."""
    at, stage = Instruction(Op.STEP, machine.seat.chunk, None, step), (machine.seat.stage,)
    yield from _together(machine, at, stage, None, "that all have it")


def _together(
    machine: SimulatedMachine, instruction: Instruction, stages: tuple[int, ...], mine: Any, what: str = ""
) -> Waits[Any]:
    """Return by rank what the workers of ``stages`` bring to ``instruction``. ``what``: which exchange of it."""
    members = frozenset(member.rank for member in machine.control_view.roster.stages(stages, machine.held.shard))
    sum_ = machine.cluster.sums.setdefault(
        (machine.control_view.number, instruction.op, stages[0], instruction.step, machine.held.shard, what),
        Sum(members),
    )
    sum_.brought[machine.rank] = mine
    complete(machine.cluster, sum_)
    yield from machine.wait(lambda: f"the others at {instruction}", lambda: sum_.done or None)
    machine.at = Activity(COMPUTES, instruction)
    yield machine.cluster.scenario.costs.of(instruction.op, machine.seat.stage) + 1
    if sum_.touched and machine.cluster.random.random() < machine.cluster.scenario.torn_share:
        yield from machine.wait("news of a lost worker", lambda: None)
    return sum_.brought


def complete(cluster: Cluster, sum_: Sum) -> None:
    """Complete a sum to which all have brought their parts, if they reach each other."""
    if not sum_.done and set(sum_.brought) == sum_.members and cluster.coordination.joined(sum_.members):
        sum_.done = True
        for rank in sum_.members:
            cluster.wake(cluster.workers[rank])

"""Plain iterators: which worker draws which batch, and which workers keep it.

An iterator can't be read again, nor by another process. In stock DeepSpeed each worker of the first and of the last
stage (the *ends*) calls ``next`` once per micro-batch, and both ends of a replica have to stay at the same position.
So:

* A *draw* is one call of ``next``, named by the replica whose iterator it is and its position in the step. Both ends
  make the same draws in the same order: replica r draws first for its own micro-batches, except those that another
  replica has drawn for, then for others. No position is skipped. A worker draws for a step when it begins the step.
* A draw is the whole batch, inputs and labels. It is sent to the worker that runs the micro-batch at that stage (most
  often the drawer itself) and to the next live worker of the stage; both keep it until the step is committed. No result
  of the batch (activation, gradient, sum) may reach another worker before the copies have left the drawer.
* A replica is a *source* if both its ends are live. Kept batches of a lost replica are used. The input comes from the
  worker that drew it for the first stage, the label from the worker that drew it for the last stage. If that worker is
  gone, the other end's draw of the same position is used. A live end of a replica that is no longer a source still
  makes the draws whose other half is kept. So steps begun before the failure are the same as without it.
* A micro-batch that nobody has drawn is dealt to the sources, evenly, at positions after their own, so the batch keeps
  its size. So is a micro-batch whose copies were lost before anything was computed from them. The deal follows from the
  reports of a membership change. A draw that was made stays, so ends that are at different points of a step continue in
  the same order.
* The job ends if all copies of a batch are lost and results of it exist, or if no source is left.
* A replica whose iterator has *ended* is no source until its script passes another iterator. The rest of its share is
  dealt like a lost replica's. When all iterators have ended, the step that can't be filled is dropped, as in DeepSpeed,
  and every script gets StopIteration.
* An iterator's *place* is its number, if a script passes several in turn, and the number of batches read from it. Ends
  report it with each step. The coordinator keeps it by replica for committed steps (core/coordinator/facts/places.py).
* A worker that comes back begins its iterator anew and reads it up to its replica's place, which has not moved
  meanwhile. Once both ends are back the replica is a source again, and continues after its last used batch.

Draws of step k are never made after draws of step k+1: a worker that begins k+1 has the gradient sum of k, so every
batch of k was drawn, copied and used at both ends before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan, Torn
from recycle_plugin.core.vocabulary.topology import ClusterView


class Draw(NamedTuple):
    """One call of ``next``: position ``position`` (from 0, in each step) in the iterator of replica ``source``."""

    source: int
    position: int

    def __str__(self) -> str:
        return f"{self.source}.{self.position}"


class Place(NamedTuple):
    """The place of a plain iterator: its script's ``iterator``-th, which has given ``read`` batches."""

    iterator: int = 1
    read: int = 0


Batches = Mapping[MicroBatch, Draw]
"""Of one step: the micro-batches whose data exists, each with its draw."""


class Ended(Exception):
    """An iterator has no more batches."""


class Lacking(Exception):
    """Nothing can be drawn for a micro-batch, because the iterators have ended."""


class Gone(Exception):
    """The data of a micro-batch is lost, so the step can't be finished."""


@dataclass(frozen=True)
class IteratorState:
    """The state of plain iterators that all workers know when a generation goes on: its plan, what each worker holds of
    uncommitted steps (data, and by step the batches drawn), and the recovery plans of those steps.

    ``placed``: the ends whose iterators stand at their replicas' places; None: all. ``places``: by replica, as far as
    they are known. ``ended``: by replica, the number of its script's iterator that ended last.
    """

    plan: Plan
    held: Held
    held_draws: Mapping[Seat, Mapping[int, Batches]]
    recovery_plans: Mapping[int, RecoveryPlan]
    placed: AbstractSet[Seat] | None = None
    places: Mapping[int, Place] = field(default_factory=dict)
    ended: Mapping[int, int] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[int, ...]:
        """The replicas whose first and last stage both live and stand at the replica's place, in ascending order."""
        last = self.plan.stages - 1
        return tuple(
            replica
            for replica in self.plan.view.live_replicas(0)
            if replica in self.plan.view.live_replicas(last)
            and (self.placed is None or {Seat(replica, 0), Seat(replica, last)} <= self.placed)
        )


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """A batch to send: ``giver`` has, or draws, the batch of ``micro_batch``, and sends it to ``taker``."""

    micro_batch: MicroBatch
    giver: Seat
    taker: Seat


@dataclass(frozen=True)
class StepDraws:
    """The draw of each micro-batch's data in one step, and the transfers that bring it to where it is used and kept."""

    draws: Batches
    transfers: tuple[BatchTransfer, ...]

    def of(self, seat: Seat) -> list[tuple[Draw, MicroBatch]]:
        """Return the draws that the end at ``seat`` makes in this step, in order, each with its micro-batch."""
        return sorted((draw, micro_batch) for micro_batch, draw in self.draws.items() if draw.source == seat.replica)

    @property
    def dealt(self) -> Batches:
        """By micro-batch, the draws that a replica makes for other replicas."""
        return {micro_batch: draw for micro_batch, draw in self.draws.items() if draw.source != micro_batch.replica}


def share(iterator_state: IteratorState, step: int, iterator: int = 1) -> StepDraws:
    """Share out the data of ``step``, for which scripts give their ``iterator``-th, alike on all workers.

    Raises :class:`Gone` if data is lost, :class:`Lacking` if all sources' iterators have ended, and :class:`Torn` if
    two workers have different draws for one micro-batch. Costs time in proportion to the micro-batches, times the
    workers of the first and last stage.
    """
    plan = iterator_state.plan
    last = plan.stages - 1
    here = {seat: found[step] for seat, found in sorted(iterator_state.held_draws.items()) if step in found}
    runs = _runs(iterator_state, step)
    traced = _traced(iterator_state, step)
    known = _known(here, step)
    alive = [source for source in iterator_state.sources if iterator_state.ended.get(source) != iterator]
    draws = _deal(iterator_state, step, known, sorted({micro_batch for _, micro_batch in runs}), traced, alive)
    transfers = [
        transfer
        for (stage, micro_batch), runner in sorted(runs.items())
        for transfer in _transfers(
            plan.view, step, micro_batch, draws[micro_batch], runner, here, (last - stage, micro_batch in traced)
        )
    ]
    return StepDraws(draws, tuple(transfers))


def _known(here: Mapping[Seat, Batches], step: int) -> dict[MicroBatch, Draw]:
    known: dict[MicroBatch, Draw] = {}
    for seat, batches in here.items():
        for micro_batch, draw in batches.items():
            if known.setdefault(micro_batch, draw) != draw:
                raise Torn(
                    f"seat {seat} has draw {draw} for micro-batch {micro_batch} of step {step}, "
                    f"and another worker draw {known[micro_batch]}: this is a mistake of the plugin; "
                    "go on from the last checkpoint, and report it with the run's events.jsonl"
                )
    return known


def _runs(iterator_state: IteratorState, step: int) -> dict[tuple[int, MicroBatch], Seat]:
    """Return the seat that loads each micro-batch, at both ends."""
    plan, ends = iterator_state.plan, {0, iterator_state.plan.stages - 1}
    recovery = iterator_state.recovery_plans.get(step)
    if recovery is None:
        return {(stage, micro_batch): plan.route[stage, micro_batch] for stage in ends for micro_batch in plan.batch}
    return {(stage, one): seat for stage in ends for one, seat in recovery.forwards(stage).items()}


def _traced(iterator_state: IteratorState, step: int) -> AbstractSet[MicroBatch]:
    """Return the micro-batches of ``step`` that something was computed with."""
    found = {
        datum.micro_batch
        for have in iterator_state.held.values()
        for datum in have
        if datum.step == step and datum.kind != "params"
    }
    stepped = any(
        datum.kind == "params" and datum.step == step + 1 for have in iterator_state.held.values() for datum in have
    )
    if stepped or None in found:
        return frozenset(iterator_state.plan.view.topology.batch)
    return {micro_batch for micro_batch in found if micro_batch is not None}


def _deal(
    iterator_state: IteratorState,
    step: int,
    known: Batches,
    wanted: list[MicroBatch],
    traced: AbstractSet[MicroBatch],
    alive: Sequence[int],
) -> dict[MicroBatch, Draw]:
    """Return the draws of the ``wanted`` micro-batches, drawn from ``alive`` sources if they are not ``known``."""
    free = {source: _unused({draw.position for draw in known.values() if draw.source == source}) for source in alive}
    draws = {one: known[one] for one in wanted if one in known}
    draws |= {
        one: Draw(one.replica, next(free[one.replica])) for one in wanted if one not in draws and one.replica in alive
    }
    orphans = [one for one in wanted if one not in draws]
    lost = [one for one in orphans if one in traced]
    if lost:
        raise Gone(
            f"step {step}: all workers that kept the data of micro-batch {lost[0]} are lost, "
            "and plain iterators can't be read again; go on from the last checkpoint, "
            "or use engine.set_data_source(), which needs no copies"
        )
    if orphans and not alive and iterator_state.sources:
        raise Lacking(f"all iterators have ended, and step {step} lacks the data of {len(orphans)} micro-batches")
    if orphans and not alive:
        raise Gone(
            "no replica has both its first and its last stage left, so plain iterators no longer give inputs with "
            "their labels; go on from the last checkpoint, or use engine.set_data_source(), which needs no such replica"
        )
    ahead = {source: next(positions) for source, positions in free.items()}
    for one in orphans:
        source = min(alive, key=lambda each: (ahead[each], each))
        draws[one] = Draw(source, ahead[source])
        ahead[source] = next(free[source])
    return draws


def _unused(positions: AbstractSet[int]) -> Iterator[int]:
    """Yield the positions that nobody has drawn yet, in order: no batch is passed over."""
    return (position for position in count() if position not in positions)


def _transfers(
    view: ClusterView,
    step: int,
    micro_batch: MicroBatch,
    draw: Draw,
    runner: Seat,
    here: Mapping[Seat, Batches],
    other: tuple[int, bool],
) -> Iterator[BatchTransfer]:
    """Yield the transfers of one batch to ``runner`` and to the worker that keeps a copy. ``other``: the other end's
    stage, and whether something was computed with the micro-batch.
    """
    live = view.live_replicas(runner.stage)
    keeper = Seat(live[(live.index(runner.replica) + 1) % len(live)], runner.stage)
    holders = [seat for seat in here if seat.stage == runner.stage and micro_batch in here[seat]]
    drawer = Seat(draw.source, runner.stage)
    takers = {runner, keeper}.difference(holders, [drawer] if drawer in view.live else [])
    if not takers:
        return
    if holders or drawer in view.live:
        giver = holders[0] if holders else drawer
    elif runner.stage == 0 and other[1]:
        raise Gone(
            f"step {step}: all workers that kept the inputs of micro-batch {micro_batch} are lost, and plain iterators "
            "can't be read again; "
            "go on from the last checkpoint, or use engine.set_data_source(), which needs no copies"
        )
    else:
        giver = next(seat for seat in here if seat.stage == other[0] and micro_batch in here[seat])
    yield from (BatchTransfer(micro_batch, giver, taker) for taker in sorted(takers))


def pack(drawn: Mapping[int, Batches]) -> dict[str, str]:
    """Pack ``drawn``, batches by step, for a message: {"17": "0.0 1.0=0.2"}: 1.0's data is draw 0.2, 0.0's its own."""
    return {
        str(step): " ".join(
            str(one) if tuple(one) == tuple(draw) else f"{one}={draw}" for one, draw in sorted(batches.items())
        )
        for step, batches in sorted(drawn.items())
    }


def unpack(packed: Mapping[str, str]) -> dict[int, Batches]:
    """Return the batches by step that :func:`pack` has packed. Raises ValueError if ``packed`` is malformed."""

    def pairs(text: str) -> Iterator[tuple[MicroBatch, Draw]]:
        for entry in text.split():
            name, _, draw = entry.partition("=")
            yield MicroBatch.parse(name), Draw(*MicroBatch.parse(draw or name))

    return {int(step): dict(pairs(text)) for step, text in packed.items()}

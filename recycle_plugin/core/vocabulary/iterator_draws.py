"""Plain iterators: who draws what of them, and who keeps it.

An iterator can't be read again, nor by somebody else.  Stock DeepSpeed has each worker of the first and of the last
stage (the *ends*) call ``next`` once per micro-batch; both ends of a replica have to stay at the same position.  So:

* A *draw* is one call, named by the replica whose iterator it is and its position in the step.  Both ends make the same
  draws in the same order: of replica r in step k first its own micro-batches r.0 to r.M-1, those that
  nobody has drawn in its place, then what it draws for others, with no position left out.  A worker draws when it
  begins a step, everything that it will need of it.
* What is drawn is the whole batch, inputs and labels.  It goes to whoever runs the micro-batch at that stage (most
  often the drawer) and to the next live worker of the stage, and all of them keep it until the step is committed.  Only
  when the copies have left the drawer may anything that others see follow from the batch: no activation, gradient or
  sum is older than its data.
* A replica is a *source* as long as both its ends live.  What is kept of a lost one's batches is used: its input from
  who drew it for the first stage, its label from who drew it for the last, or, where that one is gone, from the other
  end's draw of the same position.  A live end of a replica that is no source any more still makes the draws whose other
  half is kept.  So the interrupted step, and the next where it was begun, are those of the run without a failure.
* What nobody has drawn, or nobody has kept and nobody has computed with, is dealt to the sources, evenly, at positions
  behind their own: the batch stays as large as it was.  The deal follows from what everybody reports when the
  membership changes, and what was once drawn for a micro-batch stays so: ends that have come unequally far in a step
  continue in the same order.
* Where the copies are gone of what was computed with, the job ends.  It ends too where no source is left.
* Iterators end.  A replica whose own has *ended* is no source any more until its script gives another one, and the rest
  of its share is dealt like a lost one's: sources that have more left give more.  When all have ended, what there is of
  the step that can't be filled is dropped, as DeepSpeed does, and everybody's script hears so in that step.
* Where an iterator stands is its *place*: the number of the iterator, where a script gives several in turn, and how
  many batches that has given.  Ends say it with each step, and the coordinator keeps it by replica for steps that stay
  (core/coordinator/facts/places.py), also of replicas that have lost both their ends.
* Who comes back brings an iterator that begins anew.  It is read up to its replica's place, which nobody has moved
  meanwhile; one that the script has given since is at its beginning.  Once both ends are there the replica is a source
  again: it goes on with what nobody has had of it.

Draws of step k are never made after draws of step k+1: who begins k+1 has the gradient sum of k, so that every batch of
k was used at both ends, and drawn and copied before that.
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
    """One call of ``next``: position ``position`` (from 0, in each step) in the iterator of replica ``source``.  Text
    form ``source.position``.
    """

    source: int
    position: int

    def __str__(self) -> str:
        return f"{self.source}.{self.position}"


class Place(NamedTuple):
    """Where a plain iterator stands: it is the ``iterator``-th that its script has given, and has given ``read``
    batches.
    """

    iterator: int = 1
    read: int = 0


Batches = Mapping[MicroBatch, Draw]
"""Of one step: micro-batches whose data is there, and where it is from."""


class Ended(Exception):
    """An iterator has given all that it has."""


class Lacking(Exception):
    """There is nothing to draw for a micro-batch, since iterators have ended."""


class Gone(Exception):
    """The data of a micro-batch can't be had any more, so the step can't be finished."""


@dataclass(frozen=True)
class IteratorState:
    """The state of plain iterators that everybody knows when a generation goes on: its plan, what each worker holds of
    uncommitted steps (data, and by step the batches drawn), and the recovery plans of those steps.

    ``placed``: the ends whose iterators stand at their replicas' places; None: all do.  ``places``: by replica, as far
    as they are known.  ``ended``: by replica, which of its script's iterators has ended last.
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
        """The replicas whose iterators count, because both their first and last stage live and stand at one place, in
        ascending order.
        """
        last = self.plan.stages - 1
        return tuple(
            replica
            for replica in self.plan.view.live_replicas(0)
            if replica in self.plan.view.live_replicas(last)
            and (self.placed is None or {Seat(replica, 0), Seat(replica, last)} <= self.placed)
        )


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """A batch on its way: ``giver`` has, or draws, the batch of ``micro_batch``, and sends it to ``taker``."""

    micro_batch: MicroBatch
    giver: Seat
    taker: Seat


@dataclass(frozen=True)
class StepDraws:
    """How the data of one step is shared out: the draw that each micro-batch's data comes from, and the transfers that
    bring it to where it is used and kept.
    """

    draws: Batches
    transfers: tuple[BatchTransfer, ...]

    def of(self, seat: Seat) -> list[tuple[Draw, MicroBatch]]:
        """The draws that the worker at ``seat``, on the first or last stage, has to make in this step, in this order,
        each with its micro-batch.
        """
        return sorted((draw, micro_batch) for micro_batch, draw in self.draws.items() if draw.source == seat.replica)

    @property
    def dealt(self) -> Batches:
        """The draws that a replica makes for others which are no sources any more, by micro-batch."""
        return {micro_batch: draw for micro_batch, draw in self.draws.items() if draw.source != micro_batch.replica}


def share(iterator_state: IteratorState, step: int, iterator: int = 1) -> StepDraws:
    """Shares out the data of ``step``, for which scripts give their ``iterator``-th; everybody finds the same.

    Raises :class:`Gone` where data can't be had any more, :class:`Lacking` where all sources' iterators have ended, and
    :class:`Torn` where two workers have different draws for one micro-batch.  Costs time in proportion to the
    micro-batches, times the workers of the first and last stage.
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
    """The seats that are to load each micro-batch, at both ends."""
    plan, ends = iterator_state.plan, {0, iterator_state.plan.stages - 1}
    recovery = iterator_state.recovery_plans.get(step)
    if recovery is None:
        return {(stage, micro_batch): plan.route[stage, micro_batch] for stage in ends for micro_batch in plan.batch}
    return {(stage, one): seat for stage in ends for one, seat in recovery.forwards(stage).items()}


def _traced(iterator_state: IteratorState, step: int) -> AbstractSet[MicroBatch]:
    """Micro-batches of ``step`` that something was computed with."""
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
    """The draws of the ``wanted`` micro-batches, those that are not ``known`` from sources that are ``alive``."""
    free = {source: _unused({draw.position for draw in known.values() if draw.source == source}) for source in alive}
    draws = {one: known[one] for one in wanted if one in known}
    draws |= {
        one: Draw(one.replica, next(free[one.replica])) for one in wanted if one not in draws and one.replica in alive
    }
    orphans = [one for one in wanted if one not in draws]
    lost = [one for one in orphans if one in traced]
    if lost:
        raise Gone(
            f"step {step}: everybody who kept the data of micro-batch {lost[0]} is lost, "
            "and plain iterators can't be read again; go on from the last checkpoint, "
            "or use engine.set_data_source(), which needs no copies"
        )
    if orphans and not alive and iterator_state.sources:
        raise Lacking(f"all iterators have ended, and step {step} lacks the data of {len(orphans)} micro-batches")
    if orphans and not alive:
        raise Gone(
            "no replica has both its first and its last stage left, so that plain iterators give no inputs with their "
            "labels any more; "
            "go on from the last checkpoint, or use engine.set_data_source(), which needs no such replica"
        )
    ahead = {source: next(positions) for source, positions in free.items()}
    for one in orphans:
        source = min(alive, key=lambda each: (ahead[each], each))
        draws[one] = Draw(source, ahead[source])
        ahead[source] = next(free[source])
    return draws


def _unused(positions: AbstractSet[int]) -> Iterator[int]:
    """The positions that nobody has drawn yet, in their order: no batch is passed over, whoever has a part already."""
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
    """The transfers of one batch to ``runner`` and to the one that keeps a copy.

    ``other``: the other end's stage, and whether something was computed with the micro-batch.
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
            f"step {step}: everybody who kept the inputs of micro-batch {micro_batch} is lost, and plain iterators "
            "can't be read again; "
            "go on from the last checkpoint, or use engine.set_data_source(), which needs no copies"
        )
    else:
        giver = next(seat for seat in here if seat.stage == other[0] and micro_batch in here[seat])
    yield from (BatchTransfer(micro_batch, giver, taker) for taker in sorted(takers))


ALL_ENDED = "the end of the data before step"


def end_before(step: int) -> str:
    """The name of the barrier where all are when all iterators have ended before ``step`` was filled."""
    return f"{ALL_ENDED} {step}"


def ends_before(place: str) -> int | None:
    """The step before which the data has ended, of the barrier ``place`` that is for that; None for another one."""
    what, _, step = place.rpartition(" ")
    return int(step) if what == ALL_ENDED else None


def pack(drawn: Mapping[int, Batches]) -> dict[str, str]:
    """Packs ``drawn``, batches by step, for a message: {"17": "0.0 0.1 1.0=0.2"} says that 1.0's data is draw 0.2,
    while the others are their own.
    """
    return {
        str(step): " ".join(
            str(one) if tuple(one) == tuple(draw) else f"{one}={draw}" for one, draw in sorted(batches.items())
        )
        for step, batches in sorted(drawn.items())
    }


def unpack(packed: Mapping[str, str]) -> dict[int, Batches]:
    """The batches by step that :func:`pack` has put into ``packed``.  Raises ValueError where it is malformed."""

    def pairs(text: str) -> Iterator[tuple[MicroBatch, Draw]]:
        for entry in text.split():
            name, _, draw = entry.partition("=")
            yield MicroBatch.parse(name), Draw(*MicroBatch.parse(draw or name))

    return {int(step): dict(pairs(text)) for step, text in packed.items()}

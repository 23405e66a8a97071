"""The shards of one seat: what they have together, and where they stop.

They run the same program, each on its part of the stage, and a failure elsewhere stops each at an instruction of its
own.  All of them have to go on from the same one, with the same data: each goes on to where the furthest has got, and
what they report is what every one holds.

Why that is possible: in F, I and B the shards exchange parts of activations and gradients, and they wait for each other
before a STEP, so that none is on new weights while another may lack the sum.  These are *joint*: who has finished one
knows that all have begun it, and no shard of the seat is lost (or all are given up), so all can finish it.  Hence
nothing joint lies between a shard and the furthest one but what that shard is in.  Everything else is done by each
alone.  LOAD, W and SEND need nobody.  What waits for others may never come about where these are lost, or have stopped
before it: RECV, REDUCE, TIE, VALIDATE.  It is left out then, together with what needs it; nothing that the furthest has
finished needs it and is not left out, since all that reads what was received is joint, and so is the STEP, before which
a REDUCE's contributions stay.  What one shard has left out none of them holds, so it is discarded, and comes about
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recycle_plugin.core.vocabulary.dataflow import Datum, pack, provides, requires, unpack
from recycle_plugin.core.vocabulary.instruction import RECEIVES, Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import Batches
from recycle_plugin.core.vocabulary.iterator_draws import pack as pack_drawn
from recycle_plugin.core.vocabulary.iterator_draws import unpack as unpack_drawn

JOINT = frozenset({Op.F, Op.I, Op.B, Op.STEP})
WITH_OTHERS = RECEIVES | {Op.REDUCE, Op.TIE, Op.VALIDATE}


@dataclass(frozen=True)
class Lockstep:
    """The rule by which the shards of one seat stop together in ``program``, of a pipeline of ``stages`` stages."""

    program: tuple[Instruction, ...]
    stages: int

    def catch_up(self, finished: int, furthest: int, comes: Callable[[Instruction], bool]) -> tuple[Instruction, ...]:
        """The instructions that a shard still runs which has ``finished`` so many, where one has finished ``furthest``,
        the most of all.

        ``comes``: whether what waits for other seats still comes about.  Raises AssertionError where the shards are
        further apart than can be.
        """
        between = self.program[finished:furthest]
        joint = [one for one in between[1:] if one.op in JOINT]
        if joint:
            raise AssertionError(
                f"a shard has finished {joint[0]}, and another has not come to it: it stands before {between[0]}"
            )
        missing: set[Datum] = set()
        runs = []
        for one in between:
            if (one.op in WITH_OTHERS and not comes(one)) or missing & set(requires(one, self.stages, tied=True)):
                missing |= set(requires(one, self.stages) if one.op in RECEIVES else provides(one))
            else:
                runs.append(one)
        return tuple(runs)


def held_by_all(reported: Sequence[dict[str, str]]) -> dict[str, str]:
    """The data that all shards of a seat hold, given what each has ``reported`` (core.vocabulary.dataflow.pack)."""
    first, *others = reported
    return pack(unpack(first).intersection(*map(unpack, others))) if others else first


def drawn_by_all(reported: Sequence[dict[str, str]]) -> dict[str, str]:
    """The data of plain iterators that all shards of a seat hold, given what each has ``reported``
    (core.vocabulary.iterator_draws.pack).
    """
    first, *others = reported
    if not others:
        return first
    held = [unpack_drawn(each) for each in others]

    def common(step: int, batches: Batches) -> Batches:
        return {one: draw for one, draw in batches.items() if all(each.get(step, {}).get(one) == draw for each in held)}

    return pack_drawn(
        {step: found for step, batches in unpack_drawn(first).items() if (found := common(step, batches))}
    )

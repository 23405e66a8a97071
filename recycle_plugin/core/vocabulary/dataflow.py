"""Dependencies, stated once: what an instruction needs, uses up and leaves behind.

Simulator, lowering, the runtime's waits and the trace's arrows are all derived from ``requires``, ``consumes`` and
``provides``. The planner's array versions are compared with these: planner/verify.py does so for plans, and the tests
for planner/closure.py. A datum carries its step: with staggered stages two steps are in flight, and an activation of
step k must never be taken for one of k+1.
"""

from __future__ import annotations

from typing import NamedTuple

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op

TRAVELS = frozenset({"act", "grad"})
"""Kinds that cross from worker to worker (and may be logged); data of all other kinds dies with its worker."""

USES_UP = frozenset({Op.F, Op.I, Op.B, Op.W, Op.REDUCE})
"""Ops after which the worker no longer has what they require, except for parameters."""


class Datum(NamedTuple):
    """A value that an instruction makes, of kind ``data``, ``act``, ``grad``, ``stash``, ``inner``, ``wgrad``,
    ``reduced``, ``tied``, ``norm`` or ``params``; also ``drawn`` from an iterator, and a ``loss``. ``micro_batch`` is
    None if the value belongs to the whole stage.
    """

    kind: str
    stage: int
    micro_batch: MicroBatch | None
    step: int

    @property
    def made_of(self) -> MicroBatch:
        """The datum's micro-batch. Raises AssertionError for a datum of a whole stage."""
        assert self.micro_batch is not None, f"{self} is of a whole stage"
        return self.micro_batch

    def __str__(self) -> str:
        return (
            f"{self.kind} of stage {self.stage}"
            + (f", micro-batch {self.micro_batch}" if self.micro_batch else "")
            + f", step {self.step}"
        )


def of_layers(kind: str, seat: Seat, step: int) -> Datum:
    """Return the name of the datum that exists once per ``step`` for all layers of the worker at ``seat``."""
    return Datum(kind, seat.chunk, None, step)


def goes_to(datum: Datum, stages: int) -> int | None:
    """Return the stage that consumes a boundary tensor of ``stages`` stages; None beyond the pipeline's ends."""
    stage = datum.stage + (1 if datum.kind == "act" else -1)
    return stage if 0 <= stage < stages else None


def requires(
    instruction: Instruction,
    stages: int,
    own: tuple[MicroBatch, ...] = (),
    tied: bool = False,
    drawn: bool = False,
) -> tuple[Datum, ...]:
    """Return the data that must exist before ``instruction`` runs, in a pipeline of ``stages`` stages.

    ``own``: the micro-batches that this worker runs on its stage; REDUCE needs all their weight gradients. ``tied``:
    the stage shares weights, so the sum over all sharing stages is judged and applied. ``drawn``: data is read from
    plain iterators (core/vocabulary/iterator_draws.py).
    """
    op, stage, micro_batch, step = instruction.op, instruction.stage, instruction.micro_batch, instruction.step
    last = stage == stages - 1
    match op:
        case Op.LOAD:
            return (Datum("drawn", stage, micro_batch, step),) if drawn else ()
        case Op.RECV_ACT:
            return (Datum("act", stage - 1, micro_batch, step),)
        case Op.RECV_GRAD:
            return (Datum("grad", stage + 1, micro_batch, step),)
        case Op.F:
            inputs: tuple[Datum, ...] = (Datum("act", stage - 1, micro_batch, step),) if stage else ()
            inputs += (Datum("data", stage, micro_batch, step),) if stage == 0 or last else ()
            return inputs + (Datum("params", stage, None, step),)
        case Op.I | Op.B:
            grad = () if last else (Datum("grad", stage + 1, micro_batch, step),)
            return (Datum("stash", stage, micro_batch, step), Datum("params", stage, None, step)) + grad
        case Op.W:
            return (Datum("inner", stage, micro_batch, step),)
        case Op.SEND_ACT:
            return (Datum("act", stage, micro_batch, step),)
        case Op.SEND_GRAD:
            return (Datum("grad", stage, micro_batch, step),)
        case Op.REDUCE:
            return tuple(Datum("wgrad", stage, mine, step) for mine in own)
        case Op.TIE:
            return (Datum("reduced", stage, None, step),)
        case Op.VALIDATE | Op.STEP:
            reduced = Datum("reduced", stage, None, step)
            return (reduced, Datum("tied", stage, None, step)) if tied else (reduced,)


def consumes(instruction: Instruction, stages: int, own: tuple[MicroBatch, ...] = ()) -> tuple[Datum, ...]:
    """Return the part of the data that ``instruction`` requires and uses up. Parameters stay. The inputs of a SEND or a
    STEP stay until the step is committed, because a peer may need them again.
    """
    if instruction.op not in USES_UP:
        return ()
    return tuple([datum for datum in requires(instruction, stages, own) if datum.kind != "params"])


def provides(instruction: Instruction) -> tuple[Datum, ...]:
    """Return the data that exists after ``instruction`` has run; empty for sends and receives."""
    op, stage, micro_batch, step = instruction.op, instruction.stage, instruction.micro_batch, instruction.step

    def made(*kinds: str) -> tuple[Datum, ...]:
        return tuple([Datum(kind, stage, micro_batch, step) for kind in kinds])

    match op:
        case Op.LOAD:
            return made("data")
        case Op.F:
            return made("act", "stash")
        case Op.I:
            return made("grad", "inner")
        case Op.W:
            return made("wgrad")
        case Op.B:
            return made("grad", "wgrad")
        case Op.RECV_ACT | Op.RECV_GRAD | Op.SEND_ACT | Op.SEND_GRAD:
            return ()
        case Op.REDUCE:
            return made("reduced")
        case Op.TIE:
            return made("tied")
        case Op.VALIDATE:
            return made("norm")
        case Op.STEP:
            return (Datum("params", stage, None, step + 1),)

"""What a broken recovery would do to the numbers: what tests of equality have to notice."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.stage.tied import TiedWeight
from recycle_plugin.runtime.worker import parts
from recycle_plugin.runtime.worker.operations import TorchOperations
from wrappers.gates import gate
from wrappers.trainers import inside


def scale_micro_batch(micro_batch: str, step: int, factor: float) -> None:
    """The micro-batch counts ``factor`` times in ``step``: 0 drops it, 2 doubles it."""
    compute = Stage.compute

    def changed(self: Stage, instruction, have, boundary_only: bool) -> dict:
        made = compute(self, instruction, have, boundary_only)
        if (instruction.op, instruction.step, str(instruction.micro_batch)) == (
            Op.F,
            step,
            micro_batch,
        ) and self._model.last:
            (stash,) = (datum for datum in made if datum.kind == "stash")
            made[stash] = replace(made[stash], loss=factor * made[stash].loss)
        return made

    Stage.compute = changed


def divide_by_live() -> None:
    """Gradients are averaged over the stage's live workers instead of its logical ones."""
    add_up, live = TorchOperations.add_up, []

    def changed(self: TorchOperations, instruction, have, *given) -> list[torch.Tensor] | None:
        made = add_up(self, instruction, have, *given)
        if instruction.op is Op.REDUCE:
            live.append(len(self._view.roster.stage(instruction.stage)))  # the first time all are
            for gradient in made or ():
                gradient *= live[0] / live[-1]
        return made

    TorchOperations.add_up = changed


def scale_tied(stage: int, factor: float) -> None:
    """What ``stage`` brings to the sums over the stages that share weights counts ``factor`` times: 0 leaves it out, 2
    counts it twice.
    """
    total = TiedWeight.total

    def changed(self: TiedWeight, own: torch.Tensor) -> torch.Tensor:
        mine = self._view.member.seat.stage
        return total(self, factor * own if mine == stage else own)

    TiedWeight.total = changed


def overflow(at: list[str]) -> None:
    """What the weight gradients ``at`` make, whoever runs them, is not finite."""
    compute = TorchOperations.compute

    def changed(self: TorchOperations, instruction, have, *given) -> dict:
        made = compute(self, instruction, have, *given)
        if str(instruction) in at:
            inside().framework.gradients.view()[0].view(-1)[0] = float("inf")
        return made

    TorchOperations.compute = changed


def overflow_in_half(at: list[str]) -> None:
    """In the weight gradients ``at``, whoever runs them, one of half precision is infinite; where an I has made them
    all, one of the sum.
    """
    compute, collect, due = TorchOperations.compute, Masters.collect, []

    def changed(self: TorchOperations, instruction, have, *given) -> dict:
        due[:] = [str(instruction)] * (str(instruction) in at)
        return compute(self, instruction, have, *given)

    def infinite(self: Masters) -> None:
        if due:
            gradients = (each.grad for each in (*self.weights, *self.parameters))
            next(each for each in gradients if each is not None).view(-1)[0] = float("inf")
        collect(self)

    TorchOperations.compute, Masters.collect = changed, infinite


def keep_rejected(**gated: object) -> None:
    """What was computed with rejected weights is used, and not replaced by what comes later; ``gated``: see
    :func:`gate`.
    """
    gate(**gated)
    arrive = StepStore.arrive
    Worker.discard_after = lambda self, after, valid_from: None
    StepStore.arrive = lambda self, datum, *come: False if datum in self else arrive(self, datum, *come)


def masks_by_worker() -> None:
    """Random numbers are keyed by who runs a micro-batch: a peer that takes it over draws another mask."""
    rank = int(os.environ["RANK"])
    replicas = 2
    key = parts.key

    def changed(seed: int, step: int, micro_batch, stage: int, half: str = "") -> int:
        own = rank == stage * replicas + micro_batch.replica
        return key(seed if own else seed + 1, step, micro_batch, stage, half)

    parts.key = changed


def flip_bit(seat: str, step: int, stays: int = 0) -> None:
    """The lowest bit of one of the worker's parameters turns round before ``step``; the worker never begins step
    ``stays``: one that is given up behind its sum takes losses along that the coordinator has not heard.
    """
    execute = Worker.execute

    def changed(self: Worker, program):
        if str(self.seat) == seat and program.step == step and not program.resumed:
            inside().framework.gradients.parameters[0].data.view(torch.int32).view(-1)[3] ^= 1
        if str(self.seat) == seat and program.step == stays:
            return self._machine.wait("being given up", lambda: None)
        return execute(self, program)

    Worker.execute = changed

"""A stage that a real worker makes beside its own, to help another worker to replay it (core/worker/helper.py).

It has its own module, sums and store. Randomness is keyed by its use, so this worker's random streams are unchanged.
Errors in it are reported to the worker that asked, and end nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.vocabulary.blocks import Block, Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum, provides
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.helper import CantHelp
from recycle_plugin.core.worker.shares import Call, Word
from recycle_plugin.core.worker.stage_work import CantReplay
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import COPY_S
from recycle_plugin.runtime.movers.shares import SentWeights, Sums
from recycle_plugin.runtime.stage.block_sums import BlockSums
from recycle_plugin.runtime.stage.gradients import WorkerContributions
from recycle_plugin.runtime.stage.ports import MadeStage, Source
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.state.surroundings import layers_digest
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.replay_machine import LoggedWork
from recycle_plugin.runtime.worker.tiers import AsMade, Host

ROOM = 4  # times the weights: weights, their gradients, a block's gradients in transit, and the memory of a forward


@dataclass(frozen=True)
class HowToMake:
    """How a worker of a job of shape ``topology`` makes any of its stages.

    ``make(stage)``: makes its layers; None if only the stage's own workers can. ``randomness(made, stage)``: returns
    the context in which each of its micro-batches draws. ``splits``: backwards are split. ``blocks``: exact mode's.
    ``source()``: where data comes from, None for plain iterators.
    """

    topology: Topology
    seat: Seat
    make: Callable[[int], MadeStage] | None
    randomness: Callable[[MadeStage, int], Callable[[MicroBatch, int, str], AbstractContextManager[object]]]
    splits: bool
    blocks: Blocks | None
    source: Callable[[], Source | None]


class Helping:
    """The machine of a worker that helps others (core.worker.helper), beside its ``world``; logs in ``folder``."""

    def __init__(self, session: Session, world: TorchMachine, how: HowToMake, folder: Path) -> None:
        self.control_view, self._session = session.view, session
        self._world, self._how, self._folder = world, how, folder

    def words(self) -> list[Word]:
        """Return the words on replays that have come since the last call."""
        return self._world.words()

    def tell(self, address: str, word: Word) -> None:
        """Send a word on a replay to the worker at ``address``."""
        self._world.tell(address, word)

    def make_stage(self, call: Call) -> Waits[TorchHelpedStage]:
        """Make the stage that ``call`` asks for, and return it; never yields. Raises CantHelp."""
        how, stage = self._how, call.stage
        if how.make is None:
            raise CantHelp("the script runs the model itself, so nobody else can make its stage")
        if stage in (0, how.topology.stages - 1) and how.source() is None:
            raise CantHelp("the stage's data comes from plain iterators")
        with self._session.heartbeats.at(ELSEWHERE, f"the making of stage {stage}, to help"), _said():
            made = how.make(stage)
            memory = made.model.device.memory()
            if memory.total - memory.used < ROOM * call.bytes:
                raise CantHelp(
                    f"too little memory: a stage of {call.bytes / 1e6:.1f} MB may need {ROOM} times that, and "
                    f"{(memory.total - memory.used) / 1e6:.1f} MB are free"
                )
            return TorchHelpedStage(self._session, self._world, how, call, made, self._folder)
        yield


class TorchHelpedStage(LoggedWork):
    """The stage of ``call``, ``made`` beside the stage of the worker on ``world``."""

    def __init__(
        self, session: Session, world: TorchMachine, how: HowToMake, call: Call, made: MadeStage, folder: Path
    ) -> None:
        super().__init__(session, folder, call.logs)
        self._world, self._how, self._made = world, how, made
        module, device, seat = made.model.module, made.model.device, Seat(how.seat.replica, call.stage)
        self._own, where = how.seat, made.gradients
        blocks = None if how.blocks is None else BlockSums(where, how.blocks)
        deferred = DeferredWeights(module) if how.splits else None
        self._stage = Stage(made.model, deferred, how.randomness(made, call.stage), blocks, made.masters)
        self._contributions = WorkerContributions(where, blocks, made.model.device)
        tiers = AsMade(), Host(device)
        self.store = StepStore(seat, how.topology.stages, False, tiers=tiers)
        module.train()

    def begin(self, step: int, weights: SentWeights) -> None:
        """Load the stage's weights before ``step``, and drop all sums. Raises CantHelp."""
        with _said():
            self._contributions.forget()
            self.store.rewind(step - 1, 0)
            self._stage.loss_scale = weights.loss_scale
            module, device = self._made.model.module, self._made.model.device
            targets = [*module.parameters(), *module.buffers()]
            if [(each.shape, each.dtype) for each in targets] != [(one.shape, one.dtype) for one in weights.tensors]:
                raise CantHelp("the stage's layers differ here from those of the worker that replays it")
            if weights.layers != layers_digest(module):
                raise CantHelp(
                    "the stage's layers differ from what their specs make: in a mode, a number or a hook that "
                    "the script has given them"
                )
            sources = device.from_host(weights.tensors, "weights to help with", shared=True).wait(COPY_S)
            with torch.no_grad():
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
            torch.clear_autocast_cache()

    def sums(self, step: int, blocks: Sequence[Block]) -> Sums:
        """Return the sums of the weight gradients, in host memory. Raises CantHelp."""
        with _said():
            return self._contributions.of(blocks)

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Let an injected fault strike. A real worker's instruction takes its time by itself."""
        self._world.reach("before", self._own, instruction)
        return iter(())

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Return the results of LOAD, F, I, W or B. Raises CantHelp."""
        with self.session.heartbeats.at(ELSEWHERE, f"{instruction} of a replay"), _said():
            if instruction.op is Op.LOAD:
                source = self._how.source()
                assert source is not None, "an end has one, or does not help"
                (data,) = provides(instruction)
                return {data: self._stage.load(source(instruction.step, instruction.works_on))}
            return self._stage.compute(instruction, have, boundary_only)


@contextmanager
def _said() -> Iterator[None]:
    """A context that turns any error into CantHelp: the layers are the script's, and may raise anything."""
    try:
        yield
    except (CantHelp, CantReplay):
        raise
    except Exception as error:
        raise CantHelp(f"{type(error).__name__}: {str(error)[:300]}") from error

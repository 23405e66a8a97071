"""``with torch.autocast(...): engine.train_batch()``: torch keeps what it has cast until the context ends, and within
it weights change, by a step and by one that is taken back.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recycle_plugin.core.vocabulary.dataflow import provides
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.settings.schema import Settings
from tests.support.stored_stage import StoredStage

pytest.importorskip("deepspeed")

from recycle_plugin.adapters.deepspeed.ports import COUNTERS, StockBuckets, StockOptimizer
from recycle_plugin.runtime.stage.clipping import Clipping, TrueNorm
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.worker.changed_state import stage_state
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.stepping import Stepping, undo_record

WIDTH = 8


class Worker:
    """The only one of its stage and of the pipeline: a linear layer trained in steps of one micro-batch, which its
    gradients' sum is of.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(WIDTH, WIDTH)
        parameters, optimizer = list(self.module.parameters()), torch.optim.SGD(self.module.parameters(), lr=1.0)
        engine = SimpleNamespace(
            basic_optimizer=optimizer,
            optimizer=optimizer,
            **dict.fromkeys(COUNTERS, 0),
        )
        model = StageModel(self.module, nn.functional.mse_loss, 1, first=True, last=True, device=CPU)
        stage, scale = Stage(model, None, lambda micro_batch, step, half: nullcontext()), LossScale(None)
        self._stage = StoredStage(stage)
        applied = StockOptimizer(engine, lambda clip: optimizer.step())
        framework = SimpleNamespace(
            pushed=None, seat=Seat(0, 0), model=model, optimizer=applied, masters=None, cursor=DataCursor(1), state=()
        )
        state = stage_state(framework, stage, scale, None)
        session = SimpleNamespace(rank=0)
        where = TorchGradients(parameters)
        flatten, unflatten = torch._utils._flatten_dense_tensors, torch._utils._unflatten_dense_tensors
        buckets = StockBuckets(True, None, lambda gradients, group: flatten(gradients), flatten, unflatten)
        gradients = Gradients(buckets, self._stage.store, where, None, [])
        clipping = Clipping(self._stage.store, where, TrueNorm(), 0.0)
        undo = undo_record(Settings().undo, state)
        self._stepping = Stepping(applied, stage, gradients, clipping, scale, undo, session)

    def forward(self, step: int) -> float:
        key = step, MicroBatch(0, 0)
        self._stage.load(key, (torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), torch.ones(4, WIDTH)))
        self._stage.forward(key)
        return self._stage.losses[key].item()

    def fresh(self) -> float:
        """That loss, with the weights as they are now."""
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return self.forward(-1)

    def step(self, step: int) -> None:
        self._stage.backward((step, MicroBatch(0, 0)))
        reduced = Instruction(Op.REDUCE, 0, None, step)
        self._stage.store.conclude(reduced, {datum: self._stepping.reduce(step, None) for datum in provides(reduced)})
        self._stepping.apply(step)

    def undo(self, step: int) -> None:
        self._stepping.undo(step)


def test_forwards_see_the_weights_that_a_step_has_made_and_those_that_come_back():
    worker = Worker()
    first = worker.fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert worker.forward(1) == first
        worker.step(1)
        second = worker.fresh()
        assert worker.forward(2) == second < first
        worker.undo(1)
        assert worker.forward(1) == worker.fresh() == first

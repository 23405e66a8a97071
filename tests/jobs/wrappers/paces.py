"""Workers that are slow, wait, or have enough before the others."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import Cpu, Done
from recycle_plugin.runtime.devices.timeline import Timeline
from recycle_plugin.runtime.worker.operations import TorchOperations
from recycle_plugin.runtime.worker.trainer import Trainer
from wrappers.trainers import TRAINERS, wait_until


def slow(seat: str, times: float, steps: list[int]) -> None:
    """From the first to the last of ``steps`` the worker at ``seat`` needs ``times`` as long to compute, all others as
    long as they do: by the clock of each worker's device, which nothing else moves.
    """
    start, now = Timeline.start, [0.0]

    def changed(self: Timeline, begin: Callable[..., dict], instruction: Instruction, *how: object) -> dict:
        def spent(*given: object) -> dict:
            slowly = str(TRAINERS[0].seat) == seat and steps[0] <= instruction.step <= steps[1]
            now[0] += 0.001 * (times if slowly else 1) * (instruction.op in COMPUTE)
            return begin(*given)

        return start(self, spent, instruction, *how)

    Timeline.start, Cpu.event, Cpu.lags = changed, lambda self, what: Done(now[0]), True


def linger(seat: str, seconds: float, step: int, only: str = "", computes: bool = False) -> None:
    """The worker at ``seat``, or whoever does it, spends ``seconds`` in each compute instruction of ``step``, or in the
    instruction ``only``: asleep, or computing.
    """
    compute = TorchOperations.compute

    def changed(self: TorchOperations, instruction, have, *given) -> dict:
        if (
            seat in ("", str(have.seat))
            and instruction.step == step
            and instruction.op in COMPUTE
            and only in ("", str(instruction))
        ):
            until = time.monotonic() + seconds
            while computes and time.monotonic() < until:
                pass
            time.sleep(max(until - time.monotonic(), 0.0))
        return compute(self, instruction, have, *given)

    TorchOperations.compute = changed


def lag(seat: str, seconds: float, last: int) -> None:
    """The worker at ``seat``, whichever process that is, sleeps for ``seconds`` in each forward up to step ``last``."""
    compute = TorchOperations.compute

    def changed(self: TorchOperations, instruction, have, *given) -> dict:
        if seat == str(have.seat) and instruction.op is Op.F and 0 < instruction.step <= last:
            time.sleep(seconds)
        return compute(self, instruction, have, *given)

    TorchOperations.compute = changed


def stop_after(seat: str, step: int) -> None:
    train = Trainer.train

    def changed(self: Trainer) -> float:
        loss = train(self)
        if str(self.seat) == seat and self.step == step:
            sys.exit()
        return loss

    Trainer.train = changed


def leaves_first(seat: str, flag: str) -> None:
    """The others say goodbye once the one at ``seat`` has, which makes the file ``flag`` then."""
    finish, leave = Trainer.finish, Session.leave

    def finished(self: Trainer) -> None:
        if str(self.seat) != seat:
            wait_until(Path(flag).exists, f"goodbye of seat {seat}")
        finish(self)

    def left(self: Session, *given, **named) -> None:
        leave(self, *given, **named)
        if str(TRAINERS[0].seat) == seat:
            Path(flag).touch()

    Trainer.finish, Session.leave = finished, left


def helped(every: int) -> None:
    """Each worker has a pool, and a loader with workers, and uses them after every so many steps."""
    train = Trainer.train
    data = torch.utils.data.TensorDataset(torch.arange(8.0))

    def changed(self: Trainer) -> float:
        loss = train(self)
        if self.step % every == 0:
            with multiprocessing.Pool(2) as pool:
                assert pool.map(abs, range(-3, 0)) == [3, 2, 1]
            assert sum(each.sum().item() for (each,) in torch.utils.data.DataLoader(data, num_workers=2)) == 28.0
        return loss

    Trainer.train = changed


def restless(unit_s: float, times: float, first_s: float, pauses: list[int], pause_s: float) -> None:
    """Every computation takes ``unit_s`` longer, or up to ``times`` that; the first one ``first_s``; before the steps
    ``pauses`` replica 0's data come ``pause_s`` late.
    """
    compute, random = TorchOperations.compute, Random(int(os.environ["RANK"]))
    late = {f"0LOAD0.0@{step}" for step in pauses}

    def changed(self: TorchOperations, instruction, have, *given) -> dict:
        if instruction.op in COMPUTE:
            time.sleep(first_s if str(instruction) == "0F0.0@1" else unit_s * random.uniform(1, times))
        elif str(instruction) in late:
            time.sleep(pause_s)
        return compute(self, instruction, have, *given)

    TorchOperations.compute = changed


def uneven_end(apart_s: float, steps: int) -> None:
    """Rank r's script ends r × ``apart_s`` later than the first one's."""
    train = Trainer.train

    def changed(self: Trainer) -> float:
        loss = train(self)
        if self.step == steps:
            time.sleep(apart_s * self._session.rank)
        return loss

    Trainer.train = changed


def begun_before(rank: str, hours: float) -> None:
    """Has the Megatron-LM job of ``rank`` begun so many hours before, by its clock."""
    from megatron.training import training

    if os.environ["RANK"] == rank:
        training._TRAIN_START_TIME -= 3600 * hours

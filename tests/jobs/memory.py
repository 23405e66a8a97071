"""Another job of this folder, or scripts/train_gpt.py, whose memory is measured: RECYCLE_TEST_MEMORY holds
{"script": a path in the repository, "folder": where rank<r>.json goes, "step": the step that is measured}.

In the file: the trained ``parameters`` of the stage, and how many the ``largest`` has; bytes ``between`` steps, after
that step and before its commit is known, by what they are for; the same once all is ``settled``; and ``peaks``, the
most bytes at any moment of that step, by the kind of instruction.  Of an accelerator all of this is what is on it.

Between steps storages are counted.  Within one an accelerator's allocator counts; on the CPU every allocation of the
thread that trains, those inside of torch's operators too (torch.profiler).
"""

from __future__ import annotations

import gc
import json
import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from wrappers import inside

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.runtime.worker.operations import TorchOperations
from recycle_plugin.runtime.worker.trainer import Trainer

ROOT = Path(__file__).parents[2]
MARK, BEGIN = "instruction ", "the step begins"
OWN = ("recycle_plugin.runtime.state.undo", "recycle_plugin.runtime.stage.block_sums")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of lists, dictionaries, and of the objects that keep what takes a step back, or sums of blocks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif type(value).__module__.startswith(OWN):
        yield from tensors_in([each for name, each in vars(value).items() if name not in ("_state", "_whole", "_of")])


def storages(tensors: Iterable[torch.Tensor], where: torch.device, seen: set[int]) -> int:
    found = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device == where and storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            found += storage.nbytes()
    return found


def by_kind(trainer: Trainer) -> dict[str, int]:
    """Bytes of all tensors of this process, by what they are for; what is in two places counts in the first."""
    gc.collect()
    own = inside(trainer)
    framework, stepping = own.framework, own.stepping
    masters = [] if framework.masters is None else framework.masters.parameters
    every = [*framework.model.module.parameters(), *masters]
    sums = [own.store.get(datum) for datum in own.store if datum.kind in ("reduced", "tied")]
    kinds: dict[str, Any] = {
        "weights": list(framework.model.module.parameters()),
        "masters": masters,
        "optimizer": list(trainer.state.optimizer.kept().values()),
        "sums": sums,
        "contributions": [each.grad for each in every if each.grad is not None],
        "blocks": stepping.gradients._blocks,
        "undo": stepping._undo,
        "other": [each for each in gc.get_objects() if isinstance(each, torch.Tensor)],
    }
    seen: set[int] = set()
    where = framework.model.device.where
    return {kind: storages(tensors_in(held), where, seen) for kind, held in kinds.items()}


class Profiled:
    """The most bytes in each kind of instruction of a step on the CPU, from all allocations of this thread."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()  # so early, since it does not see the end of what is older

    def begin(self, before: int) -> None:
        self._before = before
        with record_function(BEGIN):
            pass

    def during(self, name: str) -> AbstractContextManager:
        return record_function(f"{MARK}{name}")

    def end(self, after: int) -> dict[str, int]:
        """The peaks of the step, which has left ``after`` bytes; "" is between instructions.

        What other threads give back the profiler does not see: that is what the network's have had in REDUCE.
        """
        self._profile.stop()
        events = sorted(self._profile.profiler.kineto_results.events(), key=lambda each: each.start_ns())
        (begin,) = (each.start_ns() for each in events if each.name() == BEGIN)
        events = [each for each in events if each.start_ns() > begin]
        marks = [each for each in events if each.name().startswith(MARK)]
        spans = [(each.start_ns(), each.end_ns(), each.name().removeprefix(MARK)) for each in marks]
        memory = [each for each in events if each.name() == "[memory]"]
        unseen = self._before + sum(each.nbytes() for each in memory) - after
        now, peaks, at = self._before, Counter({"": self._before}), 0
        for event in memory:
            now += event.nbytes()
            while at < len(spans) and spans[at][1] < event.start_ns():
                now -= unseen * (spans[at][2] == "REDUCE")
                at += 1
            inside = at < len(spans) and spans[at][0] <= event.start_ns()
            name = spans[at][2] if inside else ""
            peaks[name] = max(peaks[name], now)
        return dict(peaks)


class Allocated:
    """The most bytes in each kind of instruction of a step on an accelerator, as its allocator counts them."""

    def __init__(self, where: torch.device) -> None:
        self._module: Any = torch.get_device_module(where)
        self._peaks: Counter[str] = Counter()

    def begin(self, before: int) -> None:
        self._peaks.clear()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        self._module.reset_peak_memory_stats()
        yield
        self._peaks[name] = max(self._peaks[name], self._module.max_memory_allocated())

    def end(self, after: int) -> dict[str, int]:
        return dict(self._peaks)


def measure(step: int, folder: str, script: str) -> None:
    train, peaks = Trainer.train, []

    def changed(self: Trainer) -> float:
        where = inside(self).framework.model.device.where
        if self.step == 0:
            peaks.append(Profiled() if where.type == "cpu" else Allocated(where))
        if self.step + 1 == step:
            self.settle()
            peaks[0].begin(sum(by_kind(self).values()))
        loss = train(self)
        if self.step == step:
            report(self)
        return loss

    def noted(function: Callable) -> Callable:
        def changed(self: TorchOperations, instruction: Instruction, *given: Any) -> Any:
            with peaks[0].during(instruction.op.name):
                return function(self, instruction, *given)

        return changed

    def report(trainer: Trainer) -> None:
        with trainer.lifted():  # else a look at weights waits for the commit, after which there is less
            between = by_kind(trainer)
        found = peaks[0].end(sum(between.values()))
        trainer.settle()
        tensors = [each.numel() for each in inside(trainer).framework.gradients.parameters]
        path = Path(folder) / f"rank{os.environ['RANK']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"seat": str(trainer.seat), "parameters": sum(tensors), "largest": max(tensors)}
        path.write_text(json.dumps(record | {"between": between, "settled": by_kind(trainer), "peaks": found}))

    Trainer.train = changed
    TorchOperations.compute, TorchOperations.add_up = noted(TorchOperations.compute), noted(TorchOperations.add_up)


plan = json.loads(os.environ["RECYCLE_TEST_MEMORY"])
measure(**plan)
runpy.run_path(str(ROOT / plan["script"]), run_name="__main__")

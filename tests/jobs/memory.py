"""Another job of this folder, or scripts/train_gpt.py, whose memory is measured: RECYCLE_TEST_MEMORY holds
{"script": a path in the repository, "folder": where rank<r>.json goes, "step": the step that is measured}.

In the file: the trained ``parameters`` of the stage, and the ``largest`` one's numbers; ``between``: bytes of all tensors
after that step and before its commit is known, by what they are for; ``settled``: the same after the commit; ``peaks``:
the most bytes at any moment of that step, by the kind of instruction.

On the CPU storages are counted between steps, and within one every allocation of the thread that trains, those inside
of torch's operators too (torch.profiler).  An accelerator's allocator counts itself: its ``peaks`` are one, of the whole
step.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.runtime.stage.operations import Operations
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


def storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages of ``tensors`` that are not in ``seen``, which gets them."""
    found = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            found += storage.nbytes()
    return found


def by_kind(trainer: Trainer) -> dict[str, int]:
    """Bytes of all tensors of this process, by what they are for; what is in two places counts in the first."""
    gc.collect()
    framework, stepping = trainer._framework, trainer._stepping
    masters = [] if framework.masters is None else framework.masters.parameters
    every = [*framework.model.module.parameters(), *masters]
    sums = [trainer._store.get(datum) for datum in trainer._store if datum.kind in ("reduced", "tied")]
    kinds: dict[str, Any] = {
        "weights": list(framework.model.module.parameters()),
        "masters": masters,
        "optimizer": list(trainer.state.optimizer.kept().values()),
        "sums": sums,
        "contributions": [each.grad for each in every if each.grad is not None],
        "blocks": stepping._gradients._blocks,
        "undo": stepping._undo,
        "other": [each for each in gc.get_objects() if isinstance(each, torch.Tensor)],
    }
    seen: set[int] = set()
    return {kind: storages(tensors_in(held), seen) for kind, held in kinds.items()}


def allocated(device: torch.device) -> int:
    """Bytes that the allocator of an accelerator has given out."""
    return torch.get_device_module(device).memory_allocated()


def noted(function: Callable) -> Callable:
    """An instruction's ``function``, as which the profiler knows it by name."""

    def changed(self: Operations, instruction: Instruction, *given: Any) -> Any:
        with record_function(f"{MARK}{instruction.op.name}"):
            return function(self, instruction, *given)

    return changed


def peaks_of(found: profile, before: int, after: int) -> dict[str, int]:
    """The most bytes at once in each kind of instruction of the last step, which began with ``before`` bytes and has
    left ``after``; "" is between instructions.

    What other threads give back the profiler does not see: that is what the network's have had in REDUCE.
    """
    events = sorted(found.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    (begin,) = (each.start_ns() for each in events if each.name() == BEGIN)
    spans = [
        (each.start_ns(), each.end_ns(), each.name().removeprefix(MARK))
        for each in events
        if each.name().startswith(MARK) and each.start_ns() > begin
    ]
    memory = [each for each in events if each.name() == "[memory]" and each.start_ns() > begin]
    unseen = before + sum(each.nbytes() for each in memory) - after
    now, peaks, at = before, Counter({"": before}), 0
    for event in memory:
        now += event.nbytes()
        while at < len(spans) and spans[at][1] < event.start_ns():
            now -= unseen * (spans[at][2] == "REDUCE")
            at += 1
        inside = at < len(spans) and spans[at][0] <= event.start_ns()
        name = spans[at][2] if inside else ""
        peaks[name] = max(peaks[name], now)
    return dict(peaks)


def measure(step: int, folder: str, script: str) -> None:
    """Measure ``step`` of this process's job."""
    train, made = Trainer.train, profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    before: list[int] = []

    def changed(self: Trainer) -> float:
        if self.step == 0:
            made.start()  # so early, since it does not see the end of what is older
        if self.step + 1 == step:
            self.settle()
            before.append(sum(by_kind(self).values()))
            with record_function(BEGIN):
                pass
        loss = train(self)
        if self.step == step:
            made.stop()
            report(self)
        return loss

    def report(trainer: Trainer) -> None:
        between = by_kind(trainer)
        trainer.settle()
        tensors = [each.numel() for each in trainer._framework.parameters]
        found = {
            "seat": str(trainer.seat),
            "parameters": sum(tensors),
            "largest": max(tensors),
            "between": between,
            "settled": by_kind(trainer),
            "peaks": peaks_of(made, before[0], sum(between.values())),
        }
        path = Path(folder) / f"rank{os.environ['RANK']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))

    Trainer.train = changed
    Operations.compute, Operations.add_up = noted(Operations.compute), noted(Operations.add_up)


plan = json.loads(os.environ["RECYCLE_TEST_MEMORY"])
measure(**plan)
runpy.run_path(str(ROOT / plan["script"]), run_name="__main__")

"""Another job of this folder, or scripts/train_gpt.py, whose memory is measured: RECYCLE_TEST_MEMORY holds
{"script": a path in the repository, "folder": where rank<r>.json goes, "step": the first step that is measured,
"steps": how many}.

In the file: the trained ``parameters`` of the stage; ``between``: the bytes of all tensors after the last of these
steps has been applied and before its commit is known, by what they are for; ``settled``: the same after the commit;
``peak``: the most bytes at any moment of these steps, ``at``: the instruction in which that was; ``peaks``: the most
in each kind of instruction.

On the CPU live storages are counted between steps, and within them every allocation of the thread that trains, those
inside of torch's operators too (torch.profiler).  On an accelerator its allocator counts.
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
MARK = "instruction "
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


def peaks_of(found: profile, before: int) -> tuple[int, str, dict[str, int]]:
    """The most bytes at once, the instruction in which that was, and the most in each kind of instruction."""
    events = found.profiler.kineto_results.events()
    spans = sorted((each.start_ns(), each.end_ns(), each.name()) for each in events if each.name().startswith(MARK))
    now, peaks = before, Counter({"": before})
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        now += event.nbytes()
        while spans and spans[0][1] < event.start_ns():
            spans.pop(0)
        inside = spans and spans[0][0] <= event.start_ns()
        name = spans[0][2].removeprefix(MARK) if inside else ""
        peaks[name] = max(peaks[name], now)
    at = max(peaks, key=peaks.__getitem__)
    return peaks[at], at, dict(peaks)


def measure(step: int, folder: str, script: str) -> None:
    """Measure this process's job up to ``step``."""
    train, made = Trainer.train, profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def changed(self: Trainer) -> float:
        if not before:
            before.append(sum(by_kind(self).values()))
            made.start()  # so early, since it does not see the end of what is older
        loss = train(self)
        if self.step == step:
            made.stop()
            report(self)
        return loss

    def report(trainer: Trainer) -> None:
        peak, at, peaks = peaks_of(made, before[0])
        between = by_kind(trainer)
        trainer.settle()
        path = Path(folder) / f"rank{os.environ['RANK']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        parameters = sum(each.numel() for each in trainer._framework.parameters)
        found = {"parameters": parameters, "seat": str(trainer.seat), "between": between, "settled": by_kind(trainer)}
        path.write_text(json.dumps(found | {"peak": peak, "at": at, "peaks": peaks}))

    before: list[int] = []
    Trainer.train = changed
    Operations.compute, Operations.add_up = noted(Operations.compute), noted(Operations.add_up)


plan = json.loads(os.environ["RECYCLE_TEST_MEMORY"])
measure(**plan)
runpy.run_path(str(ROOT / plan["script"]), run_name="__main__")

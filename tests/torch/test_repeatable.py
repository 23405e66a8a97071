"""The first forward in training is run twice: what must be the same then, what need not be, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.block_sums import BlockSums
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.stage.repeatable import Reuse
from recycle_plugin.runtime.stage.stage import Stage
from tests.support.stored_stage import StoredStage

KEY = 1, MicroBatch(0, 0)


class Counted(nn.Module):
    """``compute(module, x, number of this forward)``; ``forwards``: how many there were (in a list, which nobody looks
    at).
    """

    def __init__(self, compute: Callable[[Any, torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.compute, self.forwards = nn.Parameter(torch.ones(3)), compute, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards[0] += 1
        return self.compute(self, x, self.forwards[0])


def run(
    module: nn.Module, keys=(KEY,), draws_alike: bool = True, exact: bool = False, tried: bool = False
) -> list[str]:
    warnings: list[str] = []
    model = StageModel(module, None, 1, True, False, CPU, keyed=draws_alike)
    blocks = BlockSums(model.made, Policy(block=1).blocks(Topology(2, 2, 2))) if exact else None
    stage = StoredStage(
        Stage(
            model,
            None,
            lambda *_: keyed(1, CPU) if draws_alike else nullcontext(),
            blocks,
            warn=warnings.append,
            tried=tried,
        ),
        0,
        2,
    )
    for key in keys:
        stage.load(key, (torch.ones(3), None))
        stage.forward(key)
    return warnings


def test_only_the_first_is_run_twice_and_evaluations_are_not():
    module = Counted(lambda own, x, number: x * own.weight)
    run(module, [(-1, MicroBatch(0, 0))])
    assert module.forwards == [1]
    run(module, [(1, MicroBatch(0, index)) for index in range(3)])
    assert module.forwards == [5]


def test_a_newcomers_is_not_since_its_peers_wait_for_it():
    module = Counted(lambda own, x, number: x * own.weight)
    run(module, tried=True)
    assert module.forwards == [1]


def test_memory_that_each_run_uses_again_is_known_by_the_second():
    reuse, one, other = Reuse(), torch.ones(3), torch.ones(3)
    reuse.see((one,))
    assert reuse.may
    reuse.see((other,))
    assert not reuse.may
    again = Reuse()
    for _ in range(2):
        again.see((one[:2], other))
    assert again.may


def test_where_random_numbers_are_the_workers_own_none_is_run_twice():
    """... which would draw more of them than stock DeepSpeed."""
    module = Counted(lambda own, x, number: x * own.weight + torch.rand(3))
    run(module, draws_alike=False)
    assert module.forwards == [1]


def test_numbers_that_change_with_each_forward_are_warned_of_once():
    def count(own: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        own.calls, own.length = getattr(own, "calls", 0) + 1, len(x)
        return x * own.weight

    (line,) = run(Counted(count), [(1, MicroBatch(0, 0)), (1, MicroBatch(0, 1))])
    assert line.startswith("calls changes with each forward") and "\n" not in line


@pytest.mark.parametrize("step", (1e-6, 0.0))
def test_roundings_are_none_of_its_faults(step):
    assert run(Counted(lambda own, x, number: x * own.weight * (1 + step * number))) == []


def test_in_exact_mode_they_are():
    with pytest.raises(RecycleError, match="gives something else when it is run again"):
        run(Counted(lambda own, x, number: x * own.weight * (1 + 1e-6 * number)), exact=True)


def test_more_than_roundings_is_refused():
    with pytest.raises(RecycleError, match="gives something else when it is run again"):
        run(Counted(lambda own, x, number: x * own.weight * (1 + 1e-4 * number)))


def test_a_cache_and_a_workspace_are_no_state():
    def compute(own: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        if "table" not in own._buffers:
            own.register_buffer("table", torch.arange(3.0), persistent=False)
            own.space = torch.empty(3)
        own.space.copy_(x)
        return own.space * own.weight + own.table

    assert run(Counted(compute), [(1, MicroBatch(0, 0)), (1, MicroBatch(0, 1))]) == []

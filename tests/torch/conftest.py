"""What the torch tests share: one thread, one process group of one rank, and fused-against-split comparison."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

torch = pytest.importorskip("torch")

from recycle_plugin.runtime.stage.split_backward import DeferredWeights  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def process_group():
    """A real one-rank Gloo group without a port; megatron-core's backward wants torch.distributed."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gradients() -> Callable:
    """``gradients(model, inputs, mode)``: (input gradients, parameter gradients) of a copy of ``model``.

    ``mode``: ``stock``; ``hold`` (I, then W); ``outside`` (converted, but neither in forward() nor in hold()).
    Micro-batch i runs under ``torch.manual_seed(i)``; gradients of the output are random.
    """

    def run(model, inputs, mode: str):
        model = copy.deepcopy(model)
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        deferred = None if mode == "stock" else DeferredWeights(model)
        for index, x in enumerate(inputs):
            torch.manual_seed(index)
            with deferred.forward() if mode == "hold" else nullcontext():
                output = model(x)
            gradient = torch.randn_like(output)
            if mode == "hold":
                with deferred.hold() as pending:
                    output.backward(gradient)
                pending.run()
            else:
                output.backward(gradient)
        return [x.grad for x in inputs], {name: p.grad for name, p in model.named_parameters()}

    return run


@pytest.fixture
def assert_bitwise(gradients) -> Callable:
    """Split backward, and that of converted layers outside of forward(), equal stock backward bit for bit over the
    micro-batches ``inputs``.
    """

    def check(model, inputs) -> None:
        stock_inputs, stock = gradients(model, inputs, "stock")
        assert all(g is not None for (n, g), p in zip(stock.items(), model.parameters()) if p.requires_grad)
        for mode in ("hold", "outside"):
            split_inputs, split = gradients(model, inputs, mode)
            for mine, theirs in zip(split_inputs, stock_inputs):
                assert (mine is None and theirs is None) or torch.equal(mine, theirs), f"{mode}: input gradient"
            for name, theirs in stock.items():
                mine = split[name]
                assert (mine is None and theirs is None) or torch.equal(mine, theirs), f"{mode}: {name}"

    return check

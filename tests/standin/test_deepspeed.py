"""DeepSpeed trains on the device: its own engine, one stage of a pipeline, with collectives of one rank."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("deepspeed")
D = "standin"
MODES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)]


def batch(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.arange(12.0).view(3, 4) / 6).to(dtype), torch.ones(3, 2, dtype=dtype)


def one_rank() -> None:
    """A process group of one rank, whose collectives leave each tensor as it is."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.distributed import Backend, HashStore, init_process_group

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    made = lambda options, more: FakeProcessGroup._create_internal(options.group_rank, options.group_size, more)
    Backend.register_backend("alone", made, extended_api=True, devices=["cpu", D])
    init_process_group("alone", rank=0, world_size=1, store=HashStore())


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_of_one_stage(standin, mode):
    from tests.support.standin import accelerator

    used = accelerator.use()
    one_rank()
    import deepspeed  # here, in a process of the test's own
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("alone", auto_mpi_discovery=False)
    net = PipelineModule(layers(), num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        **MODES[mode],
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1, foreach=True), config=config
    )
    assert {parameter.device.type for parameter in net.parameters()} == {D}
    assert used.on_accelerator(net.forward_funcs[0].weight)
    losses = [engine.train_batch(iter([batch(DTYPES[mode])] * 2)).item() for _ in range(3)]
    expected = by_torch()
    if mode == "fp16":  # whose loss DeepSpeed's pipeline engine does not scale, though it unscales the gradients
        assert losses[0] == pytest.approx(expected[0], rel=2e-2) and losses[2] < losses[1] < losses[0], losses
    else:
        assert losses == pytest.approx(expected, rel=0 if mode == "fp32" else 2e-2), (losses, expected)
    assert torch.standin.max_memory_allocated() and not standin.violations()


def by_torch() -> list[float]:
    net, losses = torch.nn.Sequential(*layers()), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = torch.nn.functional.mse_loss(net(batch()[0]), batch()[1])
            (loss / 2).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_accelerator_says_what_torch_says(standin):
    from tests.support.standin import accelerator

    used = accelerator.use()
    assert not type(used).__abstractmethods__ and used.device_name() == D and used.current_device_name() == f"{D}:0"
    assert used.pin_memory(torch.ones(3)).is_pinned() and used.FloatTensor([1.0]).device.type == D
    state = used.get_rng_state()
    a = torch.rand(2, device=used.device())
    used.set_rng_state(state)
    assert torch.equal(a, torch.rand(2, device=used.device(0))) and used.is_fp16_supported()
    with used.stream(used.Stream()):
        event = used.Event(enable_timing=True)
        event.record()
    event.synchronize()
    assert used.available_memory() + used.memory_allocated() == used.total_memory()

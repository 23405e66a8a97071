"""DeepSpeed's own Adam under the inverse, whose classes keep their books otherwise than torch's, and its engine's
step.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from recycle_plugin.runtime.state.undo.rules import of
from tests.support.adam_kernels import use_formulas
from tests.support.optimizers import Subject, stage_state

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed_adam = pytest.importorskip("deepspeed.ops.adam")

from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402

from recycle_plugin.adapters.deepspeed.ports import COUNTERS, Skipped  # noqa: E402
from recycle_plugin.runtime.worker.stepping import undo_record  # noqa: E402

MAKE = {
    "FusedAdam": lambda ps, decoupled, **more: deepspeed_adam.FusedAdam(
        ps, lr=0.05, weight_decay=0.1, adam_w_mode=decoupled, **more
    ),
    "DeepSpeedCPUAdam": lambda ps, decoupled, **more: deepspeed_adam.DeepSpeedCPUAdam(
        ps, lr=0.05, weight_decay=0.1, adamw_mode=decoupled, **more
    ),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_formulas(monkeypatch)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("decoupled", (True, False))
@pytest.mark.parametrize("bias_correction", (True, False))
@pytest.mark.parametrize("earlier", (0, 1, 3))
def test_its_step_comes_back_and_can_be_done_again(name, decoupled, bias_correction, earlier):
    """``earlier`` 0: FusedAdam also creates a count in its group."""
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 6).view(shape)) for shape in ((2, 3), (6,))]
    subject = Subject(lambda ps: MAKE[name](ps, decoupled, bias_correction=bias_correction), "inverse", parameters)
    for seed in range(earlier):
        subject.step(subject.random(seed))
    before = subject.state()
    subject.step(subject.random(50))
    first = subject.state()
    subject.undo.restore()
    torch.testing.assert_close(subject.state(), before, rtol=1e-5, atol=1e-6)
    subject.step(subject.random(50))
    torch.testing.assert_close(subject.state(), first, rtol=1e-5, atol=1e-6)


def test_fused_adam_counts_in_the_last_parameter_only():
    """Why its rule is not that of the others."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = MAKE["FusedAdam"](parameters, True)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    assert [state["step"] for state in states] == [0, 3] and of(optimizer).counts(states) == [3, 3]


def engine(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    """What stock code for a step asks of its engine."""
    return SimpleNamespace(
        basic_optimizer=optimizer,
        optimizer=optimizer,
        gradient_clipping=lambda: 1.0,
        torch_autocast_z0_gradscaler=None,
        clip_fp32_gradients=lambda: parameter.grad.mul_(0.01),
        zero_grad=lambda: parameter.grad.zero_(),
        lr_scheduler=None,
        steps_per_print=lambda: None,
        managed_gradient_accumulation=lambda: True,
        train_batch_size=lambda: 1,
        global_steps=0,
        global_samples=0,
        skipped_steps=0,
        **{f"{name}_enabled": lambda: False for name in ("fp16", "bfloat16", "amp")},
        zero_optimization=lambda: False,
        quantizer=None,
        compression_scheduler=SimpleNamespace(step=lambda: None),  # 0.19.3 asks for these, and for amp
    )


def test_the_engine_keeps_the_gradient_that_is_applied_the_clipped_one():
    """Stock code clips inside the step: a record made where STEP begins would take another gradient back."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    record = undo_record("inverse", stage_state([parameter], optimizer))
    parameter.grad = torch.full((3,), 100.0)
    DeepSpeedEngine._take_model_step(engine(parameter, optimizer), None)
    torch.testing.assert_close(parameter.data, torch.full((3,), 0.9))
    record.restore()
    torch.testing.assert_close(parameter.data, torch.ones(3))


def test_all_that_stock_code_counts_in_a_step_is_in_the_list():
    """Of an applied and a skipped one; the others say how the last one went, and nobody asks later."""
    parameter = torch.nn.Parameter(torch.ones(3))
    stepped = engine(parameter, torch.optim.SGD([parameter], lr=0.1))
    before = dict(vars(stepped))
    parameter.grad = torch.ones(3)
    DeepSpeedEngine._take_model_step(stepped, None)
    stepped.optimizer = Skipped(stepped.optimizer)
    DeepSpeedEngine._take_model_step(stepped, None)
    changed = {name for name, value in vars(stepped).items() if before.get(name) is not value} - {"optimizer"}
    assert {"global_steps", "global_samples", "skipped_steps"} <= changed & set(COUNTERS)
    assert changed - set(COUNTERS) <= {"_step_applied", "losses"}

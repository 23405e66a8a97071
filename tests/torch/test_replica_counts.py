"""What an engine of sharded replicas counts, and scales by: the same in all, however a step has come about."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from recycle_plugin.adapters.deepspeed.replica.engine import ReplicaOptimizer, check_scale
from recycle_plugin.errors import RecycleError


@pytest.mark.parametrize("drawn", [6, 7, 11])
def test_a_step_without_gradients_is_counted_as_any(drawn):
    """A script has dropped all gradients; who follows has drawn nothing, and others drew for a lost replica."""
    engine = SimpleNamespace(
        global_steps=3,
        global_samples=12,
        micro_steps=drawn,
        lr_scheduler=None,
        shards=SimpleNamespace(wrapped=SGD([Parameter(torch.zeros(1))])),
        train_batch_size=lambda: 4,
        gradient_accumulation_steps=lambda: 2,
    )
    ReplicaOptimizer(engine, lambda: None).pass_over()
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (4, 16, 8)


def test_the_loss_scale_of_an_fp16_job_is_refused():
    """Stock replaces its scaler by the one of the checkpoint, whatever the precision."""
    ours, half = SimpleNamespace(dynamic=False, loss_scale=1.0), SimpleNamespace(dynamic=True, loss_scale=65536.0)
    check_scale(None, None, "saved")
    check_scale(ours, SimpleNamespace(dynamic=False, loss_scale=1.0), "saved")
    for other in (half, SimpleNamespace(dynamic=False, loss_scale=64.0)):
        with pytest.raises(
            RecycleError, match=r"^load_checkpoint: saved is of a job with a loss scale \((65536|64)\), as in fp16"
        ):
            check_scale(ours, other, "saved")

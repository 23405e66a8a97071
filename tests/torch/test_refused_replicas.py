"""What a job of sharded replicas can ask for and does not get: the line for each, which says what to do instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recycle_plugin.errors import RecycleError
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SettingsError

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}
REPLICA = {"enabled": True, "unit": "replica", "replicas": 2}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer with recycle.replicas keeps a shard in host memory",
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        "zero_optimization.zero_quantized_gradients with",
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "a replica is such a partition itself; leave it out, and set recycle.replicas",
    ),
    (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
        "DeepSpeed has removed MiCS; leave it out, and set recycle.replicas to the number of ranks divided by it",
    ),
    ({"fp16": {"enabled": True}}, "fp16.enabled with"),
    ({"bf16": {"enabled": True}}, "set stage to 1, which shards them inside a replica"),
    (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype with",
    ),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size above 1 with"),
    ({"managed_gradient_accumulation": False}, "the program says when a step is full"),
    ({"gradient_allreduce_op": "sum"}, 'write "mean"'),
    ({"optimizer": {"type": "Muon"}}, "optimizer Muon with"),
    ({"optimizer": None}, "there is no optimizer"),
    ({"train_micro_batch_size_per_gpu": None}, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
]
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 1}, "recycle.replicas: is 1, and a lost replica needs another one to go on"),
    ({"unit": "worker"}, 'recycle.replicas: has no effect with recycle.unit = "worker"'),
    ({"exact": True}, "recycle.exact: contradicts recycle.replicas"),
    ({"nonfinite": "skip"}, "recycle.nonfinite: contradicts recycle.replicas"),
    ({"checkpoint": {"overhead": 0.1}}, "recycle.checkpoint: contradicts recycle.replicas"),
]


def refusal(config: dict[str, Any], given: dict[str, Any], replicas: int = 2, world: int = 4) -> str:
    from recycle_plugin.adapters.deepspeed.replica.refusals import check

    with pytest.raises(RecycleError) as caught:
        check(BASE | config, {"model": nn.Linear(2, 2)} | given, replicas, world)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("config, line", CONFIGS, ids=lambda each: str(each)[:50])
def test_configs(config, line):
    assert line in refusal(config, {})


def test_what_is_given_to_initialize():
    cut = nn.Linear(2, 2)
    torch.Tensor.__setattr__(cut.weight, "ds_id", 0)
    assert "mpu= or mesh_param= with" in refusal({}, {"mpu": SimpleNamespace()})
    assert "deepspeed.zero.Init with" in refusal({}, {"model": cut})
    assert "0 with recycle.replicas" in refusal({}, {"model": nn.Sequential(nn.BatchNorm1d(2))})
    assert "recycle.replicas is 3, and the job has 4 ranks" in refusal({}, {}, replicas=3)


@pytest.mark.parametrize("more, line", SETTINGS)
def test_settings(more, line):
    with pytest.raises(SettingsError) as caught:
        Settings.from_section(REPLICA | more)
    assert line in str(caught.value)


def test_what_is_supported_is_not_refused():
    from recycle_plugin.adapters.deepspeed.replica.refusals import check

    Settings.from_section(REPLICA)
    for stage in (0, 1, 2, 3):
        check(BASE | {"zero_optimization": {"stage": stage}}, {"model": nn.Linear(2, 2)}, 2, 4)

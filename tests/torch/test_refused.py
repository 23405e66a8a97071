"""Everything that a DeepSpeed config or a model can ask for and does not get: the line for each, which says what to do
instead.
"""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recycle_plugin.adapters.deepspeed.entry import Plugin
from recycle_plugin.adapters.deepspeed.refusals import BYPASSED, REMOVED, refusals, sizes
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.errors import RecycleError

BF16, FP16 = ({name: {"enabled": True}} for name in ("bf16", "fp16"))
ZERO_1, REPLICATE = {"zero_optimization": {"stage": 1}}, {"recycle": {"zero": "replicate"}}
# what goes before the words that say what to write instead
CONFIGS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: {"enabled": True}}, f"{name}.enabled: only fp32, bf16 and fp16 are supported yet")
        for name in ("torch_autocast", "amp")
    ),
    *(
        ({"bf16": {"enabled": True, key: True}}, f"bf16.{key}: master weights, sums of gradients and the optimizer's")
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    ({**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, 'data_types.grad_accum_dtype is "bf16": bf16 gradients are'),
    ({**BF16, "communication_data_type": "bf16"}, 'communication_data_type is "bf16": bf16 gradients are summed in'),
    ({**BF16, "recycle": {"norm": "deepspeed"}}, 'recycle.norm "deepspeed" is for fp32: in bf16 DeepSpeed\'s norm is'),
    ({**BF16, **FP16}, "bf16.enabled and fp16.enabled contradict each other"),
    (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads: master weights, sums of gradients and the optimizer's state are fp32",
    ),
    ({**FP16, "communication_data_type": "fp16"}, 'communication_data_type is "fp16": fp16 gradients are summed in'),
    ({**FP16, "recycle": {"norm": "deepspeed"}}, 'recycle.norm "deepspeed" is for fp32: in fp16 DeepSpeed\'s norm is'),
    ({"bfloat16": {"enabled": True}, "recycle": {"loss_scaling": True}}, "recycle.loss_scaling: bfloat16 has fp32's"),
    ({**ZERO_1, "recycle": {"enabled": True}}, "zero_optimization.stage 1 shards the optimizer state"),
    *(
        ({"zero_optimization": {"stage": 1, key: {"device": "cpu"}}, **REPLICATE}, f"zero_optimization.{key} moves")
        for key in ("offload_optimizer", "offload_param")
    ),
    (
        {**ZERO_1, "recycle": {"zero": "replicate", "norm": "deepspeed"}},
        'recycle.norm "deepspeed" is for ZeRO stage 0',
    ),
    *(
        ({"zero_optimization": {"stage": stage}}, f"zero_optimization.stage {stage} does not work with pipelines in")
        for stage in (2, 3)
    ),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer OneBitAdam sends gradients by itself"),
    ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal needs the files of a ZeRO optimizer"),
    (
        {"checkpoint": {"use_node_local_storage": True}},
        "checkpoint.use_node_local_storage keeps each host's files",
    ),
    ({"checkpoint": {"writer": {"type": "FAST"}}}, "checkpoint.writer writes files without telling when"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled counts in DeepSpeed's own forward"),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown times DeepSpeed's own instructions"),
    ({"comms_logger": {"enabled": True}}, "comms_logger.enabled counts what DeepSpeed sends"),
    ({"autotuning": {"enabled": True}}, "autotuning.enabled ends its trials in DeepSpeed's own forward"),
    (
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": BF16["bf16"]}}},
        "data_efficiency.enabled orders training_data, or drops tokens, by DeepSpeed's own loader and count of steps",
    ),
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow steps some parameters"),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile compiles the backward"),
    *(
        ({"activation_checkpointing": {key: True}}, f"activation_checkpointing.{key} {why}")
        for key, why in (
            ("contiguous_memory_optimization", "needs backwards in the order of DeepSpeed's own schedule"),
            ("partition_activations", "deals activations to tensor-parallel workers"),
        )
    ),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation false lets the script choose when"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size above 1 splits micro-batches or layers"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size above 1 splits micro-batches or layers over workers"),
    (
        {"expert_parallel": {"enabled": True}},
        "expert_parallel.enabled: mixtures of experts send tokens between replicas",
    ),
    *(({name: {"enabled": True}}, f"{name} is not supported, and newer releases of DeepSpeed") for name in REMOVED),
    (
        {"communication_data_type": "bf16", "recycle": {"enabled": True, "exact": True}},
        'communication_data_type "bf16" rounds gradients on their way, and recycle.exact adds them as they are',
    ),
]
INSTEAD = re.compile(r"[;:,] (and )?(leave|set|write|remove|use|order|tune) ")
GOES = [  # works as in stock DeepSpeed; the first three: tests/cluster/test_shapes.py
    {"prescale_gradients": True},
    {"gradient_allreduce_op": "sum"},
    {"pipeline": {"activation_checkpoint_interval": 1}},
    {"gradient_predivide_factor": 2.0},
    {"communication_data_type": "bf16"},
    {"communication_data_type": "fp32", "recycle": {"exact": True}},
    {**ZERO_1, **REPLICATE},
    {**ZERO_1, **REPLICATE, **BF16},
    BF16,
    FP16,
    {**FP16, **ZERO_1, "recycle": {"zero": "replicate", "loss_scaling": True}},
    {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    {
        "dump_state": True,
        "memory_breakdown": True,
        "zero_allow_untested_optimizer": True,
        "dataloader_drop_last": True,
    },  # print, or are not for pipelines
    {
        "curriculum_learning": {"enabled": False},
        "flops_profiler": {"enabled": False},
        "wall_clock_breakdown": False,
        "compile": {},
        "comms_logger": {},
    },
]


@pytest.mark.parametrize("config, line", CONFIGS, ids=lambda value: ".".join(value) if isinstance(value, dict) else "")
def test_a_config_that_asks_for_what_is_not_supported(config, line):
    (found,) = refusals(config)
    print(found)
    assert found.startswith(line) and INSTEAD.search(found[len(line) :]) and len(found) < 260 and "\n" not in found


@pytest.mark.parametrize("config", GOES, ids=lambda config: ".".join(config))
def test_a_config_that_asks_for_what_works(config):
    assert list(refusals(config)) == []


def test_none_is_left_out():
    asked = " ".join(str(config) for config, _ in CONFIGS)
    assert all(name.rpartition(".")[2] in asked for name in (*BYPASSED, *REMOVED))


# --- models -----------------------------------------------------------------------------------------


class Reporting:
    def get_additional_losses(self) -> dict:
        return {}


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def compiled() -> nn.Module:
    layer = linear()
    layer.compile()
    return layer


def mixture() -> nn.Module:
    from deepspeed.moe.layer import MoE

    return MoE(4, linear())


def rotation() -> nn.Module:
    layer = linear()
    layer.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    return layer


MODELS = {
    "complex in bf16": ([rotation], {"config": BF16}, "0.phase is complex, and bf16's master weights are real: leave"),
    "complex and exact": (
        [rotation],
        {"config": {"recycle": {"exact": True}}},
        "0.phase is complex, and recycle.exact sums real numbers only: leave that out",
    ),
    "complex": ([rotation], {}, "data parallelism is 1"),
    "an ordinary one": ([linear], {}, "data parallelism is 1: a lost worker would have no peer"),
    "no pipeline": (None, {}, "recycle.enabled needs a deepspeed.pipe.PipelineModule, and the model is a Linear"),
    "no optimizer": ([linear], {"optimizer": None}, 'there is no optimizer: add an "optimizer" section'),
    "no parameters": (
        [nn.Tanh],
        {},
        "a stage has no parameters for its optimizer, which DeepSpeed's optimizers",
    ),
    "none for the optimizer": ([linear], {"parameters": []}, "a stage has no parameters for its optimizer"),
    "statistics": ([linear, lambda: nn.BatchNorm1d(4)], {}, "1 keeps running statistics, which a forward that is run"),
    "sparse": ([lambda: nn.Embedding(4, 4, sparse=True)], {}, "0 has sparse gradients, which are not summed over"),
    "compiled": ([compiled], {}, "0 is compiled: layers whose backward is split, and run again by peers, cannot be"),
    "experts": ([mixture], {}, "deepspeed.moe layers send tokens between replicas, which may be lost"),
    "other losses": ([linear], {"bases": [Reporting]}, "Model.get_additional_losses: other losses than the one that"),
}


@pytest.fixture(scope="module")
def deepspeed_alone(process_group):
    import deepspeed

    from recycle_plugin.patches import deepspeed_cpu

    deepspeed_cpu.apply()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "LOCAL_RANK", "0")
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        yield deepspeed


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_asks_for_what_is_not_supported(deepspeed_alone, name):
    from deepspeed.pipe import PipelineModule

    from recycle_plugin.adapters.deepspeed.engine_checks import check_config

    layers, more, line = MODELS[name]
    kind = type("Model", (*more.get("bases", ()), PipelineModule), {})
    model = kind([make() for make in layers], num_stages=1, loss_fn=nn.functional.mse_loss) if layers else linear()
    with pytest.raises(RecycleError) as refused:
        check_config(more.get("config", {}), model, more.get("optimizer", torch.optim.SGD), more.get("parameters"))
    print(refused.value)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize("option", ("CONTIGUOUS_CHECKPOINTING", "PARTITION_ACTIVATIONS"))
def test_checkpointing_that_the_script_has_configured(deepspeed_alone, monkeypatch, option):
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.activation_checkpointing import checkpointing

    from recycle_plugin.adapters.deepspeed.engine_checks import check_config

    monkeypatch.setattr(checkpointing, option, True)
    with pytest.raises(
        RecycleError,
        match="deepspeed.checkpointing.configure with contiguous_checkpointing or partition_activations needs",
    ):
        check_config({}, PipelineModule([linear()], num_stages=1), torch.optim.SGD, None)


def test_what_changes_once_training_has_begun():
    from recycle_plugin.runtime.state.surroundings import AsStarted

    module = nn.Sequential(linear(), linear())
    started = AsStarted(module)
    started.check()
    module[1].bias.requires_grad = False
    with pytest.raises(
        RecycleError,
        match=r"requires_grad of 1\.bias has changed since training was set up, which is not supported in such a "
        "job: freeze and thaw parameters before that",
    ):
        started.check()


@pytest.mark.parametrize(
    "config, said",
    [
        ({"train_batch_size": 4}, 'there is no "recycle" section'),
        ({"train_batch_size": 4, "recycle": {}}, "there is no recycle.enabled"),
        ({"train_batch_size": 4, "recycle": {"enabled": False}}, None),
        ({"train_batch_size": 4, "recycle": {"enabled": True}, "cycle": {}}, None),
        ({}, None),  # it was not found, or can't be read: DeepSpeed says that
    ],
    ids=str,
)
def test_a_job_that_goes_without_the_plugin_says_so_once(config, said):
    notes = []
    for rank in range(2):
        session = SimpleNamespace(view=ControlView(rank), note=lambda kind, text: notes.append((kind, text)))
        Plugin(session)._check_section(config)
    assert [(kind, text.partition(" in the DeepSpeed")[0]) for kind, text in notes] == (
        [("warning", said)] if said else []
    )


@pytest.mark.parametrize("name", ("recyle", "Recycle", "re-cycle"))
def test_a_misspelt_section_is_refused(name):
    with pytest.raises(
        RecycleError, match=f'"{name}" in the DeepSpeed config: no such section; did you mean "recycle"'
    ):
        Plugin(SimpleNamespace())._check_section({name: {"enabled": True}})


def test_sizes_are_whole_numbers():
    assert list(sizes({"train_batch_size": 4})) == []
    assert list(sizes({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2})) == []
    assert list(sizes({"train_micro_batch_size_per_gpu": "auto"})) == [
        'train_micro_batch_size_per_gpu is "auto"; write a whole number of at least 1'
    ]

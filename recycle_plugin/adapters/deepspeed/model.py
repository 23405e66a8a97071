"""What a PipelineModule's forwards depend on besides their inputs, the same on any worker; and stages made again."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from functools import partial

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing

from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.randomness import keyed


def reentrant(module: PipelineModule) -> bool:
    """Whether ``module`` checkpoints activations in a way that leaves out layers whose inputs require no gradient."""
    return (
        module.activation_checkpoint_interval > 0
        and module.activation_checkpoint_func is not checkpointing.non_reentrant_checkpoint
    )


def keyed_forward(module: PipelineModule, seed: int, place: int, device: Device) -> AbstractContextManager[None]:
    """A context in which a forward on ``device`` draws by ``seed``. ``place``: the position of the micro-batch among
    its replica's. ``seed_layers`` seeds each layer by the number of forwards its worker has run; ``place`` is that
    number without a failure, and the same on any worker.
    """
    vars(module)["micro_offset"] = place  # bypasses torch's checks of attributes
    return keyed(seed, device)


def layers_of(module: PipelineModule) -> list[torch.nn.Module]:
    """Return the modules among the stage's layers in the order in which they run; for a tied layer the tied module."""
    called = [each.args[0] if isinstance(each, partial) and each.args else each for each in module.forward_funcs]
    return [each for each in called if isinstance(each, torch.nn.Module)]


def made_again(module: PipelineModule, stage: int, device: Device) -> PipelineModule:
    """Make ``stage`` of the pipeline of ``module`` again from its layer specs, as stock code did, without other
    processes. It has weights of its own, in the precision of ``module``, on ``device``. Modules given in place of specs
    are copied. Random streams are left as they were.
    """
    again = copy.copy(module)
    loss = {name: copy.deepcopy(each) for name, each in module._modules.items() if name == "loss_fn"}
    again.__dict__ |= {"_modules": loss, "_parameters": {}, "_buffers": {}}
    again.tied_modules, again.tied_weight_attrs, again.tied_comms = torch.nn.ModuleDict(), {}, {}
    again.forward_funcs, again.fwd_map = [], {}
    again.is_checkpointable_results, again.is_checkpointable_results_interval = [], None
    again.stage_id, again._local_start, again._local_stop = stage, module.parts[stage], module.parts[stage + 1]
    again._layer_specs = [
        copy.deepcopy(each)
        if isinstance(each, torch.nn.Module) and again._local_start <= number < again._local_stop
        else each
        for number, each in enumerate(module._layer_specs)
    ]
    with keyed(0, device):
        again._build()
    own = next(module.parameters())
    return again.to(own.device, own.dtype)

"""Checkpoints of jobs with ``--use-distributed-optimizer``, whose optimizers each have a part of the state.

The plugin's workers have the whole state of their stage (refusals.WHOLE). So stock's code loads such a checkpoint into
stock's distributed optimizer, and the whole is assembled from all parts before the first step. Checkpoints are saved in
stock's format "fully_reshardable", which any number of stock's distributed optimizers load.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import nn

from recycle_plugin.adapters.megatron_lm.ports import master_of
from recycle_plugin.adapters.megatron_lm.refusals import keep_whole, single
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.ports import trained

STATES = "exp_avg", "exp_avg_sq"
TORCHS = torch.optim.Adam, torch.optim.AdamW  # their fused forms count steps by group
KIND = "distrib_optim_sharding_type"
FORMAT = {KIND: "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


@contextmanager
def loaded(session: Session, args: Namespace, config: Any) -> Iterator[Callable[[Any], Any]]:
    """A context in which Megatron-LM builds its distributed optimizer and loads its state. Call the yielded function
    with (model, optimizer, scheduler): it returns them with an optimizer that has the whole state.
    """
    from megatron.training import training

    stock, calls, loads = training.get_megatron_optimizer, [], []

    def build(optimizer_config: Any, *more: Any, **named: Any) -> Any:
        calls.append((optimizer_config, more, named))
        with session.hooks.startup.apart():  # a newcomer builds only the other optimizer
            made = stock(optimizer_config, *more, **named)
        mend_for_torchs(single(made))
        load = made.load_state_dict

        def noted(found: Any) -> None:
            loads.append(True)
            load(found)

        made.load_state_dict = noted
        return made

    def whole(made: Any) -> Any:
        model, parts, scheduler = made
        optimizer_config, more, named = calls[0]
        keep_whole(args, config, optimizer_config)
        optimizer = stock(optimizer_config, *more, **named)
        if loads:  # Megatron-LM decides by its flags, and by the checkpoint's kind
            with session.hooks.startup.apart():
                _fill(single(optimizer), single(parts), trained(model[0].module))
        scheduler.optimizer = optimizer
        scheduler.step(increment=0)
        return model, optimizer, scheduler

    training.get_megatron_optimizer = build
    try:
        yield whole
    finally:
        training.get_megatron_optimizer = stock


def mend_for_torchs(parts: Any) -> None:
    """Let stock's distributed optimizer load into torch's Adam: it wants step counts before, one for each weight."""
    if not isinstance(parts.optimizer, TORCHS):
        return
    parts._init_optimizer_states_with_dummy_values()
    stock = parts._set_main_param_and_optimizer_states

    def kept(weight: nn.Parameter, found: dict[str, Any]) -> None:
        stock(weight, {**found, "step": next(iter(parts.optimizer.state.values()))["step"]})

    parts._set_main_param_and_optimizer_states = kept


def _fill(whole: Any, parts: Any, weights: list[nn.Parameter]) -> None:
    """Fill the optimizer ``whole`` from the ``parts`` of all replicas. All their workers call it."""
    step = parts.state_dict()["optimizer"]["param_groups"][0].get("step", 0)
    inner, masters = whole.optimizer, master_of(whole)
    for weight in weights:
        found = _whole_of(parts, weight)
        master = masters(weight)
        master.data.copy_(found.pop("param"))
        inner.state[master].update(found)
        if isinstance(inner, TORCHS):
            inner.state[master]["step"] = torch.tensor(float(step))
    if not isinstance(inner, TORCHS):
        for group in inner.param_groups:
            group["step"] = step
    if getattr(whole, "grad_scaler", None) is not None:
        whole.grad_scaler.load_state_dict(parts.grad_scaler.state_dict())


def _whole_of(parts: Any, weight: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return a weight's master and states, summed from the replicas' parts; this one may have none."""
    own: Mapping[str, torch.Tensor] = {}
    if weight in parts.model_param_gbuf_map:
        own, place = (
            parts._get_main_param_and_optimizer_states(weight),
            parts._get_model_param_range_map(weight)["param"],
        )
    found = {}
    for name in ("param", *STATES):
        flat = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        if own:
            flat[place.start : place.end] = own[name].detach().view(-1)
        dist.all_reduce(flat, group=parts.data_parallel_group)
        found[name] = flat.view(weight.shape)
    return found


def as_parts(made: dict[str, Any], optimizer: Any) -> None:
    """Put the optimizer's state into the stage's state dict ``made`` in the form of a distributed optimizer."""
    inner = single(optimizer)
    given, masters = made["optimizer"], master_of(inner)
    torchs = given.get("optimizer", given)
    step = torchs["state"].pop("common_step", 0)
    groups = [{name: value for name, value in group.items() if name != "params"} for group in torchs["param_groups"]]
    for group in groups:
        group["step"] = int(group.get("step", step))
    weights = [each for each in nested_values(made["model"]) if isinstance(each.data, nn.Parameter)]
    made["optimizer"] = {
        "optimizer": {"param_groups": groups},
        "param_state": {"states": torchs["state"], "params": [_master(each, masters) for each in weights]},
        "param_state_sharding_type": FORMAT[KIND],
        **({"grad_scaler": given["grad_scaler"]} if "grad_scaler" in given else {}),
    }


def _master(weight: Any, masters: Callable[[nn.Parameter], nn.Parameter]) -> Any:
    data = masters(weight.data).detach().float()
    kind = {"dtype": data.dtype} if isinstance(weight, ShardedTensor) else {}  # a factory has none
    return replace(weight, key=f"optimizer.state.param.{weight.key}", data=data, **kind)

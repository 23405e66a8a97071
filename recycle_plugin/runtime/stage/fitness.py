"""Checks for layers and optimizers, of any framework, that would train differently with the plugin."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from recycle_plugin.errors import RecycleError

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def check_layers(module: torch.nn.Module) -> None:
    """Raise RecycleError for a layer that a peer cannot run again. The message names the layer and an alternative."""
    for path, part in module.named_modules():
        name = path or "the model"
        if any(map(is_lazy, part.parameters(recurse=False))):
            raise RecycleError(
                f"{name} has no weights before its first forward: build it with its sizes, as nn.Linear(8, 8) for "
                "nn.LazyLinear(8)"
            )
        if getattr(part, "track_running_stats", False):
            raise RecycleError(
                f"{name} keeps running statistics, which a forward that is run again would count twice; "
                "use a normalisation without them (LayerNorm, GroupNorm), or track_running_stats=False"
            )
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise RecycleError(
                f"{name} has sparse gradients, which are not summed over replicas yet; build it with sparse=False"
            )
        kinds = {kind.__name__ for kind in type(part).__mro__}  # fully_shard replaces its class
        if getattr(part, "_compiled_call_impl", None) is not None or "OptimizedModule" in kinds:
            raise RecycleError(
                f"{name} is compiled: layers whose backward is split, and run again by peers, cannot be yet; leave "
                "torch.compile out"
            )


def check_optimizer(module: torch.nn.Module, optimizer: Any) -> None:
    """Raise RecycleError if the optimizer would not step by the summed gradients of ``module``."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecycleError(
            f"the optimizer is a {type(optimizer).__name__}: give one of torch's, or of a class that is made from "
            "torch.optim.Optimizer"
        )
    if missing := _missing(optimizer):
        raise RecycleError(
            f"{type(optimizer).__name__}.step() needs {missing!r}, such as a closure that computes losses of its own, "
            "which are not summed over replicas: use another optimizer"
        )
    known = set(module.parameters())
    strange = next(
        (
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter not in known
        ),
        None,
    )
    if strange is not None:
        raise RecycleError(
            f"the optimizer has a parameter of shape {tuple(strange.shape)} that is not in the module, so that its "
            "gradient would not be summed over replicas: "
            "give a module that has all of them, such as nn.ModuleList([one, other]), or the optimizer those of the "
            "module"
        )


def check_elementwise(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Raise RecycleError if the optimizer may not step each element by itself, as ``what`` needs."""
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch" or kind.__name__ not in ELEMENTWISE:
        raise RecycleError(
            f"{kind.__name__} with {what} is not supported yet, since it may not step each element of a weight "
            f"by itself: use one of torch.optim's {', '.join(ELEMENTWISE)}"
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise RecycleError if the learning-rate scheduler, None for none, cannot be stepped after each step."""
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)):
        raise RecycleError(
            f"the scheduler is a {type(scheduler).__name__}, without a step(): give an object as those of "
            "torch.optim.lr_scheduler are"
        )
    if missing := _missing(scheduler):
        raise RecycleError(
            f"{type(scheduler).__name__}.step() needs {missing!r}, which a step does not know: give no scheduler=, and "
            "call its step() between steps"
        )


def _missing(steps: Any) -> str | None:
    """Return the first argument that ``steps.step()`` requires, or None. Looks at the class's method: torch's
    schedulers put a function with ``self`` into the object.
    """
    method = inspect.signature(getattr(type(steps), "step", lambda _: None)).parameters.values()
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = (each for each in [*method][1:] if each.default is each.empty)
    return next((each.name for each in needed if each.kind not in kinds), None)

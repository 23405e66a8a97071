"""The optimizer's state in bf16 jobs: whole on every worker, in DeepSpeed's format in files.

Stock DeepSpeed gives each replica of a stage a part of the fp32 master weights and of the optimizer's state, at ZeRO
stage 0 too, so a lost worker's part has no copy. Here every worker has all of it and takes the whole step. A checkpoint
still has stock's parts. Each parameter group is flattened into one tensor, padded with zeros, and cut into equal parts,
one for each logical replica. Any number of replicas can assemble these.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import constants as names
from deepspeed.git_version_info import version
from deepspeed.utils import fragment_address

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.state.contents import attributes_of

ALIGNMENT = 2  # the length of each part is a multiple of it, as in stock
Parameters = list[torch.nn.Parameter]
Span = tuple[int, int]
DYNAMIC = "dynamic_loss_scale"
UNFIT = (
    "DeepSpeed's files of bf16 and fp16 jobs have no place for that; use an optimizer such as Adam or SGD, whose "
    "parameters all have gradients, or fp32"
)


class MasterOptimizer:
    """Stands in for stock's BF16_Optimizer: steps ``optimizer`` on the masters, and rounds them off to the weights. It
    puts the masters into the optimizer's groups. ``clip`` is called with the whole gradients in place, and returns the
    norm they are clipped by, None if unknown.
    """

    # of the step applied last; stock code reads it by this name
    _global_grad_norm: torch.Tensor | None = None
    part: Callable[[], dict[str, Any]] | None = None  # for stock's state_dict, set once the engine has a seat

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        clip: Callable[[], torch.Tensor | float | None],
    ) -> None:
        self.optimizer, self._masters, self._clip = optimizer, masters, clip
        for group in optimizer.param_groups:
            group["params"] = [masters.of(parameter) for parameter in group["params"] if parameter.requires_grad]
        _check_wrapped(optimizer, set(masters.weights))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, for stock code."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The wrapped optimizer's state, for stock code."""
        return self.optimizer.state

    def step(self) -> None:
        """Clip, step the masters, and round them off to the weights. Called by the engine's optimizer step."""
        norm = self._clip()
        self._global_grad_norm = None if norm is None else torch.as_tensor(norm)
        self.optimizer.step()
        self._masters.round_off()

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state that stock's optimizer would have: its replica's part of the masters and of the state."""
        assert self.part is not None, "the engine is made"
        return self.part()

    def load_state_dict(self, *arguments: Any, **named: Any) -> None:
        """Raise RecycleError: all workers load state together."""
        raise RecycleError(
            "engine.optimizer.load_state_dict() would give one worker another state than its peers have: call "
            "engine.load_checkpoint()"
        )

    def __getattr__(self, name: str) -> Any:
        raise NotInOptimizer(
            f"engine.optimizer.{name} is part of DeepSpeed's own optimizer, which keeps shards; the plugin keeps the "
            "state whole: use engine.optimizer.optimizer, torch's, of the fp32 masters"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the masters' gradients."""
        self._masters.gradients.zero()


def _check_wrapped(optimizer: torch.optim.Optimizer, weights: AbstractSet[torch.Tensor]) -> None:
    """Raise RecycleError if an inner optimizer has parameter groups of its own: it would go on stepping the weights."""
    for name, inner in attributes_of(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            if any(parameter in weights for group in inner.param_groups for parameter in group["params"]):
                raise RecycleError(
                    f"{type(optimizer).__name__}.{name} has parameter groups of its own, whose weights are not fp32: "
                    "DeepSpeed puts the fp32 masters into the outer optimizer's groups only; let both have the same "
                    "param_groups, or train in fp32"
                )
            _check_wrapped(inner, weights)


class NotInOptimizer(RecycleError, AttributeError):
    """An attribute of DeepSpeed's optimizer that the plugin's does not have."""


class FlatState:
    """The state of ``optimizer``, whose groups hold masters, as stock has it: each group in one flat tensor. A *span*
    is a range of a group's numbers, with zeros beyond the group's end.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def groups(self) -> list[Parameters]:
        return [group["params"] for group in self._optimizer.param_groups]

    @torch.no_grad()
    def masters(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Return each group's masters in its span."""
        return [_flat(group, span) for group, span in zip(self.groups, spans, strict=True)]

    @torch.no_grad()
    def state_dict(self, spans: Sequence[Span]) -> dict[str, Any]:
        """Return the state dict of a torch optimizer of :meth:`masters`. Raises RecycleError if state can't be cut."""
        state = {}
        for index, (group, span) in enumerate(zip(self.groups, spans, strict=True)):
            kinds = [self._optimizer.state.get(parameter, {}).keys() for parameter in group]
            if any(each != kinds[0] for each in kinds):
                raise RecycleError(
                    "save_checkpoint: the optimizer has state for some parameters of a group only (others had no "
                    f"gradient yet), and {UNFIT}"
                )
            if group and kinds[0]:
                state[index] = {name: self._of(group, name, span) for name in kinds[0]}
        hyper = [{**group, "params": [index]} for index, group in enumerate(self._optimizer.param_groups)]
        return {"state": state, "param_groups": hyper}

    def _of(self, group: Parameters, name: str, span: Span) -> Any:
        """Return one kind of a group's state. State per element is cut as the masters are. Other state counts steps,
        and is the same for all parameters.
        """
        values = [self._optimizer.state[parameter][name] for parameter in group]
        if name != "step" and all(
            torch.is_tensor(value) and value.shape == parameter.shape for value, parameter in zip(values, group)
        ):
            return _flat(values, span)
        if any(torch.is_tensor(value) and value.numel() > 1 for value in values):
            raise RecycleError(
                f"save_checkpoint: the optimizer's state {name!r} has other shapes than the parameters, and {UNFIT}"
            )
        if any(value != values[0] for value in values):
            raise RecycleError(
                f"save_checkpoint: the optimizer's state {name!r} is not the same for all parameters of a group, and "
                f"{UNFIT}"
            )
        return values[-1]

    @torch.no_grad()
    def read(self, masters: Sequence[Sequence[torch.Tensor]], states: Sequence[dict[str, Any]]) -> None:
        """Load masters, by part and group, and what :meth:`state_dict` returned for each part."""
        for index, group in enumerate(self.groups):
            for master, value in zip(group, _apart([part[index] for part in masters], group)):
                master.copy_(value)
        state: dict[int, dict[str, Any]] = {}
        hyper, place = [], 0
        for index, group in enumerate(self.groups):
            places = range(place, place := place + len(group))
            hyper.append({**states[0]["param_groups"][index], "params": list(places)})
            for name, value in states[0]["state"].get(index, {}).items():
                whole = torch.is_tensor(value) and value.dim()
                values = (
                    _apart([part["state"][index][name] for part in states], group) if whole else [value] * len(group)
                )
                for one, each in zip(places, values):
                    state.setdefault(one, {})[name] = each.clone() if torch.is_tensor(each) else each
        self._optimizer.load_state_dict({"state": state, "param_groups": hyper})


class StateFiles:
    """Files with the optimizer's state and masters of ``stage``, in the format of DeepSpeed's BF16_Optimizer; with a
    loss ``scaler`` in that of ZeRO stage 1, which includes the scaler. ``called``: the weights' names.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        called: Mapping[torch.nn.Parameter, str],
        stage: int,
        clipping: float,
        scaler: Any = None,
    ) -> None:
        self._flat, self._stage, self._clipping = FlatState(optimizer), stage, clipping
        self._called = {masters.of(weight): called[weight] for weight in masters.weights}
        self._masters, self._scaler = masters, scaler

    def name(self, part: int | str) -> str:
        prefix = names.BF16_ZERO_FILE_PREFIX if self._scaler is None else names.ZERO_FILE_PREFIX
        return f"{prefix}{part}_{names.MODEL_FILE_PREFIX}{self._stage:02d}{names.OPTIM_FILE_SUFFIX}"

    # --- writing -----------------------------------------------------------------------------------

    def part(self, number: int, parts: int) -> dict[str, Any]:
        """Return the file contents that replica ``number`` of ``parts`` writes in stock. Raises RecycleError if state
        can't be cut.
        """
        groups = self._flat.groups
        spans = [_span(group, number, parts) for group in groups]
        state = {
            names.CLIP_GRAD: self._clipping,
            names.BASE_OPTIMIZER_STATE: self._flat.state_dict(spans),
            names.SINGLE_PARTITION_OF_FP32_GROUPS: self._flat.masters(spans),
            names.GROUP_PADDINGS: [
                span[1] - _size(group) if number == parts - 1 else 0 for group, span in zip(groups, spans)
            ],
            names.PARTITION_COUNT: [parts] * len(groups),
            names.DS_VERSION: version,
            names.PARAM_SLICE_MAPPINGS: self._slices(number, parts),
        }
        return {names.OPTIMIZER_STATE_DICT: state | self._of_zero(state), names.DS_VERSION: version}

    def _of_zero(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``state``'s entries in the form of ZeRO stage 1: the scale, and masters without padding."""
        if self._scaler is None:
            return {}
        masters = state[names.SINGLE_PARTITION_OF_FP32_GROUPS]
        filled = [sum(each.numel for each in slices.values()) for slices in state[names.PARAM_SLICE_MAPPINGS]]
        return {
            names.LOSS_SCALER: copy.copy(self._scaler),
            DYNAMIC: self._scaler.dynamic,
            "overflow": False,
            names.ZERO_STAGE: 1,
            names.SINGLE_PARTITION_OF_FP32_GROUPS: [flat[:count] for flat, count in zip(masters, filled)],
            names.GROUP_PADDINGS: [flat.numel() - count for flat, count in zip(masters, filled)],
        }

    def _slices(self, number: int, parts: int) -> list[OrderedDict[str, Any]]:
        """Return the position of each group's parameters in a part."""
        found = []
        for group in self._flat.groups:
            span, there = _span(group, number, parts), OrderedDict()
            for parameter, end in zip(group, _ends(group)):
                begin, end = max(end - parameter.numel(), span[0]), min(end, span[1])
                if begin < end:
                    there[self._called[parameter]] = fragment_address(numel=end - begin, start=begin - span[0])
            found.append(there)
        return found

    # --- and reading -------------------------------------------------------------------------------

    def read(self, folder: Path, load: Callable[[str], dict[str, Any]]) -> None:
        """Load the parts in ``folder``, of any number of replicas. Raises RecycleError if incomplete or a misfit."""
        first = folder / self.name(0)
        if not first.is_file():
            raise RecycleError(
                f"load_checkpoint: {first} is missing; load another checkpoint, or only the weights with "
                "load_module_only=True"
            )
        parts = [load(str(first))[names.OPTIMIZER_STATE_DICT]]
        for number in range(1, parts[0][names.PARTITION_COUNT][0]):
            path = folder / self.name(number)
            if not path.is_file():
                raise RecycleError(
                    f"load_checkpoint: {path} is missing, a part of the optimizer's state; load another checkpoint"
                )
            parts.append(load(str(path))[names.OPTIMIZER_STATE_DICT])
        self._check(parts, folder)
        self._take(parts)
        self._masters.round_off()

    def _check(self, parts: list[dict[str, Any]], folder: Path) -> None:
        found, here = self._numbers(parts), [_size(group) for group in self._flat.groups]
        if found != here:
            raise RecycleError(
                f"load_checkpoint: stage {self._stage} of {folder} has {found} numbers in its parameter groups, and "
                f"this job's has {here}; "
                "load a checkpoint of the same model with the same stages"
            )
        if self._scaler is None:
            return
        check_kind(parts[0][names.LOSS_SCALER].dynamic, self._scaler)
        for number, part in enumerate(parts):
            if part[names.PARAM_SLICE_MAPPINGS] != self._slices(number, len(parts)):
                raise RecycleError(
                    f"load_checkpoint: {folder / self.name(number)} has reordered or padded parameters, as with "
                    "zero_optimization.round_robin_gradients or parameter_alignment, which is not supported; "
                    "load the weights alone with load_module_only=True"
                )

    def _take(self, parts: list[dict[str, Any]]) -> None:
        self._flat.read(
            [part[names.SINGLE_PARTITION_OF_FP32_GROUPS] for part in parts],
            [part[names.BASE_OPTIMIZER_STATE] for part in parts],
        )
        if self._scaler is not None:
            vars(self._scaler).update(vars(parts[0][names.LOSS_SCALER]))

    def _numbers(self, parts: list[dict[str, Any]]) -> list[int]:
        masters = zip(*(part[names.SINGLE_PARTITION_OF_FP32_GROUPS] for part in parts))
        found = [sum(flat.numel() for flat in group) for group in masters]
        paddings = parts[-1][names.GROUP_PADDINGS] if self._scaler is None else [0] * len(found)
        return [count - more for count, more in zip(found, paddings, strict=True)]


def check_kind(dynamic: bool, scaler: Any) -> None:
    """Raise RecycleError if a checkpoint's loss scale is of another kind: stock would take it all the same."""
    if dynamic != scaler.dynamic:
        kinds = {True: "dynamic", False: "static"}
        raise RecycleError(
            f"load_checkpoint: the checkpoint's loss scale is {kinds[dynamic]}, and fp16.loss_scale makes this job's "
            f"{kinds[scaler.dynamic]}; write {'0' if dynamic else 'that scale'}, or load the weights alone with "
            "load_module_only=True"
        )


def whole_state_mib(weights: Parameters) -> float:
    return 12 * sum(weight.numel() for weight in weights) / 2**20


def _ends(group: Parameters) -> list[int]:
    """Return where each parameter ends in the flat group."""
    return list(accumulate(parameter.numel() for parameter in group))


def _size(group: Parameters) -> int:
    return sum(parameter.numel() for parameter in group)


def _span(group: Parameters, number: int, parts: int) -> Span:
    length = ALIGNMENT * -(-_size(group) // (ALIGNMENT * parts))
    return number * length, (number + 1) * length


def _flat(tensors: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
    """Return a copy of ``span`` of the flattened ``tensors``, padded with zeros."""
    found, begin = torch.zeros(span[1] - span[0], dtype=tensors[0].dtype if tensors else torch.float32), 0
    for tensor in tensors:
        start, end = max(begin, span[0]), min(begin + tensor.numel(), span[1])
        if start < end:
            found[start - span[0] : end - span[0]] = tensor.reshape(-1)[start - begin : end - begin]
        begin += tensor.numel()
    return found


def _apart(parts: list[torch.Tensor], group: Parameters) -> list[torch.Tensor]:
    flat = torch.cat(parts)
    return [flat[end - parameter.numel() : end].view(parameter.shape) for parameter, end in zip(group, _ends(group))]

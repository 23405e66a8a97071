"""Checks that a layer may be run again: peers do so after a failure, and workers with more micro-batches run more.

What a forward carries over (running statistics, counters, a generator of its own) cannot be seen from a model. So the
first training forward is run twice, on the same micro-batch with the same random numbers. Both must give the same, up
to rounding (in exact mode bit for bit), and leave parameters and buffers unchanged; a cache may be filled once. A
backward must leave them unchanged, too. A newcomer's first forward is not checked: its peers have checked the same
layers, and wait for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.port import Tensors

ADVICE = "or set recycle.enabled to false"
ROUNDINGS = {torch.bfloat16: 8, torch.float16: 8}  # in units of a type's smallest step


class _TensorSnapshot(NamedTuple):
    """A tensor of a module, how often it was changed in place (None: not compared), and its content. Workspaces may be
    changed: of these only the content counts.
    """

    tensor: torch.Tensor
    version: int | None
    content: tuple[Any, ...]

    def changed_in_place(self, since: _TensorSnapshot) -> bool:
        return self.tensor is since.tensor and (self.version, self.content) != (since.version, since.content)


class ModuleState:
    """A module's present parameters, buffers, other tensors, numbers and generators; costs a pass over all tensors."""

    def __init__(self, module: torch.nn.Module) -> None:
        attributes = list(_attributes(module))
        owned = (*module.named_parameters(), *module.named_buffers())
        self._owned = {name: _TensorSnapshot(tensor, _version(tensor), _content(tensor)) for name, tensor in owned}
        self._tensors = {
            name: _TensorSnapshot(value, None, _content(value)) for name, value in attributes if torch.is_tensor(value)
        }
        self._others = dict(_others(attributes))

    def changed_in_place(self, since: ModuleState) -> str | None:
        """Return the first parameter or buffer changed in place since then, by name, or None."""
        return next(
            (
                name
                for name, kept in self._owned.items()
                if name in since._owned and kept.changed_in_place(since._owned[name])
            ),
            None,
        )

    def changed(self, since: ModuleState, exact: bool) -> str | None:
        """Return the name of the first changed tensor, or None; ``exact``: compare bits, else up to rounding."""
        here, there = {**self._owned, **self._tensors}, {**since._owned, **since._tensors}
        return self.changed_in_place(since) or next(
            (name for name, kept in here.items() if not _as_before(kept, there.get(name), exact)), None
        )

    def counted(self, since: ModuleState) -> str | None:
        """Return the name of the first number or random generator that has changed since then, or None."""
        return next((name for name, value in self._others.items() if since._others.get(name, value) != value), None)


def _as_before(kept: _TensorSnapshot, since: _TensorSnapshot | None, exact: bool) -> bool:
    if since is None or kept.tensor is since.tensor:
        return since is not None and kept.content == since.content
    return kept.content == since.content or _alike(kept.tensor, since.tensor, exact)


def _others(attributes: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in attributes:
        if isinstance(value, (int, float)):
            yield name, value
        elif isinstance(value, (random.Random, torch.Generator)):
            yield name, value.getstate() if isinstance(value, random.Random) else value.get_state().tolist()


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return (
        (f"{prefix}.{name}".lstrip("."), value)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _content(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a quick digest of a tensor: type, shape, and the sum of its bits."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
    ):
        return (type(tensor), tensor.layout)
    bits = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    return tensor.dtype, tuple(tensor.shape), bits.contiguous().reshape(-1).view(whole).sum(dtype=torch.int64).item()


class Reuse:
    """Whether runs may write their outputs to the same memory (``may``); decided by the first two, True before."""

    def __init__(self) -> None:
        self.may = True
        self._first: dict[int, torch.UntypedStorage] | None = None  # kept, so that its memory is not given out again
        self.known = False

    def see(self, made: Tensors) -> None:
        """Record the outputs of a run; only needed until ``known``."""
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in made if each.numel()}
        if self._first is None:
            self._first = storages
        else:
            self.may, self.known, self._first = bool(self._first.keys() & storages.keys()), True, None


class Rehearsal:
    """The two runs of the first ``what`` ("forward") of ``module``, which must give the same. ``before``: the module's
    state before the first; ``exact``: compare bits; ``advice``: for a refusal's message.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        before: ModuleState,
        exact: bool,
        warn: Callable[[str], None],
        what: str = "forward",
        advice: str = ADVICE,
    ) -> None:
        self._module, self._before, self._exact, self._warn = module, before, exact, warn
        self._what, self._advice = what, advice

    def once(self, made: Tensors) -> None:
        """Record what the first run ``made``. Raises RecycleError if it changed parameters or buffers."""
        self._between = ModuleState(self._module)
        _refuse(self._between.changed_in_place(self._before), self._what, self._advice)
        self._first = [tensor.detach().clone() for tensor in made]

    def twice(self, made: Tensors) -> None:
        """Raise RecycleError if the second run ``made`` something else, or the forward must not be repeated."""
        now = ModuleState(self._module)
        _refuse(now.changed(self._between, self._exact), self._what, self._advice)
        counted = now.counted(self._between)
        if len(made) != len(self._first) or not all(_alike(*pair, self._exact) for pair in zip(made, self._first)):
            raise RecycleError(
                f"a {self._what} gives something else when it is run again with the same input and random "
                f"numbers{f': {counted} has changed' if counted else ''}. A lost worker's micro-batches are run again "
                "by others, which have to get the same: count outside of the model, and draw from torch's, "
                f"Python's or numpy's common generators; {self._advice}"
            )
        if counted is not None:
            self._warn(
                f"{counted} changes with each {self._what}, and after a failure some are run again, and others by "
                "workers with more micro-batches: "
                "if a layer's output depends on it, now or later, losses will not be those of a run without a "
                "failure"
            )


def check_unchanged(module: torch.nn.Module, before: ModuleState, what: str, advice: str = ADVICE) -> None:
    """Raise RecycleError if the first ``what`` (forward, backward) has changed parameters or buffers of ``module``."""
    _refuse(ModuleState(module).changed_in_place(before), what, advice)


def _refuse(changed: str | None, what: str, advice: str) -> None:
    if changed is not None:
        raise RecycleError(
            f"{changed} is changed by each {what} in training; a repeated one would change it twice, "
            "and workers with more micro-batches change it more: leave out what counts there (running statistics, "
            f"spectral norm, max_norm of an embedding, steps in a hook), {advice}"
        )


def _alike(one: torch.Tensor, other: torch.Tensor, exact: bool) -> bool:
    """Return whether two tensors are equal, in all bits or up to the order of a sum, relative to the largest number."""
    if one.dtype != other.dtype or one.shape != other.shape or one.layout is not torch.strided:
        return False
    if exact or not (one.is_floating_point() or one.is_complex()) or not one.numel():
        return bool(torch.all((one == other) | (one.isnan() & other.isnan())))
    rounding = ROUNDINGS.get(one.dtype, 64) * torch.finfo(one.dtype).eps
    largest = other.detach().abs().nan_to_num(0.0, 0.0).max().item()
    return torch.allclose(one, other, rtol=rounding, atol=rounding * largest, equal_nan=True)

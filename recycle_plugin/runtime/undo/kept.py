"""What both ways of undo keep: copies of tensors, and everything small that a step changes."""

from __future__ import annotations

import copy
from typing import Any, Callable, Hashable, Mapping

import torch

ELSEWHERE = object()  # instead of a value that somebody else keeps


class Copies:
    """Of tensors by key, in buffers that are allocated once."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        return self._buffers[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._buffers

    def take(self, sources: Mapping[Hashable, torch.Tensor]) -> None:
        """Copy ``sources``, and forget keys that are not among them."""
        self._buffers = {key: self._buffer(key, source) for key, source in sources.items()}
        _copy(list(self._buffers.values()), list(sources.values()))

    def put_back(self, targets: Mapping[Hashable, torch.Tensor]) -> None:
        """Copy into the tensor of each key.

        Not by exchanging storages: parameters and moments may be views into flat buffers, and whoever
        else holds such a buffer has to see the old values too.
        """
        _copy([targets[key] for key in self._buffers], list(self._buffers.values()))

    def _buffer(self, key: Hashable, source: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(key)
        fits = known is not None and known.shape == source.shape and known.dtype == source.dtype and known.device == source.device
        return known if fits else torch.empty_like(source)


class Bookkeeping:
    """Hyper-parameters, what the optimizer's state holds besides tensors, and what ``counters()`` returns.

    ``counters()`` gives any picklable state (learning-rate scheduler, step counts), ``set_counters`` takes it
    back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, counters: Callable[[], Any], set_counters: Callable[[Any], None]) -> None:
        self._optimizer = optimizer
        self._counters = counters
        self._set_counters = set_counters
        self._states: dict[int, dict[str, Any]] = {}
        self._extra: Any = None
        self.groups: list[dict[str, Any]] = []  # hyper-parameters of the step
        self.taken = False

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The optimizer's, in the order of its groups."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def tensors(self) -> dict[Hashable, torch.Tensor]:
        """All tensors of the optimizer's state, by (index into ``parameters``, name)."""
        return {(index, name): value for index, state in self._present() for name, value in state.items() if torch.is_tensor(value)}

    def take(self) -> None:
        self._states = {
            index: {name: ELSEWHERE if torch.is_tensor(value) else copy.deepcopy(value) for name, value in state.items()}
            for index, state in self._present()
        }
        self.groups = [copy.deepcopy({name: value for name, value in group.items() if name != "params"}) for group in self._optimizer.param_groups]
        self._extra = copy.deepcopy(self._counters())
        self.taken = True

    def restore(self) -> None:
        """Put everything back, and drop what the step created.  Once: what was kept is handed out."""
        for index, parameter in enumerate(self.parameters):
            if index in self._states:
                _restore(self._optimizer.state[parameter], self._states[index])
            else:
                self._optimizer.state.pop(parameter, None)
        for group, saved in zip(self._optimizer.param_groups, self.groups, strict=True):
            _restore(group, {**saved, "params": ELSEWHERE})
        self._set_counters(self._extra)
        self.taken = False

    def _present(self) -> list[tuple[int, dict[str, Any]]]:
        return [(index, self._optimizer.state[p]) for index, p in enumerate(self.parameters) if p in self._optimizer.state]


def _restore(present: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name in present.keys() - saved.keys():
        del present[name]
    for name, value in saved.items():
        if torch.is_tensor(value) and torch.is_tensor(present.get(name)):
            present[name].copy_(value)  # others hold this very tensor: a scheduler, a captured graph
        elif value is not ELSEWHERE:
            present[name] = value


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)

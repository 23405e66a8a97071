"""What takes a worker's own last step back, exactly: a copy of everything that the step changes.

Kept from just before the step until it is committed by all stages (core/step.py).  Buffers are
allocated once and copied into, 12 bytes a parameter for Adam in fp32.
"""

from __future__ import annotations

import copy
from typing import Any, Callable

import torch


class Snapshot:
    """Of ``parameters``, ``optimizer`` (tensors, hyper-parameters) and what ``counters`` returns.

    ``counters()`` gives any picklable state besides (learning-rate scheduler, step counts);
    ``set_counters`` takes it back.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        counters: Callable[[], Any],
        set_counters: Callable[[Any], None],
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._counters = counters
        self._set_counters = set_counters
        self._copies: dict[tuple, torch.Tensor] = {}
        self._plain: dict[int, dict] = {}
        self._groups: list[dict] = []
        self._extra: Any = None
        self.taken = False

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state over the last one."""
        sources = self._tensors()
        for key, source in sources.items():
            if key not in self._copies:
                self._copies[key] = torch.empty_like(source)
        self._copies = {key: self._copies[key] for key in sources}
        _copy(list(self._copies.values()), list(sources.values()))
        self._plain = {
            index: {name: value for name, value in state.items() if not torch.is_tensor(value)} for index, state in self._states()
        }
        self._groups = [{name: copy.copy(value) for name, value in group.items() if name != "params"} for group in self._optimizer.param_groups]
        self._extra = copy.deepcopy(self._counters())
        self.taken = True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copied state back, bit for bit; RuntimeError if none was taken."""
        if not self.taken:
            raise RuntimeError("no snapshot to go back to")
        for index, parameter in enumerate(self._parameters):
            self._restore_state(index, parameter)
        targets = self._tensors()
        _copy([targets[key] for key in self._copies], list(self._copies.values()))
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(saved))
        self._set_counters(copy.deepcopy(self._extra))

    def _restore_state(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Drop what the step created and put plain values back; tensors keep their storage."""
        state = self._optimizer.state.get(parameter)
        if state is None:
            return
        for name in [name for name in state if (index, name) not in self._copies and name not in self._plain.get(index, {})]:
            del state[name]
        state.update(copy.deepcopy(self._plain.get(index, {})))
        if not state:
            del self._optimizer.state[parameter]

    def _states(self) -> list[tuple[int, dict]]:
        return [(index, self._optimizer.state[p]) for index, p in enumerate(self._parameters) if p in self._optimizer.state]

    def _tensors(self) -> dict[tuple, torch.Tensor]:
        tensors: dict[tuple, torch.Tensor] = {(index,): parameter.data for index, parameter in enumerate(self._parameters)}
        for index, state in self._states():
            tensors.update({(index, name): value for name, value in state.items() if torch.is_tensor(value)})
        return tensors


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)

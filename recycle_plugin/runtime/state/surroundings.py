"""The state of a training script that a step's numbers depend on, as it was when the step began.

After a loss the rest of a step may run in the middle of something else: of a manual evaluation, with the model in
evaluation mode, without gradients, in another precision; or after the script has changed a learning rate, a temperature
or a loss weight for the next step. Such values are seen here if they are numbers and words on the model's layers or in
the optimizer's groups. For others the script must call ``settle()`` before it changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch

from recycle_plugin.errors import RecycleError

Place = tuple[int, str]  # (number of the owner, name there)
ScriptsValues = tuple[dict[Place, Any], dict[str, torch.Tensor]]  # plain values, and buffers
MOST_BYTES = 1 << 26  # of buffers that a script has changed for its steps
PLAIN = frozenset((int, float, bool, str, tuple, type(None)))
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Surroundings:
    """Remembers modes and plain attributes of ``module`` and of the optimizer's ``groups()``; ``kind``: of device."""

    def __init__(self, module: torch.nn.Module, kind: str, groups: Callable[[], list[dict[Any, Any]]] = list) -> None:
        self._module, self._kind, self._groups = module, kind, groups
        self._owners: list[MutableMapping[str, Any]] = []
        self._places: list[Place] = []
        self._left: list[Any] = []  # the values at the places
        self.remember()

    def remember(self) -> None:
        """Remember autocast, the layers' modes and the trained parameters, as a step begins."""
        self._autocast = torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)
        self._modes = [(part, part.training) for part in self._module.modules()]
        self.remember_trained()

    def remember_trained(self) -> None:
        """Remember which parameters require a gradient, and the optimizer's number of groups."""
        self._trained = [(parameter, parameter.requires_grad) for parameter in self._module.parameters()]
        self._group_count = len(self._groups())

    @property
    def retrained(self) -> str:
        """The parameters that the script has frozen, thawed or added to the optimizer since this was remembered, in
        words, or "".
        """
        if len(self._groups()) != self._group_count:
            return "groups of the optimizer were added or removed"
        changed = next((one for one, trained in self._trained if one.requires_grad != trained), None)
        if changed is None:
            return ""
        name = next((name for name, one in self._module.named_parameters() if one is changed), "a parameter")
        return f"{name} was {'thawed' if changed.requires_grad else 'frozen'}"

    def leave(self) -> None:
        """Remember the present numbers and words, before the script may change them for the next step."""
        # groups come last, since scripts add some: layers' places stay the same
        owners: list[MutableMapping[str, Any]] = [*map(vars, self._module.modules()), *self._groups()]
        # finding them takes longer than reading them
        if [len(owner) for owner in owners] != [len(owner) for owner in self._owners]:
            self._places = [
                (number, name)
                for number, owner in enumerate(owners)
                for name, value in owner.items()
                if is_plain(name, value)
            ]
        self._owners = owners
        self._left = [owners[number].get(name) for number, name in self._places]

    def changed(self) -> dict[Place, tuple[Any, Any]]:
        """Return the script's changes since :meth:`leave`, as {place: (value then, value now)}."""
        found = {}
        for (number, name), left in zip(self._places, self._left):
            now = self._owners[number].get(name, left)
            # a tensor left there by a forward has no truth value
            if now is not left and is_plain(name, now) and not (is_plain(name, left) and now == left):
                found[number, name] = left, now
        return found

    def now(self, places: Iterable[Place]) -> dict[Place, Any]:
        return {(number, name): self._owners[number].get(name) for number, name in places}

    def set(self, values: Mapping[Place, Any]) -> None:
        for (number, name), value in values.items():
            self._owners[number][name] = value

    def is_layers(self, place: Place) -> bool:
        """Return whether the place is on a layer, not in the optimizer."""
        return place[0] < sum(1 for _ in self._module.modules())

    @property
    def other_modes(self) -> bool:
        """Whether some layer has another mode (training, evaluation) than when the step began."""
        return any(part.training != training for part, training in self._modes)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context in which all is as it was when the step began."""
        changed = self.changed()
        self.set({place: left for place, (left, _) in changed.items()})
        try:
            with self._restored():
                yield
        finally:
            self.set({place: now for place, (_, now) in changed.items()})

    @contextmanager
    def _restored(self) -> Iterator[None]:
        enabled, dtype = self._autocast
        modes = [(part, part.training) for part in self._module.modules()]
        _set(self._modes)
        trained, groups = [(parameter, parameter.requires_grad) for parameter, _ in self._trained], self._groups()
        added = groups[self._group_count :]
        del groups[self._group_count :]
        _require(self._trained)
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(self._kind, dtype, enabled):
                yield
        finally:
            _require(trained)
            groups.extend(added)
            _set(modes)


class SetByScript:
    """What a script sets for each of its steps, on layers and in the optimizer's groups, so that a replay of these
    steps computes with it: in a newcomer on its way to the present, or in a worker that may have to replay its stage
    for others.

    One entry per step with changes: some 300 bytes per number, and copies of changed buffers. Beyond MOST_BYTES of
    buffers the oldest go.
    """

    def __init__(self, surroundings: Surroundings, module: torch.nn.Module) -> None:
        self._surroundings, self._buffers = surroundings, _Buffers(module)
        self._by_step: dict[int, dict[Place, Any]] = {}
        self._built: dict[Place, Any] = {}  # what the script changed later, as it was before
        surroundings.leave()

    def begin(self, step: int) -> None:
        """Record for ``step`` the values that the script has set since :meth:`end`."""
        self._buffers.begin(step)
        for later in [number for number in self._by_step if number >= step]:  # of steps before a checkpoint was loaded
            del self._by_step[later]
        if changed := self._surroundings.changed():
            self._built = {place: left for place, (left, _) in changed.items()} | self._built
            self._by_step[step] = {place: now for place, (_, now) in changed.items()}

    def end(self) -> None:
        """Start again after a step: changes up to now were not the script's."""
        self._surroundings.leave()
        self._buffers.leave()

    def apply(self, step: int) -> None:
        """Set the script's values for ``step`` again."""
        self._surroundings.set(self._by_step.get(step, {}))
        self._buffers.apply(step)

    def forget(self, step: int) -> None:
        """Forget the values by step up to ``step``: no replay begins before its end. Costs a look at all entries."""
        for each in [number for number in self._by_step if number <= step]:
            self._built |= self._by_step.pop(each)
        self._buffers.forget(step)

    def now(self) -> ScriptsValues:
        """Return the present values of all that a replay sets, and all buffers, also those in checkpoints."""
        places = {place for found in (self._built, *self._by_step.values()) for place in found}
        return self._surroundings.now(places), self._buffers.now()

    def put_back(self, values: ScriptsValues) -> None:
        plain, buffers = values
        self._surroundings.set(plain)
        self._buffers.put_back(buffers)

    def rewind(self, step: int) -> None:
        """Set the layers as the script had them in ``step``; the optimizer's groups belong to the state. Costs time
        proportional to the steps.
        """
        found = dict(self._built)
        for each in sorted(number for number in self._by_step if number <= step):
            found |= self._by_step[each]
        self._buffers.rewind(step)
        self._surroundings.set({place: value for place, value in found.items() if self._surroundings.is_layers(place)})


def layers_digest(module: torch.nn.Module) -> str:
    """Digest the layers' classes, modes, plain attributes and numbers of hooks; equal if they compute alike."""
    found = [
        (
            name,
            type(part).__qualname__,
            part.training,
            sorted((key, repr(value)) for key, value in vars(part).items() if is_plain(key, value)),
            [len(vars(part).get(hooks) or ()) for hooks in HOOKS],
        )
        for name, part in module.named_modules()
        if name
    ]
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


class _Buffers:
    """The script's writes to, and replacements of, buffers of ``module`` before each of its steps. They are seen by the
    buffers' versions, so changes that leave versions alone, such as by ``.data``, are missed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._built = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._by_step: dict[int, dict[str, torch.Tensor]] = {}
        self._nbytes = 0
        self.leave()

    def leave(self) -> None:
        """Count changes from now on as made for the next step."""
        self._left = {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}

    def begin(self, step: int) -> None:
        for later in [number for number in self._by_step if number >= step]:
            self._drop(later)
        changed = {
            name: buffer.detach().clone()
            for name, buffer in self._module.named_buffers()
            if name not in self._left or self._left[name][0] is not buffer or self._left[name][1] != buffer._version
        }
        if changed:
            self._by_step[step] = changed
            self._nbytes += sum(each.nbytes for each in changed.values())
        while self._nbytes > MOST_BYTES:
            self._fold(next(iter(self._by_step)))

    def forget(self, step: int) -> None:
        for each in [number for number in self._by_step if number <= step]:
            self._fold(each)

    def _fold(self, step: int) -> None:
        self._built |= self._drop(step)

    def _drop(self, step: int) -> dict[str, torch.Tensor]:
        dropped = self._by_step.pop(step)
        self._nbytes -= sum(each.nbytes for each in dropped.values())
        return dropped

    def now(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def put_back(self, values: Mapping[str, torch.Tensor]) -> None:
        self._set(values)

    def apply(self, step: int) -> None:
        self._set(self._by_step.get(step, {}))

    def rewind(self, step: int) -> None:
        found = dict(self._built)
        for each in (number for number in self._by_step if number <= step):
            found |= self._by_step[each]
        self._set({name: found[name] for later in self._by_step.values() for name in later if name in found})

    @torch.no_grad()
    def _set(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            owner, _, own = name.rpartition(".")
            buffers = self._module.get_submodule(owner)._buffers
            now = buffers.get(own)
            if now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
                buffers[own] = value.clone()
            else:
                now.copy_(value)  # in place: the script may hold this tensor


class AsStarted:
    """Which parameters of ``module`` are trained, as when the sum of gradients was set up."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._trained = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]

    @property
    def changed(self) -> str | None:
        """The name of a parameter that a script has frozen or thawed since, or None."""
        return next((name for name, parameter, trained in self._trained if parameter.requires_grad != trained), None)

    def check(self, where: str = "in such a job") -> None:
        """Raise RecycleError if a script has frozen or thawed a parameter since; ``where``: words for the message."""
        if self.changed is not None:
            raise RecycleError(
                f"requires_grad of {self.changed} has changed since training was set up, which is not supported "
                f"{where}: freeze and thaw parameters before that, or set the learning rate of their group to 0 by a "
                "scheduler"
            )


def is_plain(name: str, value: Any) -> bool:
    """Return whether ``value``, an attribute ``name``, is a number, a word or the like that scripts change."""
    return (
        (type(value) in PLAIN or isinstance(value, (np.generic, Enum)))
        and name != "training"
        and (type(value) is not tuple or all(is_plain("", each) for each in value))
    )


def _require(trained: list[tuple[torch.nn.Parameter, bool]]) -> None:
    for parameter, wanted in trained:
        if parameter.requires_grad != wanted:
            parameter.requires_grad_(wanted)


def _set(modes: list[tuple[torch.nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training

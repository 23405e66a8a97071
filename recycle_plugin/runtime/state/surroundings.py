"""The state of a training script that a step's numbers depend on, as it was when the step began.

What is left of a step after a loss may be run in the middle of something else: of an evaluation by hand, with the model
in evaluation mode, without gradients, in another precision; or after the script has changed a learning rate, a
temperature, the weight of a loss for the next step.  Such things are seen here where the script keeps them on the
model's layers or in the optimizer's groups, as numbers and words.  What it keeps elsewhere is not: ``settle()`` has to
come before such a change.
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

Place = tuple[int, str]  # which owner, by number, and the name there
ScriptsValues = tuple[dict[Place, Any], dict[str, torch.Tensor]]  # plain ones, and buffers
MOST_BYTES = 1 << 26  # of buffers that a script has changed for its steps
PLAIN = frozenset((int, float, bool, str, tuple, type(None)))
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Surroundings:
    """Remembers modes and plain attributes of ``module`` and of the optimizer's ``groups()``, on devices of
    ``kind``.
    """

    def __init__(self, module: torch.nn.Module, kind: str, groups: Callable[[], list[dict[Any, Any]]] = list) -> None:
        self._module, self._kind, self._groups = module, kind, groups
        self._owners: list[MutableMapping[str, Any]] = []
        self._places: list[Place] = []
        self._left: list[Any] = []  # what was there
        self.remember()

    def remember(self) -> None:
        """Remember autocast, the layers' modes and what is trained, as a step begins."""
        self._autocast = torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)
        self._modes = [(part, part.training) for part in self._module.modules()]
        self.remember_trained()

    def remember_trained(self) -> None:
        """Remember which parameters require a gradient, and how many groups the optimizer has."""
        self._trained = [(parameter, parameter.requires_grad) for parameter in self._module.parameters()]
        self._group_count = len(self._groups())

    @property
    def retrained(self) -> str:
        """What the script has frozen, thawed or added to the optimizer since that was remembered, in words; else
        empty.
        """
        if len(self._groups()) != self._group_count:
            return "groups of the optimizer were added or removed"
        changed = next((one for one, trained in self._trained if one.requires_grad != trained), None)
        if changed is None:
            return ""
        name = next((name for name, one in self._module.named_parameters() if one is changed), "a parameter")
        return f"{name} was {'thawed' if changed.requires_grad else 'frozen'}"

    def leave(self) -> None:
        """Remember numbers and words as they are now, before the script may change them for the next step."""
        # groups come last, where scripts add some: places of layers stay as they are
        owners: list[MutableMapping[str, Any]] = [*map(vars, self._module.modules()), *self._groups()]
        # to look for them takes longer than to look at them
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
        """What the script has changed since :meth:`leave`, as it was then and as it is now."""
        found = {}
        for (number, name), left in zip(self._places, self._left):
            now = self._owners[number].get(name, left)
            # what a forward leaves there, a tensor, has no truth to compare by
            if now is not left and is_plain(name, now) and not (is_plain(name, left) and now == left):
                found[number, name] = left, now
        return found

    def now(self, places: Iterable[Place]) -> dict[Place, Any]:
        """What is at these places."""
        return {(number, name): self._owners[number].get(name) for number, name in places}

    def set(self, values: Mapping[Place, Any]) -> None:
        """Set what a script has set once."""
        for (number, name), value in values.items():
            self._owners[number][name] = value

    def is_layers(self, place: Place) -> bool:
        """Whether it is a layer that has this place, and not the optimizer."""
        return place[0] < sum(1 for _ in self._module.modules())

    @property
    def other_modes(self) -> bool:
        """Whether some layer is in another mode, training or evaluation, than when the step began."""
        return any(part.training != training for part, training in self._modes)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside of this context all is as it was when the step began; afterwards as before."""
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
    steps computes with it: a newcomer's on its way to the present, or that of a worker which may have to replay its
    stage for others.

    Has an entry for each step before which the script has changed something: some 300 bytes for one number, and a copy
    of each buffer, of which the oldest go where there are more than MOST_BYTES.
    """

    def __init__(self, surroundings: Surroundings, module: torch.nn.Module) -> None:
        self._surroundings, self._buffers = surroundings, _Buffers(module)
        self._by_step: dict[int, dict[Place, Any]] = {}
        self._built: dict[Place, Any] = {}  # what the script has changed later, as it was before
        surroundings.leave()

    def begin(self, step: int) -> None:
        """Note what the script has set since :meth:`end`, for ``step``."""
        self._buffers.begin(step)
        for later in [number for number in self._by_step if number >= step]:  # of steps before a checkpoint was loaded
            del self._by_step[later]
        if changed := self._surroundings.changed():
            self._built = {place: left for place, (left, _) in changed.items()} | self._built
            self._by_step[step] = {place: now for place, (_, now) in changed.items()}

    def end(self) -> None:
        """Go on behind a step: what was changed up to now was not the script."""
        self._surroundings.leave()
        self._buffers.leave()

    def apply(self, step: int) -> None:
        """Set what the script has set for ``step`` once more."""
        self._surroundings.set(self._by_step.get(step, {}))
        self._buffers.apply(step)

    def forget(self, step: int) -> None:
        """Forget for which of the steps up to ``step`` something was set: no replay begins before that is over.  Costs
        a look at each later one.
        """
        for each in [number for number in self._by_step if number <= step]:
            self._built |= self._by_step.pop(each)
        self._buffers.forget(step)

    def now(self) -> ScriptsValues:
        """What is there now of all that a replay sets, and all buffers, which a checkpoint has too."""
        places = {place for found in (self._built, *self._by_step.values()) for place in found}
        return self._surroundings.now(places), self._buffers.now()

    def put_back(self, values: ScriptsValues) -> None:
        """Set what :meth:`now` has given."""
        plain, buffers = values
        self._surroundings.set(plain)
        self._buffers.put_back(buffers)

    def rewind(self, step: int) -> None:
        """Have the layers as the script had them in ``step``; the optimizer's groups belong to the state.  Costs time
        in proportion to the steps.
        """
        found = dict(self._built)
        for each in sorted(number for number in self._by_step if number <= step):
            found |= self._by_step[each]
        self._buffers.rewind(step)
        self._surroundings.set({place: value for place, value in found.items() if self._surroundings.is_layers(place)})


def layers_digest(module: torch.nn.Module) -> str:
    """A digest of what the layers inside of ``module`` are and are set to: classes, modes, plain attributes, and how
    many hooks of a forward or a backward; not of their weights.  Equal where they compute the same of equal weights.
    """
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
    """What a script writes to the buffers of ``module``, or puts in their place, before each of its steps.

    Seen by their versions, which does not see what goes past these, as ``.data`` does.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._built = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._by_step: dict[int, dict[str, torch.Tensor]] = {}
        self._nbytes = 0
        self.leave()

    def leave(self) -> None:
        """What is changed from now on is changed for the next step."""
        self._left = {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}

    def begin(self, step: int) -> None:
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
        oldest = self._by_step.pop(step)
        self._built |= oldest
        self._nbytes -= sum(each.nbytes for each in oldest.values())

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
                now.copy_(value)  # the script may hold this very tensor


class AsStarted:
    """Which parameters of a ``module`` are trained: what the sum of gradients was made for."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._trained = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]

    @property
    def changed(self) -> str | None:
        """The name of a parameter that a script has frozen or thawed since, None where there is none."""
        return next((name for name, parameter, trained in self._trained if parameter.requires_grad != trained), None)

    def check(self, where: str = "in such a job") -> None:
        """Raise RecycleError where a script has frozen or thawed a parameter since; ``where`` that can't be."""
        if self.changed is not None:
            raise RecycleError(
                f"requires_grad of {self.changed} has changed since training was set up, and that is not followed "
                f"{where}: freeze and thaw parameters before that, or set the learning rate of their group to 0 by a "
                "scheduler"
            )


def is_plain(name: str, value: Any) -> bool:
    """Whether ``value``, which something has under ``name``, is a number, a word or the like that scripts change."""
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

"""The state that a step changes on a worker, as one object for all frameworks: a list of parts.

Undo (runtime/state/undo) restores the parts as they were before the step. The hash that compares replicas covers all
parts, and a checkpoint has them all. A newcomer is filled from other workers, unit by unit (runtime/state/units.py).

The state *after* a step is the state that the next STEP finds. It includes changes that scripts make in between
(learning rates, clamped weights, a reset moment), which are the same on all workers. While a newcomer is sent the
state, changes are watched: the state is recorded before the script's first touch (runtime/state/touch.py), and compared
at the next step.

Values that are no tensors are *told*: turned into numbers, strings and containers that can be sent and hashed
(runtime/state/contents.py). Tensors are handled by name. Call everything here on the training thread, between two
instructions: during an optimizer's step some tensors are of the old step, others of the new one.

Not part of the state: frozen weights and buffers, which no step changes, and random numbers, which are keyed by the
step (runtime/stage/randomness.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import bytes_of
from recycle_plugin.runtime.devices.kinds import fetch, order_of
from recycle_plugin.runtime.state.contents import (
    MADE,
    PLAIN,
    STAYS,
    Surrounding,
    Telling,
    TensorForm,
    compared,
    form_of,
    own_to_torch,
    refusals,
    since,
    whole,
)
from recycle_plugin.runtime.state.putting import MISSING, Putting
from recycle_plugin.runtime.state.surroundings import is_plain

PIECE = 1 << 20  # bytes copied to the host, or hashed, at once
ROW = 1024  # numbers
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes
WRITTEN = (int, float, complex, str, bytes, type(None), torch.dtype, Enum)


@dataclass(frozen=True)
class StatePart:
    """One part of a worker's state.

    ``tensors()``: its present tensors, to be written in place, named "part/…". ``get()``: a copy of its values, which
    ``torch.load(weights_only=True)`` can read. ``set``: takes over such values, and allocates the tensors that they
    name.

    ``follow``: rewrites the tensors as copies of other parts' tensors. ``own``: the part differs between replicas; undo
    leaves its changes.
    """

    name: str
    tensors: Callable[[], Mapping[str, torch.Tensor]] = dict
    get: Callable[[], Any] | None = None
    set: Callable[[Any], None] | None = None
    follow: Callable[[], None] | None = None
    own: bool = False


class StageState:
    """A worker's state: the optimizer's and all other ``parts``, in the order in which :meth:`put` sets them.
    ``applied()``: the last applied step.
    """

    def __init__(self, applied: Callable[[], int], optimizer: OptimizerState, parts: Iterable[StatePart]) -> None:
        self._applied, self.optimizer = applied, optimizer
        self._watched = -1  # the step since which changes are watched
        self._noted: dict[str, Any] | None = None  # once the script may have begun to change something
        self.parts = {part.name: part for part in (optimizer.part, optimizer.attributes, *parts)}  # in setting order

    @property
    def step(self) -> int:
        return self._applied()

    # --- by value ----------------------------------------------------------------------------------

    def small(self) -> dict[str, Any]:
        """Copy the stage's non-tensor state as {part: value}."""
        return {part.name: part.get() for part in self.parts.values() if part.get is not None and not part.own}

    def put(self, small: Mapping[str, Any]) -> None:
        """Set the given parts' values. Optimizer tensors that they lack are dropped. Raises RecycleError for an unknown
        part.
        """
        foreign = small.keys() - {part.name for part in self.parts.values() if part.set is not None}
        if foreign:
            raise RecycleError(
                f"{min(foreign)} is not among the values in this worker's state: the other worker, or the "
                "checkpoint, is of another job"
            )
        for part in self.parts.values():
            if part.name in small:
                assert part.set is not None, f"{part.name} goes by value"
                part.set(small[part.name])

    # --- tensors -----------------------------------------------------------------------------------

    def tensors(self, following: bool = True) -> dict[str, torch.Tensor]:
        """Return all tensors by name. Without ``following``, copies of other parts' tensors are left out."""
        found: dict[str, torch.Tensor] = {}
        for part in self.parts.values():
            if following or part.follow is None:
                found.update(part.tensors())
        return found

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write each tensor in place, after :meth:`put`. Raises RecycleError for an unknown name or another shape."""
        present = self.tensors()
        for name, value in tensors.items():
            if name not in present or present[name].shape != value.shape:
                raise RecycleError(
                    f"{name} is no tensor of this worker's state: the other worker, or the checkpoint, is of another "
                    "model, or has other layers"
                )
            present[name].copy_(value)

    def rewritten(self) -> None:
        """Rewrite the tensors that are copies, after others were written outside of a step."""
        for part in self.parts.values():
            if part.follow is not None:
                part.follow()

    def check(self) -> None:
        """Raise RecycleError if a value cannot be told, and so not be sent to a newcomer."""
        for name, told in (self.small() | {"attributes": self.optimizer.told()}).items():
            if (refused := next(refusals(told), None)) is not None:
                of = type(self.optimizer.optimizer).__name__ if name in ("optimizer", "attributes") else name
                raise RecycleError(
                    f"{of}: {refused}; a worker that comes back could not get it: keep numbers, strings and tensors "
                    "there, in lists, dicts, or objects of classes that are written in Python"
                )

    # --- what a script changes between two steps ---------------------------------------------------

    def watch(self) -> None:
        """Watch the script's changes from now on, until the next step."""
        self._watched, self._noted = self.step, None

    @property
    def watches(self) -> bool:
        """Whether :meth:`touched` must be called at the script's next touch."""
        return self._watched == self.step and self._noted is None

    def touched(self) -> None:
        """Record the state before the script touches it."""
        if self.watches:
            self._noted = self._marks()

    def changed(self) -> set[str] | None:
        """Return the names of the tensors, and of the parameters' values in the optimizer, that the script has changed
        since :meth:`watch`. None if :meth:`watch` was not called since the last step.
        """
        if self._watched != self.step:
            return None
        before, now = self._noted, {} if self._noted is None else self._marks()
        return (
            set()
            if before is None
            else {name for name, mark in (before | now).items() if before.get(name) != now.get(name)}
        )

    def _marks(self) -> dict[str, Any]:
        """Return, for each tensor and each parameter's values, a mark that differs if they do."""
        tensors = self.tensors()
        values = {f"optimizer/{name}": as_text(value) for name, value in self.optimizer.values({}).items()}
        return values | {name: (form_of(tensors[name]), mark) for name, mark in marks(tensors).items()}

    # --- to be compared ----------------------------------------------------------------------------

    def digest(self) -> str:
        """Return the SHA-256 of the state: equal on workers with the same bits after the same step.

        Reads everything once. A CPU core hashes about 1 GB/s (0.8 measured); a parameter with Adam has 12 bytes in
        fp32. Tensors of an accelerator are copied to the host piece by piece.
        """
        return self.digesting()()

    def digesting(self) -> Callable[[], str]:
        """Return a function that computes :meth:`digest` of the present state, on any thread, before any tensor
        changes.
        """
        tensors = self.tensors()
        layout = {name: written(form_of(tensor)) for name, tensor in tensors.items()}
        small = self.small() | self.optimizer.compared()
        found, order = hashlib.sha256(as_text([self.step, small, layout]).encode()), order_of(tensors.values())

        def compute() -> str:
            order.join()
            for name in sorted(tensors):
                for piece in pieces(tensors[name]):
                    found.update(raw(piece))
            return found.hexdigest()

        return compute


class OptimizerState:
    """An optimizer's state in two parts: its ``state`` and groups, and its other attributes, including those of wrapped
    optimizers (runtime/state/contents.py).

    ``called``: names of the model's parameters, or of their masters. Other parameters are named by their place in the
    groups, and belong to the state. ``others()``: further tensors, which do not belong to the state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        called: Mapping[Any, str],
        others: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self.optimizer, self._called, self._others = optimizer, called, others
        self.part = StatePart("optimizer", self._tensors, self._get, self._set)
        self.attributes = StatePart("attributes", self._held, self._get_attributes, self._set_attributes)
        self._made = self.told()

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """{parameter: the optimizer's state for it}; empty for a pure wrapper."""
        return getattr(self.optimizer, "state", {})

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's parameters by name, in group order."""
        return {
            self._called.get(parameter) or f"{number}.{place}": parameter
            for number, group in enumerate(self.optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }

    def beside(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's trained parameters that are not the model's, by name."""
        others = ((name, one) for name, one in self.parameters().items() if one not in self._called)
        return {name: one for name, one in others if one.requires_grad or not isinstance(one, torch.nn.Parameter)}

    def rates(self) -> Iterator[torch.Tensor]:
        """Yield the tensors among the groups' hyper-parameters, such as learning rates."""
        return (one for group in self.optimizer.param_groups for one in group.values() if torch.is_tensor(one))

    def kept(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the tensors of the optimizer's state, by (parameter's name, tensor's name)."""
        return {
            (name, kind): value
            for name, state in self._states()
            for kind, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self.state
        return ((name, state[parameter]) for name, parameter in self.parameters().items() if parameter in state)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {f"optimizer/{name}": parameter for name, parameter in self.beside().items()}
        telling = Telling(Surrounding(self._called), found)
        for name, state in self._states():
            for kind, value in state.items():  # as in values(), without telling more than needed
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{name}/{kind}"] = value
                elif type(value) not in PLAIN:
                    telling.of(value, f"optimizer/{name}/{kind}")
        return found

    def values(
        self, tensors: dict[str, torch.Tensor], of: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Tell the state of each parameter, or of each in ``of``, by name. Adds the state's tensors to ``tensors``."""
        telling, state = Telling(Surrounding(self._called), tensors), self.state
        return {
            name: {kind: telling.kept(value, f"optimizer/{name}/{kind}") for kind, value in state[parameter].items()}
            for name, parameter in (self.parameters() if of is None else of).items()
            if parameter in state
        }

    def shared(self) -> dict[str, Any]:
        """Tell the state that belongs to no single parameter: the groups' hyper-parameters, and other keys of state."""
        telling = Telling(Surrounding(self._called))
        groups = [
            {name: telling.of(value, f"group {number}/{name}") for name, value in group.items() if name != "params"}
            for number, group in enumerate(self.optimizer.param_groups)
        ]
        return {"groups": groups, "of_no_parameter": telling.of(self._of_no_parameter(), "state")}

    def settings(self) -> list[dict[str, Any]]:
        """Tell the hyper-parameters that are numbers or strings, group by group, in JSON's types. One-number tensors in
        host memory count too; reading one from an accelerator would stall it.
        """
        telling = Telling()
        return [
            {
                name: telling.of(value.detach().numpy() if _is_number(value) else value, name)
                for name, value in group.items()
                if is_plain(name, value) or _is_number(value)
            }
            for group in self.optimizer.param_groups
        ]

    def compared(self) -> dict[str, Any]:
        """Tell by part the attributes to be compared, without values that may differ between equal workers."""
        return {"attributes": compared(self._get_attributes())}

    def take_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyper-parameters told by another worker's :meth:`settings`. Raises RecycleError if the number of
        groups differs.
        """
        if len(settings) != len(self.optimizer.param_groups):
            raise RecycleError(
                f"the optimizer has {len(self.optimizer.param_groups)} groups here, and {len(settings)} at the worker "
                "that sends its state, whose script has added groups: the next process of this seat gets them"
            )
        for group, given in zip(self.optimizer.param_groups, settings, strict=True):
            for name, told in given.items():
                present = group.get(name, MISSING)
                value = Putting().back(told, present)
                # a one-number tensor: into the present one, which the script may hold
                group[name] = (
                    Putting().back(torch.from_numpy(value), present) if isinstance(value, np.ndarray) else value
                )

    def set_values(self, parameter: torch.Tensor, values: Mapping[str, Any] | None) -> None:
        """Set the state of ``parameter`` to the told ``values``, and drop everything else; None drops all of it."""
        state = self.state
        if values is None:
            state.pop(parameter, None)
            return
        if parameter not in state:
            state[parameter] = {}
        named = {name: one for one, name in self._called.items()}
        Putting(parameter, named).into(state[parameter], values.items())

    def set_shared(self, shared: Mapping[str, Any]) -> None:
        """Set the values told by :meth:`shared`. Raises RecycleError if the number of groups differs."""
        if len(shared["groups"]) != (here := len(self.optimizer.param_groups)):
            raise RecycleError(
                f"the optimizer has {here} parameter group{'s' * (here > 1)} here, and {len(shared['groups'])} in the "
                "checkpoint, or at the other worker: give the same"
            )
        putting, kept = Putting(self._like), self._of_no_parameter()
        for key in kept:
            del self.state[key]
        self.state.update(putting.back(shared["of_no_parameter"], kept))
        for group, told in zip(self.optimizer.param_groups, shared["groups"], strict=True):
            putting.into(group, [("params", STAYS), *told.items()])

    def _get(self) -> dict[str, Any]:
        return {"state": self.values({}), **self.shared()}

    def _of_no_parameter(self) -> dict[Any, Any]:
        """Return the state under keys that are no parameters, which some of torch's optimizers have."""
        return {key: value for key, value in self.state.items() if not isinstance(key, torch.Tensor)}

    def _set(self, value: Mapping[str, Any]) -> None:
        """Set the told values, and drop state that they lack."""
        for name, parameter in self.parameters().items():
            self.set_values(parameter, value["state"].get(name))
        self.set_shared(value)

    @property
    def _like(self) -> torch.Tensor | None:
        return next(iter(self.parameters().values()), None)

    # --- what else it holds ------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """Tell the optimizer's other attributes."""
        return self._tell({})

    def _tell(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        around = Surrounding(self._called, self._elsewhere, self._told)
        return Telling(around, tensors).attributes(self.optimizer, "attributes", ("state", "param_groups"))

    def _elsewhere(self) -> dict[str, torch.Tensor]:
        kept = {f"optimizer/{name}/{kind}": one for (name, kind), one in self.kept().items()}
        others = {f"another {number}": one for number, one in enumerate((*self.rates(), *self._others()))}
        return self.parameters() | kept | others

    def _told(self) -> Iterator[object]:
        """Yield the objects of state and groups, which :meth:`_get` tells."""
        state = self.state
        yield from (state, *state.values())
        yield self.optimizer.param_groups
        for group in self.optimizer.param_groups:
            yield from (group, group["params"])

    def _held(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        self._tell(found)
        return found

    def _get_attributes(self) -> Any:
        """Tell the attributes that have changed since this object was made; None if none has, as in most optimizers."""
        told = since(self._made, self.told())
        return None if told == MADE else told

    def _set_attributes(self, told: Any) -> None:
        full = whole(self._made, MADE if told is None else told)
        named = {name: one for one, name in self._called.items()} | self._elsewhere()
        Putting(self._like, named).attributes(full, self.optimizer, own_to_torch)


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a one-number tensor in host memory, such as a learning rate."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu and value.dtype != torch.bfloat16


def of_parameters(
    name: str, parameters: Mapping[str, torch.nn.Parameter], follow: Callable[[], None] | None = None
) -> StatePart:
    """Make a part that has these parameters as its tensors, and no values."""
    named = {f"{name}/{called}": parameter for called, parameter in parameters.items()}
    return StatePart(name, lambda: named, follow=follow)


def add_parameters(part: StatePart, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Add parameters to ``part``, which :func:`of_parameters` has made."""
    named = part.tensors()
    assert isinstance(named, dict), "it is of parameters"
    named.update((f"{part.name}/{called}", parameter) for called, parameter in parameters.items())


# --- a tensor's bytes -----------------------------------------------------------------------------------


def pieces(tensor: torch.Tensor, nbytes: int = PIECE) -> tuple[torch.Tensor, ...]:
    """Split the flattened tensor, a view if contiguous, into parts of up to ``nbytes`` bytes; none if it is empty."""
    flat = tensor.detach().reshape(-1)
    return flat.split(max(1, nbytes // flat.element_size())) if flat.numel() else ()


def marks(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return for each tensor a number that differs if its bytes do, computed on its device. Reads everything once."""
    found = {
        name: _mark(bytes_of(tensor.detach()).view(INTEGERS[tensor.element_size()])) for name, tensor in tensors.items()
    }
    by_device: dict[torch.device, list[str]] = {}
    for name, mark in found.items():
        by_device.setdefault(mark.device, []).append(name)
    return {
        name: number
        for names in by_device.values()
        for name, number in zip(
            names, fetch(torch.stack([found[name] for name in names]), "marks of the state").tolist()
        )
    }


def _mark(numbers: torch.Tensor) -> torch.Tensor:
    """Return a weighted sum of ``numbers`` [n], with a factor for each row and column of a table ROW wide."""
    whole = len(numbers) // ROW * ROW
    table, rest = numbers[:whole].view(-1, ROW), numbers[whole:]
    sums = table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest.long()
    factors = (torch.arange(1, len(each) + 1, device=each.device) * (2 * place + 3) for place, each in enumerate(sums))
    return torch.stack([(each * factor).sum() for each, factor in zip(sums, factors)]).sum()


def fingerprint(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes, in hex, to compare its copies
    (core/coordinator/facts/replica_check.py).
    """
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(raw(tensor))
    return found.hexdigest()


def raw(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes, in element order, as a numpy array of uint8: a view of contiguous host memory."""
    return fetch(bytes_of(tensor.detach()), "the bytes of a tensor").numpy()


def written(form: TensorForm) -> str:
    """Return the form as text for errors and hashes, such as "float32[2, 3]"."""
    return f"{str(form.dtype).removeprefix('torch.')}{list(form.shape)}"


def as_text(value: Any) -> str:
    """Return equal texts for equal values, in any order of dict items. Values of other classes count by class only."""
    if isinstance(value, WRITTEN):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{as_text(key)}:{as_text(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(as_text, value)) + "]"
    if isinstance(value, torch.Tensor):
        return written(form_of(value)) + hashlib.sha256(raw(value)).hexdigest()
    return type(value).__qualname__

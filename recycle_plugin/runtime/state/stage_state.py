"""All that a step changes on a worker, as one object, whatever framework the pieces belong to.

What belongs to it is stated once, as a list of parts.  Taking a step back (runtime/undo) is putting them back as they
were before the step, the hash by which replicas are compared is over all of them, a checkpoint has to have each, and a
worker that lacks a stage's state is filled from other ones', unit by unit (runtime/state/units.py).

Small parts go by value, tensors by name.  All of this is to be called where the training is: between two instructions,
and not in another thread, since an optimizer at work leaves tensors of two steps.

Not part of it: what no step changes (frozen weights, buffers), and random numbers, which are keyed by the step
(runtime/stage/randomness.py).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import HOST, on_host
from recycle_plugin.runtime.devices.kinds import fetch, order_of
from recycle_plugin.runtime.state.surroundings import is_plain

PIECE = 1 << 20  # bytes that are copied to the host, or hashed, at once
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, Enum)


class Elsewhere(Enum):
    """Stands in a small part in the place of a tensor, which is among the part's tensors."""

    TENSOR = "a tensor"


ELSEWHERE = Elsewhere.TENSOR


class TensorForm(NamedTuple):
    """A tensor's dtype and shape.  ``on_host``: in host memory, where its parameter may be on an accelerator."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    @property
    def nbytes(self) -> int:
        """Bytes of such a tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StatePart:
    """One part of what a step changes.

    ``tensors()`` are those of the part as they are now, to be written in place, by names that begin with the part's and
    a slash; ``make(name, form)`` makes room for one that is missing.  ``get()`` is a copy of what goes by value, which
    can be pickled; ``set`` takes one over.

    ``follow`` makes the tensors anew from those of other parts, of which they are a copy.  ``own``: belongs to the
    worker and not to its stage, so that replicas differ in it; and what a step has changed of it stays changed where
    the step is taken back.
    """

    name: str
    tensors: Callable[[], Mapping[str, torch.Tensor]] = dict
    get: Callable[[], Any] | None = None
    set: Callable[[Any], None] | None = None
    make: Callable[[str, TensorForm], None] | None = None
    follow: Callable[[], None] | None = None
    own: bool = False


class StageState:
    """All that a step changes on a worker: the optimizer's state, and all other ``parts``, in the order of setting
    them.

    ``applied()`` is the last step that is applied.
    """

    def __init__(self, applied: Callable[[], int], optimizer: OptimizerState, parts: Iterable[StatePart]) -> None:
        self._applied, self.optimizer = applied, optimizer
        self._parts = {part.name: part for part in (optimizer.part, *parts)}

    @property
    def step(self) -> int:
        """The last step that is applied."""
        return self._applied()

    @property
    def parts(self) -> Mapping[str, StatePart]:
        """All parts by name, in the order of setting them."""
        return self._parts

    # --- by value ----------------------------------------------------------------------------------

    def small(self, own: bool = False) -> dict[str, Any]:
        """Copies of what goes by value, by part; ``own``: of what is the worker's instead of what is the stage's."""
        return {part.name: part.get() for part in self._parts.values() if part.get is not None and part.own is own}

    def put(self, small: Mapping[str, Any]) -> None:
        """Set these parts, each to what is handed over here; tensors of the optimizer that were not there then are
        dropped.

        Raises RecycleError for a part that this worker does not have.
        """
        foreign = small.keys() - {part.name for part in self._parts.values() if part.set is not None}
        if foreign:
            raise RecycleError(
                f"{min(foreign)} is no part of this worker's state that goes by value: the other worker, or the "
                "checkpoint, is of another job"
            )
        for part in self._parts.values():
            if part.name in small:
                assert part.set is not None, f"{part.name} goes by value"
                part.set(small[part.name])

    # --- tensors -----------------------------------------------------------------------------------

    def tensors(self, following: bool = True) -> dict[str, torch.Tensor]:
        """All tensors by name; not ``following``: without those that are copies of others."""
        found: dict[str, torch.Tensor] = {}
        for part in self._parts.values():
            if following or part.follow is None:
                found.update(part.tensors())
        return found

    def make(self, name: str, form: TensorForm) -> None:
        """Make room for a tensor that is not there yet.  Raises RecycleError where it does not belong here."""
        part = self._parts.get(name.partition("/")[0])
        if part is None or part.make is None:
            raise RecycleError(
                f"{name} is no tensor of this worker's state: the other worker, or the checkpoint, is of another "
                "model, or has other layers"
            )
        part.make(name, form)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write each tensor in place; those that are not there yet are made."""
        for name, value in tensors.items():
            if name not in self.tensors():
                self.make(name, form_of(value))
            self.tensors()[name].copy_(value)

    def rewritten(self) -> None:
        """Let copies follow, since tensors were written otherwise than by a step."""
        for part in self._parts.values():
            if part.follow is not None:
                part.follow()

    # --- to be compared ----------------------------------------------------------------------------

    def digest(self) -> str:
        """SHA-256 of all of it: the same on workers that hold the same bits after the same step.

        Reads everything once: a CPU core hashes about 1 GB/s (0.8 measured), and a parameter with Adam has 12 bytes in
        fp32; tensors of an accelerator are copied to the host piece by piece.
        """
        return self.digesting()()

    def digesting(self) -> Callable[[], str]:
        """What computes :meth:`digest` of the present state, in any thread, as long as no tensor changes."""
        tensors = self.tensors()
        layout = {name: written(form_of(tensor)) for name, tensor in tensors.items()}
        small = self.small() | {"optimizer": self.optimizer.compared()}
        found, order = hashlib.sha256(as_text([self.step, small, layout]).encode()), order_of(tensors.values())

        def compute() -> str:
            order.join()
            for name in sorted(tensors):
                for piece in pieces(tensors[name]):
                    found.update(raw(piece))
            return found.hexdigest()

        return compute


class OptimizerState:
    """An optimizer's state as a part: what it keeps for each parameter, and its groups.

    ``called``: the names of the model's parameters, or of their masters.  Parameters that are not among them are called
    by their place in the groups, and belong to the state.  ``scripted``: a script may have set already what its next
    step is applied with, so that this is not compared.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, called: Mapping[Any, str], scripted: bool = False) -> None:
        self.optimizer, self._called, self._scripted = optimizer, called, scripted
        self.part = StatePart("optimizer", self._tensors, self._get, self._set, self._make)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by name, in the order of the groups."""
        return {
            self._called.get(parameter) or f"{number}.{place}": parameter
            for number, group in enumerate(self.optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }

    def beside(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters that are not the model's, by name, without frozen ones, which no step changes."""
        others = ((name, one) for name, one in self.parameters().items() if one not in self._called)
        return {name: one for name, one in others if one.requires_grad or not isinstance(one, torch.nn.Parameter)}

    def kept(self) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors of the optimizer's state, by the names of the parameter and of the tensor."""
        return {
            (name, kind): value
            for name, state in self._states()
            for kind, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self.optimizer.state
        return ((name, state[parameter]) for name, parameter in self.parameters().items() if parameter in state)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {f"optimizer/{name}": parameter for name, parameter in self.beside().items()}
        found.update(
            {
                f"optimizer/{name}/{kind}": value
                for name, state in self._states()
                for kind, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        )
        return found

    def values(self) -> dict[str, dict[str, Any]]:
        """Copies of what goes by value of each parameter's state, by name, with ``ELSEWHERE`` for tensors."""
        return {name: by_value(state) for name, state in self._states()}

    def of(self, parameter: torch.Tensor) -> Mapping[str, Any] | None:
        """What it keeps for ``parameter``, to be read; None where it has nothing for it."""
        return self.optimizer.state.get(parameter)

    def shared(self) -> dict[str, Any]:
        """Copies of what belongs to no single parameter: the groups' hyper-parameters, and what it keeps under other
        keys.
        """
        groups = [
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in self.optimizer.param_groups
        ]
        return {"groups": groups, "of_no_parameter": copy.deepcopy(self._of_no_parameter())}

    def settings(self) -> list[dict[str, Any]]:
        """The numbers and words among the groups' hyper-parameters, group by group."""
        return [
            {name: value for name, value in group.items() if is_plain(name, value)}
            for group in self.optimizer.param_groups
        ]

    def compared(self) -> dict[str, Any]:
        """Copies of what goes by value and is the same on workers that hold the same state."""
        value = self._get()
        for group in value["groups"] if self._scripted else ():
            for name in [name for name, setting in group.items() if is_plain(name, setting)]:
                del group[name]
        return value

    def take_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Set what :meth:`settings` has given."""
        for group, given in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(given)

    def set_values(self, parameter: torch.Tensor, values: Mapping[str, Any] | None) -> None:
        """Take what goes by value of the state of ``parameter``; what is not there goes, with None all."""
        if values is None:
            self.optimizer.state.pop(parameter, None)
        else:
            _restore(self.optimizer.state[parameter], values)

    def set_shared(self, shared: Mapping[str, Any]) -> None:
        """Take what :meth:`shared` has given."""
        for key in self._of_no_parameter():
            del self.optimizer.state[key]
        self.optimizer.state.update(shared["of_no_parameter"])
        for group, saved in zip(self.optimizer.param_groups, shared["groups"], strict=True):
            _restore(group, {**saved, "params": ELSEWHERE})

    def _get(self) -> dict[str, Any]:
        return {"state": self.values(), **self.shared()}

    def _of_no_parameter(self) -> dict[Any, Any]:
        """What it keeps under other keys, as torch's optimizers may."""
        return {key: value for key, value in self.optimizer.state.items() if not isinstance(key, torch.Tensor)}

    def _set(self, value: Mapping[str, Any]) -> None:
        """What was not there goes."""
        for name, parameter in self.parameters().items():
            self.set_values(parameter, value["state"].get(name))
        self.set_shared(value)

    def _make(self, name: str, form: TensorForm) -> None:
        called, _, kind = name.removeprefix("optimizer/").rpartition("/")
        parameter = self.parameters().get(called)
        if parameter is None:
            raise RecycleError(
                f"{name}: the optimizer has no parameter {called or name} here; the other worker, or the checkpoint, "
                "is of another model"
            )
        self.make_of(parameter, kind, form)

    def make_of(self, parameter: torch.Tensor, kind: str, form: TensorForm) -> torch.Tensor:
        """Make room for a tensor of what it keeps for ``parameter``, and return that."""
        like = parameter if parameter.shape == form.shape else torch.empty(form.shape, device=parameter.device)
        made = torch.empty_like(like, dtype=form.dtype, device=HOST if form.on_host else None, requires_grad=False)
        self.optimizer.state[parameter][kind] = made
        return made


def by_value(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what an optimizer keeps for a parameter, with ``ELSEWHERE`` for tensors."""
    return {
        kind: ELSEWHERE if isinstance(value, torch.Tensor) else copy.deepcopy(value) for kind, value in state.items()
    }


def of_parameters(
    name: str, parameters: Mapping[str, torch.nn.Parameter], follow: Callable[[], None] | None = None
) -> StatePart:
    """A part that has these parameters as its tensors, and nothing that goes by value."""
    named = {f"{name}/{called}": parameter for called, parameter in parameters.items()}
    return StatePart(name, lambda: named, follow=follow)


# --- a tensor's bytes -----------------------------------------------------------------------------------


def pieces(tensor: torch.Tensor, nbytes: int = PIECE) -> tuple[torch.Tensor, ...]:
    """The flat tensor's parts of up to ``nbytes`` bytes each, in the order of its elements; none of an empty one.

    They share its memory where it lies so.
    """
    flat = tensor.detach().reshape(-1)
    return flat.split(max(1, nbytes // flat.element_size())) if flat.numel() else ()


def raw(tensor: torch.Tensor) -> Any:
    """A tensor's bytes, in the order of its elements, as a numpy array of uint8.

    Of a tensor that lies so in host memory, no copy.
    """
    return fetch(tensor.detach().reshape(-1), "the bytes of a tensor").view(torch.uint8).numpy()


def form_of(tensor: torch.Tensor) -> TensorForm:
    """The form of a tensor."""
    return TensorForm(tensor.dtype, tuple(tensor.shape), on_host(tensor))


def written(form: TensorForm) -> str:
    """The form as a text, for errors and hashes: "float32[2, 3]"."""
    return f"{str(form.dtype).removeprefix('torch.')}{list(form.shape)}"


def as_text(value: Any) -> str:
    """A text that is the same for equal values, in whatever order dictionaries were filled.

    Of what is not written alike in all processes counts the class alone.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{as_text(key)}:{as_text(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(as_text, value)) + "]"
    if isinstance(value, torch.Tensor):
        return written(form_of(value)) + hashlib.sha256(raw(value)).hexdigest()
    return type(value).__qualname__


def _restore(present: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name in present.keys() - saved.keys():
        del present[name]
    for name, value in saved.items():
        if torch.is_tensor(value) and torch.is_tensor(present.get(name)):
            present[name].copy_(value)  # others hold this very tensor: a scheduler, a captured graph
        elif value is not ELSEWHERE:
            present[name] = value

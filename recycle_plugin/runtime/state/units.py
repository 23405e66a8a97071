"""A stage's state in units, each of which can be sent to another worker and stepped there by itself
(core/vocabulary/state_stream.py).

A unit is a parameter with its master and all that the optimizer keeps for it. Optimizers in ``BY_ITSELF`` are known to
step each parameter by itself; for others, all that they step is one unit. State of no parameter makes units too. Steps
send no sums for these, so they are read again after each step.

Values are packed, and read without looking up classes (runtime/state/packing.py), so another process's words create no
object of a script's class. Only :meth:`StageUnits.fill` and :meth:`StageUnits.write` change the state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import device_of, put
from recycle_plugin.runtime.devices.kinds import write as write_to
from recycle_plugin.runtime.devices.port import COPY_S, Copy
from recycle_plugin.runtime.state.contents import form_of
from recycle_plugin.runtime.state.packing import packed, unpacked
from recycle_plugin.runtime.state.stage_state import (
    StageState,
    as_text,
    pieces,
    written,
)

SLICE_S = 0.0004  # after this a call of read() begins no further piece
BY_ITSELF = frozenset(
    f"torch.optim.{name.lower()}.{name}"
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
) | {"deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"}
BY_GROUP = frozenset({"deepspeed.ops.adam.fused_adam.FusedAdam"})  # the last parameter's count is the group's


class StepSums(Protocol):
    """The part of runtime/stage/gradients.py that units need."""

    def applied(self, step: int, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradient that ``step`` applies to each parameter."""

    def gathered(self, step: int, sums: Mapping[torch.Tensor, torch.Tensor]) -> dict[Datum, Any]:
        """Return the results of REDUCE and TIE, by datum, for a worker that knows only these sums."""


class UnitValue(NamedTuple):
    """A copy of a unit in host memory: contiguous ``tensors`` by their names in the stage's state, and packed values.

    ``on_host``: tensors that are in host memory wherever the parameter is. ``release()``: call it when nobody reads the
    tensors any more.
    """

    tensors: Mapping[str, torch.Tensor]
    plain: bytes
    on_host: frozenset[str]
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Content:
    """What a unit contains: all of the parameters ``called``, or all of the named ``part`` that is of no parameter;
    with ``shared`` also what the optimizer has for all parameters together.
    """

    called: tuple[str, ...] = ()
    part: str = ""
    shared: bool = False


@dataclass
class _Reading:
    """A unit that is being copied; ``left``: (target, piece) pairs to come."""

    of: object  # the state that is read: step, tensors and versions
    value: UnitValue
    left: Iterator[tuple[torch.Tensor, torch.Tensor]]
    target: torch.Tensor | None = None
    coming: Copy | None = None


class _Spare:
    """Reused host buffers: copying to memory that the process already has is several times faster. For two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}  # flat bytes, by size

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        with self._lock:
            free = self._free.get(size)
            found = free.pop() if free else None
        return (torch.empty(size, dtype=torch.uint8) if found is None else found).view(dtype).view(shape)

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        with self._lock:
            for tensor in tensors:
                flat = tensor.view(-1).view(torch.uint8)
                self._free.setdefault(flat.nbytes, []).append(flat)


@dataclass
class StageUnits:
    """The units of ``state``, read for one newcomer, or written there. ``parameters``: those whose gradients are or
    were summed, by name; ``gradients``: has the sums. ``spent(seconds)`` gets the time that copying has taken.
    """

    state: StageState
    parameters: Mapping[str, torch.Tensor]
    gradients: StepSums
    spent: Callable[[float], None] = lambda seconds: None
    _contents: dict[str, _Content] = field(default_factory=dict)
    _stepped: dict[str, torch.Tensor] = field(default_factory=dict)  # the optimizer's parameters by name
    _readings: dict[str, _Reading] = field(default_factory=dict)
    _spare: _Spare = field(default_factory=lambda: _Spare())

    def train(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """From now on have units of exactly these ``parameters``."""
        self.parameters = parameters
        self._contents.clear()

    # --- at the source -----------------------------------------------------------------------------

    def head(self) -> tuple[bytes, dict[str, int]]:
        """Return the packed values and layout, and the bytes of each unit. If something cannot be packed, training goes
        on here, and the newcomer's :meth:`fill` raises the reason.
        """
        self._look_up()
        weights = {name: sum(each.nbytes for each in self._tensors(one).values()) for name, one in self._all().items()}
        try:
            self.state.check()
            return packed({name: _checked(name, value) for name, value in self._told().items()}), weights
        except RecycleError as error:
            return packed(str(error)), weights

    def read(self, name: str, rest: bool) -> UnitValue | None:
        """Copy part of a unit, or all the ``rest`` of it; returns the copy once it is complete, else None."""
        began = time.perf_counter()
        try:
            return self._read(name, began + (COPY_S if rest else SLICE_S), rest)
        finally:
            self.spent(time.perf_counter() - began)

    def sums(self, step: int, names: Iterable[str]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the gradients that ``step`` applies to each unit, as left by REDUCE, without copies."""
        found = {}
        for name in names:
            trained = self._trained(self._all()[name])
            if trained:
                applied = self.gradients.applied(step, trained)
                found[name] = tuple(torch.empty(0) if each is None else each for each in applied)
        return found

    def changed(self, names: Iterable[str]) -> list[str]:
        changed = self.state.changed()
        return [name for name in names if self._has(self._all()[name], changed)] if changed else []

    def _has(self, content: _Content, changed: AbstractSet[str]) -> bool:
        """Return whether one of the names ``changed`` belongs to this unit, also if its tensor no longer exists."""
        states = tuple(f"optimizer/{called}/" for called in content.called)
        of = {*self._tensors(content), *(state[:-1] for state in states)}
        return any(each in of or each.startswith(states) for each in changed)

    def settings(self) -> list[dict[str, Any]]:
        return self.state.optimizer.settings()

    def _told(self) -> dict[str, Any]:
        """Return the contents of a head, by their names in errors."""
        small, shared = self.state.small(), self.state.optimizer.shared()
        return {
            **{f"part {name}": value for name, value in small.items() if name != "optimizer"},
            **{f"optimizer {name}": value for name, value in shared.items()},
            "layout": self._layout(),
        }

    def _read(self, name: str, until: float, rest: bool) -> UnitValue | None:
        reading = self._reading(name)
        while True:
            if reading.coming is None:
                pair = next(reading.left, None)
                if pair is None:
                    return self._readings.pop(name).value
                reading.target, piece = pair
                reading.coming = device_of(piece.device).to_host((piece,), f"unit {name}", shared=True)
            if not (rest or reading.coming.poll()):
                return None
            assert reading.target is not None, "a piece that comes goes somewhere"
            reading.target.copy_(reading.coming.wait(COPY_S)[0])
            reading.coming = None
            if not rest and time.perf_counter() >= until:
                return None

    def _reading(self, name: str) -> _Reading:
        """Return the reading under way, or a new one if the state has changed since."""
        content = self._all()[name]
        sources = self._tensors(content)
        of = self.state.step, [(each, id(tensor), tensor._version) for each, tensor in sources.items()]
        if name not in self._readings or self._readings[name].of != of:
            copies = {each: self._spare.take(source.shape, source.dtype) for each, source in sources.items()}
            pairs = (
                pair
                for each, source in sources.items()
                for pair in zip(pieces(copies[each]), pieces(source), strict=True)
            )
            hosted = frozenset(each for each, source in sources.items() if on_host(source))
            release = partial(self._spare.give, list(copies.values()))
            self._readings[name] = _Reading(of, UnitValue(copies, self._plain(content), hosted, release), pairs)
        return self._readings[name]

    def _plain(self, content: _Content) -> bytes:
        """Return a unit's packed values; b"" if there are none, as mostly with torch's optimizers."""
        optimizer = self.state.optimizer
        tensors: dict[str, torch.Tensor] = {}
        values = {
            name: {kind: each for kind, each in told.items() if f"optimizer/{name}/{kind}" not in tensors}
            for name, told in optimizer.values(tensors, self._stepped_of(content)).items()
        }
        values = {name: told for name, told in values.items() if told or not optimizer.state[self._stepped[name]]}
        attributes = self.state.parts["attributes"].get
        assert attributes is not None, "they go by value"
        shared = [optimizer.shared(), attributes()] if content.shared else None
        return packed([values, shared]) if values or shared is not None else b""

    # --- at the newcomer ---------------------------------------------------------------------------

    def fill(self, head: bytes) -> None:
        """Take the values in another worker's head. Raises RecycleError, and changes nothing, if that worker's state is
        not of this stage, or could not be packed.
        """
        told = unpacked(head)
        if isinstance(told, str):
            raise RecycleError(f"the state of the stage can't be handed over: {told}")
        self._look_up()
        self._check(told)
        shared = {name.removeprefix("optimizer "): told[name] for name in told if name.startswith("optimizer ")}
        self.state.put({name.removeprefix("part "): told[name] for name in told if name.startswith("part ")})
        self.state.optimizer.set_shared(shared)

    def take_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Have the optimizer apply steps with another worker's settings."""
        self.state.optimizer.take_settings(settings)

    @torch.no_grad()
    def write(self, name: str, value: UnitValue) -> None:
        """Write a unit in place, and create missing tensors; what the other worker lacks is dropped. Raises
        RecycleError if the unit has something that does not belong here.
        """
        content, optimizer = self._all()[name], self.state.optimizer
        values, shared = unpacked(value.plain) if value.plain else ({}, None)
        kinds: dict[str, dict[str, Any] | None] = {called: values.get(called) for called in content.called}
        for each, tensor in value.tensors.items():
            called, _, kind = each.removeprefix("optimizer/").rpartition("/")
            if each.startswith("optimizer/") and called in kinds:
                form = ("tensor", tensor.dtype, tensor.shape, each in value.on_host)
                kinds[called] = {**(kinds[called] or {}), kind: form}
        for called, parameter in self._stepped_of(content).items():
            optimizer.set_values(parameter, kinds[called])
        if shared is not None:
            optimizer.set_shared(shared[0])
            self.state.put({"attributes": shared[1]})
        present = self._tensors(content)
        for each, tensor in value.tensors.items():
            target = present.get(each)
            if target is None or (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
                raise RecycleError(
                    f"unit {name} of the other worker's state has {each} as {written(form_of(tensor))}, and here "
                    f"{'there is none' if target is None else 'it is ' + written(form_of(target))}: it is of another "
                    "model"
                )
            write_to(target, tensor, f"unit {name}")

    def gathered(self, step: int, sums: Mapping[str, tuple[torch.Tensor, ...]]) -> dict[Datum, Any]:
        """Return the results that REDUCE and TIE of ``step`` would have, with ``sums`` for these units and none for
        others.
        """
        found = {}
        for name, values in sums.items():
            for parameter, value in zip(self._trained(self._all()[name]), values, strict=True):
                if value.numel() == parameter.numel():  # else empty: the script has removed it
                    found[parameter] = put(value, parameter.device, f"the gradient of {name}")
        return self.gradients.gathered(step, found)

    def _check(self, told: Mapping[str, Any]) -> None:
        """Compare a head with the state here; raises RecycleError with both sides."""
        here = {f"part {name}" for name in self.state.small() if name != "optimizer"}
        there = {name for name in told if name.startswith("part ")}
        if here != there:
            raise RecycleError(
                f"{min(here ^ there)} of the stage's state is {'not there' if here - there else 'not here'}: the other "
                "worker is of another job"
            )
        mine, theirs = self._layout(), told["layout"]
        for name in sorted(mine.keys() | theirs.keys()):
            one, other = mine.get(name, "not there"), theirs.get(name, "not there")
            if one != other:
                raise RecycleError(
                    f"{name} of the stage's state is {one} here and {other} at the worker that gives it: the other "
                    "worker is of another model, or has other layers"
                )

    # --- what there is -----------------------------------------------------------------------------

    def _all(self) -> Mapping[str, _Content]:
        if not self._contents:
            self._look_up()
        return self._contents

    def _look_up(self) -> None:
        """List the units anew. Costs time, since there are many names."""
        optimizer = self.state.optimizer
        self._stepped = optimizer.parameters()
        beside = {f"optimizer/{name}": (name,) for name in optimizer.beside()}
        single = {**{name: (name,) for name in self.parameters}, **beside}
        kind = f"{type(optimizer.optimizer).__module__}.{type(optimizer.optimizer).__qualname__}"
        held = optimizer.attributes.tensors()
        if not held and (kind in BY_ITSELF or "undo_rule" in vars(type(optimizer.optimizer))):
            self._contents = {name: _Content(called) for name, called in single.items()}
        elif not held and kind in BY_GROUP:
            self._contents = self._by_group({each for name in single.values() for each in name})
        else:
            called = tuple(each for name in single.values() for each in name)
            self._contents = {"optimizer/": _Content(called, shared=True)} if called or held else {}
        for part in self.state.parts:
            if self._of_part(part):
                self._contents[f"{part}/"] = _Content(part=part)

    def _by_group(self, known: AbstractSet[str]) -> dict[str, _Content]:
        found: dict[str, _Content] = {}
        names = {parameter: name for name, parameter in self._stepped.items()}
        for number, group in enumerate(self.state.optimizer.optimizer.param_groups):
            called = tuple(names[each] for each in group["params"] if names[each] in known)
            found |= {f"optimizer/{number}/": _Content(called)} if called else {}
        return found | {name: _Content((name,)) for name in known - self._stepped.keys()}

    def _of_part(self, part: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a part that belong to no parameter."""
        if part in ("optimizer", "attributes"):
            return {}
        tensors = self.state.parts[part].tensors()
        return {name: each for name, each in tensors.items() if name.removeprefix(f"{part}/") not in self.parameters}

    def _tensors(self, content: _Content) -> dict[str, torch.Tensor]:
        found = dict(self._of_part(content.part)) if content.part else {}
        if content.shared:
            found |= self.state.optimizer.attributes.tensors()
        for name, part in self.state.parts.items():
            tensors = part.tensors() if name not in ("optimizer", "attributes") else {}
            places = (f"{name}/{called}" for called in content.called)
            found |= {place: tensors[place] for place in places if place in tensors}
        stepped = self._stepped_of(content)
        found |= {f"optimizer/{called}": one for called, one in stepped.items() if called not in self.parameters}
        self.state.optimizer.values(found, stepped)
        return found

    def _stepped_of(self, content: _Content) -> dict[str, torch.Tensor]:
        return {called: self._stepped[called] for called in content.called if called in self._stepped}

    def _trained(self, content: _Content) -> list[torch.Tensor]:
        return [self.parameters[called] for called in content.called if called in self.parameters]

    def _layout(self) -> dict[str, str]:
        """Return the form of each tensor that must be there, and each group's parameters."""
        optimizer = self.state.optimizer.optimizer
        names = {parameter: name for name, parameter in self._stepped.items()}
        found = {
            name: written(form_of(tensor))
            for part in self.state.parts
            if part not in ("optimizer", "attributes")
            for name, tensor in self.state.parts[part].tensors().items()
        }
        found |= {f"optimizer/{name}": written(form_of(one)) for name, one in self.state.optimizer.beside().items()}
        found["the optimizer"] = type(optimizer).__qualname__
        for number, group in enumerate(optimizer.param_groups):
            found[f"group {number} of the optimizer"] = ", ".join(names[each] for each in group["params"])
        return found


def _checked(name: str, value: Any) -> Any:
    """Return the value; raises RecycleError with ``name`` if packing would change it."""
    try:
        made = unpacked(packed(value))
    except Exception as error:  # torch's, or that of a class that cannot be pickled
        raise RecycleError(f"{name} has something that can't be sent to another worker: {_first(error)}") from None
    if as_text(made) != as_text(value):
        raise RecycleError(f"{name} has something that another worker would read differently")
    return value


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]

"""Puts told content back (runtime/state/contents.py), in place if a similar object is there."""

from __future__ import annotations

import collections
import enum
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.state.contents import (
    MADE,
    REFUSED,
    STAYS,
    Telling,
    TensorForm,
    attributes_of,
    form_of,
    own_to_torch,
    view_of,
)

BUILT_IN = {each.__name__: each for each in (list, dict, set, int, float)}  # factories of a defaultdict
MISSING = object()


class Putting:
    """Puts told content back, in place if a similar object is there. ``like``: new tensors are made on its device;
    ``called``: parameters, and other tensors told elsewhere, by name.
    """

    def __init__(self, like: torch.Tensor | None = None, called: Mapping[str, Any] | None = None) -> None:
        self._like, self._called = like, called or {}

    def back(self, told: Any, present: Any = MISSING) -> Any:
        """Return the value that was read: ``present`` itself if it can hold the value; MISSING if the value is not
        known.
        """
        if isinstance(told, torch.Tensor):
            if isinstance(present, torch.Tensor) and form_of(present)[:2] == form_of(told)[:2]:
                return present.detach().copy_(told) if present.requires_grad else present.copy_(told)
            return told.detach().clone()
        if isinstance(told, list):
            return self._list(told, present)
        if isinstance(told, dict):
            return self.into(present if isinstance(present, dict) else {}, told.items())
        if not isinstance(told, tuple):
            return told
        if told in (STAYS, MADE) or told[0] == REFUSED:
            return present
        if told[0] not in KINDS:
            raise RecycleError(f"{str(told[0])[:80]!r} is no kind of content: the other worker is of another release")
        return KINDS[told[0]](self, present, *told[1:])

    def attributes(
        self, told: Mapping[str, Any], present: Any, keeps: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Set the attributes of ``present`` to those told. Others are deleted, except those that it ``keeps``."""
        here = attributes_of(present)
        for name in here.keys() - told.keys():
            if not keeps(name):
                object.__delattr__(present, name)
        for name, each in told.items():
            value = self.back(each, here.get(name, MISSING))
            if value is not MISSING and value is not here.get(name, MISSING):
                object.__setattr__(present, name, value)

    def _list(self, told: list[Any], present: Any) -> Any:
        if not isinstance(present, list):
            if present is not MISSING and Telling().of(present, "") == told:
                return present  # of another list class, such as OmegaConf's
            present = []
        present[:] = self._each(told, present)
        return present

    def _each(self, told: list[Any], present: Any) -> list[Any]:
        here = list(present) if isinstance(present, Iterable) else []
        found = (self.back(each, here[place] if place < len(here) else MISSING) for place, each in enumerate(told))
        return [None if each is MISSING else each for each in found]

    def into(self, present: Any, told: Iterable[tuple[Any, Any]]) -> Any:
        """Set the items of the dict ``present`` to those told; others are deleted."""
        made = {key: self.back(each, present.get(key, MISSING)) for key, each in told}
        for key in [key for key in present if key not in made]:
            del present[key]
        for key, each in made.items():  # update() of a Counter would add
            if each is not MISSING:
                present[key] = each
        return present

    def _dict(self, present: Any, kind: str, factory: str, items: list[Any]) -> Any:
        if not isinstance(present, dict) or type(present).__name__ != kind:
            made: dict[str, Callable[[], Any]] = {
                "OrderedDict": collections.OrderedDict,
                "Counter": collections.Counter,
                "defaultdict": lambda: collections.defaultdict(BUILT_IN.get(factory)),
            }
            present = made.get(kind, dict)()
        return self.into(present, [(self.back(key), each) for key, each in items])

    def _parameter(self, present: Any, name: str) -> Any:
        return self._called[name]

    def _same(self, present: Any, name: str) -> Any:
        there = self._called.get(name, present)
        if isinstance(present, torch.Tensor) and (there is present or view_of(present) == view_of(there)):
            return present
        return there

    def _id(self, present: Any, name: str) -> int:
        return id(self._called[name])

    def _tuple(self, present: Any, each: list[Any]) -> Any:
        return tuple(self._each(each, present))

    def _record(self, present: Any, module: str, name: str, each: list[Any]) -> Any:
        kind = _class(module, name, tuple)
        return getattr(kind, "_make", kind)(self._each(each, present))

    def _deque(self, present: Any, size: int | None, each: list[Any]) -> Any:
        if not isinstance(present, collections.deque) or present.maxlen != size:
            return collections.deque(self._each(each, ()), size)
        made = self._each(each, present)
        present.clear()
        present.extend(made)
        return present

    def _set(self, present: Any, each: list[Any]) -> Any:
        return set(self._each(each, ()))

    def _frozenset(self, present: Any, each: list[Any]) -> Any:
        return frozenset(self._each(each, ()))

    def _number(self, present: Any, dtype: str, data: str) -> Any:
        return np.frombuffer(bytes.fromhex(data), dtype)[0]

    def _array(self, present: Any, dtype: str, shape: list[Any], data: str) -> Any:
        made = np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)
        if not isinstance(present, np.ndarray) or (present.dtype, present.shape) != (made.dtype, made.shape):
            return made.copy()
        present[...] = made
        return present

    def _enum(self, present: Any, module: str, name: str, value: Any) -> Any:
        return _class(module, name, enum.Enum)(self.back(value))

    def _random(self, present: Any, state: Any) -> Any:
        value = self.back(state)
        if isinstance(present, torch.Generator):
            present.set_state(torch.from_numpy(value))
        elif isinstance(present, random.Random):
            present.setstate(value)
        elif isinstance(present, np.random.Generator):
            present.bit_generator.state = value
        elif isinstance(present, np.random.RandomState):
            present.set_state(value)
        return present

    def _tensor(self, present: Any, dtype: torch.dtype, shape: torch.Size, hosted: bool) -> Any:
        form = TensorForm(dtype, tuple(shape), hosted)
        if isinstance(present, torch.Tensor) and form_of(present)[:2] == form[:2]:
            return present
        return room(form, self._like)

    def _object(self, present: Any, module: str, name: str, attributes: Mapping[str, Any]) -> Any:
        if present is MISSING or (type(present).__module__, type(present).__qualname__) != (module, name):
            present = object.__new__(_class(module, name, object))
        self.attributes(
            attributes, present, lambda name: isinstance(present, torch.optim.Optimizer) and own_to_torch(name)
        )
        return present


KINDS: dict[str, Callable[..., Any]] = {
    "tensor": Putting._tensor,
    "object": Putting._object,
    "dict": Putting._dict,
    "tuple": Putting._tuple,
    "record": Putting._record,
    "deque": Putting._deque,
    "set": Putting._set,
    "frozenset": Putting._frozenset,
    "number": Putting._number,
    "array": Putting._array,
    "enum": Putting._enum,
    "random": Putting._random,
    "parameter": Putting._parameter,
    "same": Putting._same,
    "id": Putting._id,
}


def room(form: TensorForm, like: torch.Tensor | None) -> torch.Tensor:
    """Return an empty tensor of this form, on the device of ``like``, and in its layout if the shapes are equal."""
    where = HOST if form.on_host or like is None else like.device
    if like is not None and like.shape == form.shape:
        return torch.empty_like(like, dtype=form.dtype, device=where, requires_grad=False)
    return torch.empty(form.shape, dtype=form.dtype, device=where)


def _class(module: str, name: str, base: type) -> Any:
    """Return a class that this process has imported; raises RecycleError if there is none of this name."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise RecycleError(
            f"the optimizer, or the scheduler, holds a {module}.{name}, which is no class here: import its module in "
            "all workers, before the first step"
        )
    return found

"""The content of optimizers, schedulers and the like, of any class, *told* as numbers, words, lists and dicts.

So another process can have it bit for bit. A told value that is no number or word is a tuple of its kind and its parts.
Reading it runs no code of a script: classes are looked up among the imported ones, and their objects only get
attributes. Tensors are told by their form and go by name, or by value if no names are wanted.
"""

from __future__ import annotations

import collections
import enum
import functools
import io
import itertools
import logging
import pathlib
import random
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from datetime import date, time, timedelta
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from recycle_plugin.runtime.devices.host import on_host

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype))
STAYS = ("stays",)  # keeps its present value where it is put: code, live resources, and values told elsewhere
MADE = ("made",)  # as when training was set up: each worker's own, such as its rank
REFUSED = "refused"
CLOCKED = 1 << 31  # larger numbers may be times or addresses
LEFT = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
    types.ModuleType,
    type,
    torch.device,
    torch.Stream,
    torch.Event,
    logging.Logger,
    io.IOBase,
    socket.socket,
    threading.Thread,
    threading.local,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    Executor,
    Future,
    weakref.ref,
    pathlib.PurePath,
    date,
    time,
    timedelta,
)
RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
POSITIONS = (itertools.count, itertools.cycle, types.GeneratorType)


class TensorForm(NamedTuple):
    """A tensor's dtype and shape. ``on_host``: in host memory, wherever its parameter is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def form_of(tensor: torch.Tensor) -> TensorForm:
    """Return a tensor's dtype, shape and kind of memory."""
    return TensorForm(tensor.dtype, tuple(tensor.shape), on_host(tensor))


class Surrounding(NamedTuple):
    """What is around an object but no part of it. ``called``: parameters' names; ``others()``: tensors told elsewhere,
    by name; ``stays()``: objects told elsewhere.
    """

    called: Mapping[Any, str] = {}
    others: Callable[[], Mapping[str, torch.Tensor]] = dict
    stays: Callable[[], Iterable[object]] = tuple


class Telling:
    """Tells objects' content, each object once. ``tensors``: gets the tensors by name; None: they are told by value."""

    def __init__(self, around: Surrounding | None = None, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self._around, self._tensors = around or Surrounding(), tensors
        self._seen = set(map(id, self._around.stays()))

    def of(self, value: Any, where: str) -> Any:
        """Tell ``value``, which is at ``where``."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if id(value) in self._seen:
            return STAYS
        if isinstance(value, tuple):
            return self._tuple(value, where)
        if isinstance(value, (np.generic, np.ndarray)) and (value.dtype.names or isinstance(value, np.ma.MaskedArray)):
            return _refused(where, "a numpy value with fields or a mask: keep each of these in an array of its own")
        simple = _simple(value, kind)
        if simple is not None:
            return simple
        self._seen.add(id(value))
        if isinstance(value, (list, collections.deque)):
            each = [self.of(one, f"{where}/{place}") for place, one in enumerate(value)]
            return ("deque", value.maxlen, each) if isinstance(value, collections.deque) else each
        if isinstance(value, (set, frozenset)):
            name = "set" if isinstance(value, set) else "frozenset"
            return (name, sorted((self.of(one, where) for one in value), key=repr))
        if isinstance(value, dict):
            return self._dict(value, kind, where)
        return self._object(value, kind, where)

    def attributes(self, value: Any, where: str, without: Iterable[str] = ()) -> dict[str, Any]:
        """Tell an object's attributes, by name."""
        self._seen.add(id(value))
        found = attributes_of(value)
        kept = sorted(found.keys() - set(without))
        if isinstance(value, torch.optim.Optimizer):
            kept = [name for name in kept if name in ("state", "param_groups") or not own_to_torch(name)]
        return {name: self.of(found[name], f"{where}/{name}" if where else name) for name in kept}

    def kept(self, value: Any, where: str) -> Any:
        """Read the optimizer's state for a parameter; its tensors are never shared with others."""
        if self._tensors is None or not isinstance(value, torch.Tensor):
            return self.of(value, where)
        if value.layout != torch.strided:
            return _refused(where, "a tensor that is sparse or nested")
        if hasattr(value, "__tensor_flatten__"):  # as torchao's 8-bit moments and DTensors, which have no bytes to copy
            return _refused(where, f"a {type(value).__name__}, made of other tensors")
        self._tensors[where] = value
        return ("tensor", value.dtype, value.shape, value.is_cpu)

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if self._tensors is None:
            return tensor.detach().clone()
        view = view_of(tensor)
        if view in self._known:
            return self._known[view]
        self._known[view] = STAYS
        return self.kept(tensor, where)

    @cached_property
    def _ids(self) -> dict[int, str]:
        """Names by id, since scripts use parameters' ids as keys."""
        return {id(parameter): name for parameter, name in self._around.called.items()}

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], Any]:
        """{view: told form} of tensors told elsewhere; their gradients stay."""
        others = {**{name: each for each, name in self._around.called.items()}, **self._around.others()}
        gradients = (each.grad for each in others.values() if each.is_leaf and each.grad is not None)
        return dict.fromkeys(map(view_of, gradients), STAYS) | {
            view_of(each): ("same", name) for name, each in others.items()
        }

    def _tuple(self, value: tuple[Any, ...], where: str) -> Any:
        each = [self.of(one, f"{where}/{place}") for place, one in enumerate(value)]
        return ("tuple", each) if type(value) is tuple else ("record", *_named(type(value)), each)

    def _dict(self, value: dict[Any, Any], kind: type, where: str) -> Any:
        items = [(self._key(key, where), self.of(one, f"{where}/{self._called(key)}")) for key, one in value.items()]
        if kind is dict and all(type(key) is str for key, _ in items):
            return dict(items)
        factory = getattr(value, "default_factory", None)
        return ("dict", kind.__name__, getattr(factory, "__name__", ""), [list(item) for item in items])

    def _called(self, key: Any) -> str:
        return self._around.called.get(key, "?") if isinstance(key, torch.Tensor) else str(key)

    def _key(self, key: Any, where: str) -> Any:
        if isinstance(key, torch.Tensor):
            name = self._around.called.get(key)
            return _refused(where, "a dict keyed by a non-parameter tensor") if name is None else ("parameter", name)
        if type(key) is int and key >= CLOCKED:
            return ("id", self._ids[key]) if key in self._ids else key
        return self.of(key, where)

    def _object(self, value: Any, kind: type, where: str) -> Any:
        if isinstance(value, dist.ProcessGroup):
            return _refused(where, "a process group: the optimizer sends to others by itself, and they may be lost")
        if isinstance(value, torch.nn.Module) and any(each in self._around.called for each in value.parameters()):
            return STAYS  # the model
        if self._tensors is None and hasattr(value, "param_groups"):
            return STAYS  # a scheduler's optimizer, or a wrapper of it
        found = attributes_of(value)
        if callable(value) and not found:
            return STAYS
        if isinstance(value, POSITIONS) or not (found or hasattr(value, "__dict__")):
            return _refused(where, f"a {kind.__module__}.{kind.__qualname__}, whose content can't be read")
        return ("object", *_named(kind), self.attributes(value, where))


def _simple(value: Any, kind: type) -> Any:
    """Tell a value that cannot contain others; None if it can."""
    if isinstance(value, np.generic):
        return ("number", value.dtype.str, value.tobytes().hex())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return ("array", value.dtype.str, list(value.shape), value.tobytes().hex())
    if isinstance(value, enum.Enum):
        return ("enum", *_named(kind), Telling().of(value.value, ""))
    if isinstance(value, (int, float, str)):  # also of subclasses
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    if isinstance(value, RANDOM):
        return ("random", Telling().of(_random_state(value), ""))
    if kind.__module__.partition(".")[0] == "omegaconf":
        return Telling().of(sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=True), "")
    return STAYS if isinstance(value, LEFT) else None


TORCHS = frozenset(
    (
        "defaults",
        "_opt_called",
        "_warned_capturable_if_run_uncaptured",
        "_need_device_dtype_check_for_fused",
        "_zero_grad_profile_name",
        "_step_supports_amp_scaling",
        "_accelerate_step_called",
        "step",
    )
)
"""Attributes of any optimizer that are torch's own."""


def own_to_torch(name: str) -> bool:
    """Return whether any optimizer of torch has an attribute of this name."""
    return name in TORCHS or name in ("state", "param_groups") or name.startswith("_optimizer_")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, by name, slots included."""
    slots = (name for base in type(value).__mro__ for name in _slots(base))
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _slots(base: type) -> Iterator[str]:
    names = vars(base).get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        if name not in ("__dict__", "__weakref__"):
            yield name


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that show the same numbers in memory."""
    place = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return (place, tensor.shape, tensor.stride(), tensor.dtype) if place else (id(tensor),)


def _named(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _refused(where: str, what: str) -> tuple[str, str]:
    return REFUSED, f"{where.replace('/', '.')} is {what}"


def _random_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)


# --- what was told ---------------------------------------------------------------------------------


def refusals(told: Any) -> Iterator[str]:
    """Yield, for each value that could not be read, the reason."""
    if isinstance(told, tuple) and len(told) == 2 and told[0] == REFUSED:
        yield told[1]
    elif isinstance(told, (tuple, list, dict)):
        for each in told.values() if isinstance(told, dict) else told:
            yield from refusals(each)


def since(made: Any, told: Any) -> Any:
    """Return ``told`` with ``MADE`` in place of everything that equals ``made``."""
    if type(told) is type(made) and told == made:
        return MADE
    if isinstance(told, dict) and isinstance(made, dict):
        return {name: since(made[name], each) if name in made else each for name, each in told.items()}
    if isinstance(told, (list, tuple)) and type(told) is type(made) and len(told) == len(made):
        head = 0 if isinstance(told, list) else len(told) - 1  # only a tuple's last item is its content
        if told[:head] == made[:head]:
            return type(told)([*told[:head], *map(since, made[head:], told[head:])])
    return told


def whole(made: Any, told: Any) -> Any:
    """Invert :func:`since`."""
    if told == MADE:
        return made
    if isinstance(told, dict) and isinstance(made, dict):
        return {name: whole(made.get(name), each) for name, each in told.items()}
    if isinstance(told, (list, tuple)) and type(told) is type(made) and len(told) == len(made):
        return type(told)(map(whole, made, told))
    return told


def compared(told: Any) -> Any:
    """Return ``told`` without numbers that may be times or addresses."""
    if isinstance(told, (float, complex)) or (type(told) is int and abs(told) >= CLOCKED):
        return None
    if isinstance(told, tuple) and told[:1] == ("number",):
        return told[:2]
    if isinstance(told, dict):
        return {name: compared(each) for name, each in told.items()}
    if isinstance(told, torch.Size):
        return told
    return type(told)(map(compared, told)) if isinstance(told, (list, tuple)) else told

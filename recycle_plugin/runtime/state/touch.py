"""Has a script's touch of parameters between two steps wait for the step's commit.

``train_batch`` returns before its step is committed. Until then the step can be taken back: with ``clip: validate``
regularly, otherwise after a loss. A script must not see parameters that may still change, nor write to them, since its
writes would be taken back too. So until the commit, a torch function mode looks at each call. The first call that gets
something a step changes (a parameter, a master, the optimizer's state, or a view of these) waits for the commit. This
holds with any clipping, and without.

The mode sees what torch's own functions and methods get, whoever calls them: saving, copying, pickling, ``numpy()``,
``item()``, ``foreach``, a forward of part of the model; of collectives, those over the plugin's groups. It does not see
the following, before which the script must call ``settle()``:

* reads of memory without a call of torch: numpy arrays, storages and DLPack capsules kept from before,
  ``torch.utils.dlpack.to_dlpack``;
* C++ that gets no tensor, or gets it past torch's dispatch: TorchScript modules, extensions bound by pybind;
* other threads: modes are per thread. (A fork is seen, before it happens.)

A call costs 2 µs more until the touch, and then 1 µs until the next call into the engine, since a mode cannot leave
during its own call. Meanwhile torch does not use its fused kernels for whole transformer layers, which round
differently. After ``settle()`` there is no mode.

A newcomer's script goes through past steps, while its parameters are filled as they arrive. Its writes to them are
dropped: they arrive with what the others' scripts have written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from recycle_plugin.errors import RecycleError

PROPERTIES = (
    "device",
    "dtype",
    "shape",
    "ndim",
    "layout",
    "requires_grad",
    "is_leaf",
    "nbytes",
    "itemsize",
    "is_cuda",
    "is_sparse",
)
KEEPS_VALUES = frozenset({"requires_grad_", "retain_grad_"})
METHODS = ("size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex", "__len__")
GRADIENT: Any = torch.Tensor.grad  # descriptors, which torch's stubs declare as tensors
DATA: Any = torch.Tensor.data
REQUIRES: Any = torch.Tensor.requires_grad
DESCRIBING = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in PROPERTIES),
        *(getattr(torch.Tensor, name) for name in METHODS),
        *(GRADIENT.__get__, GRADIENT.__set__, GRADIENT.__delete__),
        *(REQUIRES.__set__, torch.Tensor.requires_grad_),
    ]
)  # these read no value. Between two steps there are no gradients, whatever zero_grad() drops.
# What is trained counts for the next step (runtime/state/surroundings.py).


class FirstTouch(TorchFunctionMode):
    """A torch function mode that calls ``settle()`` at a script's first touch of one of ``tensors()``; in a newcomer
    (``follows()``) at each read.

    It watches from the end of :meth:`lifted` on, unless all is ``settled()``. On the thread's stack of modes it is
    below the script's own. The top belongs to whoever pushed it, even if ``train_batch`` is called under a mode that is
    left before the next call.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        settled: Callable[[], bool],
        settle: Callable[[], None],
        follows: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tensors, self._settled, self._settle, self._follows = tensors, settled, settle, follows
        self._guards = False
        self._guarded: frozenset[int | None] = frozenset()  # storages, looked up at the first use
        self._depth, self._thread = 0, 0

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Return a context for the engine's own work on parameters; RecycleError if another thread is in one."""
        thread = threading.get_ident()
        if self._depth and self._thread != thread:
            raise RecycleError(
                f"the engine was called from thread {threading.current_thread().name!r} while it is at work in another "
                "one: call it from one thread only, and let that one call settle() before others read parameters"
            )
        self._depth, self._thread, self._guards = self._depth + 1, thread, False
        _take_out(self)
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and (self._follows() or not self._settled()):
                self._guards, self._guarded = True, frozenset()
                _put_below(self)

    def now(self) -> None:
        """Settle now, before a touch of parameters that no mode sees."""
        if self._guards and self._thread == threading.get_ident():
            self._wait_for()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if self._guards:
            self._guarded = self._guarded or self._look_up()
            if not self._guarded.isdisjoint(storages(args, kwargs)) and function not in DESCRIBING:
                if self._follows():
                    return self._beside(function, args, kwargs or {})
                self._wait_for(args, kwargs)
        return function(*args, **(kwargs or {}))

    def _beside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        """Call ``function`` for a newcomer's script, which writes nothing, and reads values only of its own step."""
        written = _written(function, args, kwargs)
        if written is not None and self._guarded & storages(written):
            return written if isinstance(written, torch.Tensor) else None
        found = function(*args, **kwargs)
        parts = found if isinstance(found, (list, tuple)) else [found]
        if not all(isinstance(part, torch.Tensor) for part in parts) or not storages(parts) <= self._guarded - {None}:
            self._wait_for(args, kwargs)  # not a view: it reads values
        return found

    def _look_up(self) -> frozenset[int | None]:
        # None: tensors whose memory is unknown
        return frozenset([None, *(tensor.untyped_storage()._cdata for tensor in self._tensors())])

    def _wait_for(self, *touched: Any) -> None:
        known = storages(*touched) & self._guarded - {None}
        with _no_modes(), temporarily_clear_interpreter_stack():
            self._settle()
        if not known <= self._look_up():
            raise RecycleError(
                "a tensor of the optimizer's state was read that a rejected step had made, and that is gone: "
                "get it from the optimizer again, or call engine.settle() after train_batch()"
            )


def _written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    name = getattr(function, "__name__", "")
    if "out" in kwargs:
        return kwargs["out"]
    writes = name.endswith("_") and not name.endswith("__") and name not in KEEPS_VALUES
    if writes or name == "__setitem__" or function == DATA.__set__:
        return args[0] if args else next(iter(kwargs.values()))
    return None


def touch(*given: Any) -> None:
    """Show tensors to the thread's modes, for calls that pass torch's dispatch, such as collectives."""
    for tensor in tensors_in(given):
        tensor.detach()


def tensors_in(given: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in a call's arguments, and the inner ones of wrapper tensors such as DTensor."""
    rest = [given]
    while rest:
        one = rest.pop()
        if isinstance(one, torch.Tensor):
            yield one
            flatten = getattr(type(one), "__tensor_flatten__", None)  # of wrapper tensors
            rest.extend(() if flatten is None else [getattr(one, name) for name in flatten(one)[0]])
        elif isinstance(one, (list, tuple)):
            rest.extend(one)
        elif isinstance(one, dict):
            rest.extend(one.values())


def storages(*given: Any) -> set[int | None]:
    """Return the addresses of all tensors' storages; None for a tensor without one (sparse, or inside torch.func)."""
    found: set[int | None] = set()
    for tensor in tensors_in(given):
        try:
            found.add(tensor.untyped_storage()._cdata)
        except NotImplementedError:
            found.add(None)
    return found


# --- the thread's stack of modes ----------------------------------------------------------------------


def _take_all() -> list[TorchFunctionMode]:
    """Pop all modes, the topmost first."""
    return [_pop_mode() for _ in _get_current_function_mode_stack()]


def _put_back(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def _take_out(mode: TorchFunctionMode) -> None:
    if mode in _get_current_function_mode_stack():
        _put_back([one for one in _take_all() if one is not mode])


def _put_below(mode: TorchFunctionMode) -> None:
    """Put the mode below all others, except that of ``torch.set_default_device``, which expects the bottom."""
    above = _take_all()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    last = len(above) - bool(above and above[-1] is default)
    _put_back([*above[:last], mode, *above[last:]])


@contextmanager
def _no_modes() -> Iterator[None]:
    """Return a context as in ``train_batch``: without the script's modes of either kind, and without its tracing."""
    bindings: Any = torch._C  # torch's stubs lack the second function
    modes, tracing = _take_all(), bindings._get_tracing_state()
    bindings._set_tracing_state(None)
    try:
        with _disable_current_modes():
            yield
    finally:
        bindings._set_tracing_state(tracing)
        _take_all()
        _put_back(modes)

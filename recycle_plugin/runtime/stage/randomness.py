"""Random numbers keyed by their purpose, not by the worker that draws them.

A micro-batch that a peer runs again must get the same dropout masks. Drawn from the worker's own stream they would
differ, and the gradient would silently be another function's.
"""

from __future__ import annotations

import _random
import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.runtime.devices.port import Device

# modules that keep named random states of the device for layers
TRACKERS = ("deepspeed.runtime.activation_checkpointing.checkpointing", "megatron.core.tensor_parallel.random")


def key(seed: int, step: int, micro_batch: MicroBatch, stage: int, half: str = "") -> int:
    """Return a 63-bit seed for one forward pass, or for that ``half`` of its backward."""
    text = f"{seed}/{step}/{micro_batch}/{stage}{half and '/'}{half}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def keyed(seed: int, device: Device) -> Iterator[None]:
    """Return a context in which all default random generators start from ``seed``: torch's for ``device``, Python's,
    numpy's, and the named states of DeepSpeed and megatron-core.

    Layers that are skipped at random draw from Python's or numpy's. Afterwards the worker's own streams go on
    unchanged. Waits for no device: a generator's state is on the host.
    """
    python, numpy = _python.begin(seed), _numpy.begin(seed)
    generators, trackers = _seeded(seed, device), _seeded_trackers(seed, device)
    try:
        yield
    finally:
        python()
        numpy()
        _put_back(generators)
        for tracker, states in trackers:
            tracker.set_states(states)


@contextmanager
def keyed_torch(seed: int, device: Device) -> Iterator[None]:
    """Return a context in which torch's default generators for ``device`` start from ``seed``; Python's and numpy's
    stay. Used for a backward: seeding the others as well takes three times as long.
    """
    states = _seeded(seed, device)
    try:
        yield
    finally:
        _put_back(states)


def _seeded(seed: int, device: Device) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Seed torch's default generators for ``device``; returns their old states."""
    states = [(generator, generator.get_state()) for generator in device.generators]
    for generator, _ in states:
        # torch.manual_seed looks for other devices each time, which takes longer than all of this
        generator.manual_seed(seed)
    return states


def _put_back(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


class _PythonStream:
    """Python's global stream, as the bytes of its generator: getstate() and setstate() take 10 µs with warm caches and
    several times as long with cold ones, number by number. A normal number may be cached beside the bytes.
    """

    _own: Any = random.seed.__self__  # type: ignore[attr-defined]
    _bytes = _random.Random.__basicsize__ - object.__basicsize__  # the position, and the numbers
    _address = id(_own) + object.__basicsize__

    def begin(self, seed: int) -> Callable[[], object]:
        """Seed the stream; returns a function that restores it."""
        own, before, normal = self._own, ctypes.string_at(self._address, self._bytes), self._own.gauss_next
        own.seed(seed)

        def put_back() -> None:
            ctypes.memmove(self._address, before, self._bytes)
            own.gauss_next = normal

        return put_back


_python = _PythonStream()


class _NumpyStream:
    """numpy's global stream, as the bytes of its generator: get_state() and set_state() take 60 µs, number by number.

    A normal number may be cached beside the bytes; only get_state() shows it. Caching one needs a draw, which changes
    the bytes: so bytes that once had none beside them have none again.
    """

    _bytes = 4 * 625  # numpy's mt19937_state: the numbers, and the position

    def __init__(self) -> None:
        self._alone = b""  # bytes known to have no cached normal number

    def begin(self, seed: int) -> Callable[[], object]:
        """Seed the stream if numpy is loaded; returns a function that restores it."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return lambda: None
        drawn, generator = numpy.random, numpy.random.mtrand._rand._bit_generator
        if not isinstance(generator, drawn.MT19937):
            raise TypeError(f"numpy's own stream is a {type(generator).__name__}: only a MT19937 can be seeded again")
        address = generator.ctypes.state_address
        before = ctypes.string_at(address, self._bytes)
        if before != self._alone:
            whole = drawn.get_state()
            if whole[3]:
                drawn.seed(seed % 2**32)
                return partial(drawn.set_state, whole)
            self._alone = before
        drawn.seed(seed % 2**32)

        def put_back() -> None:
            drawn.seed(0)  # drops a cached normal number
            ctypes.memmove(address, before, self._bytes)

        return put_back


_numpy = _NumpyStream()


def _seeded_trackers(seed: int, device: Device) -> list[tuple[Any, Any]]:
    """Seed each state of each tracker by ``seed`` and its name; returns the old states."""
    kept = [(tracker, states) for tracker in _trackers() if (states := tracker.get_states())]
    own = device.generators[-1]
    for tracker, states in kept:
        tracker.set_states({name: _started(state, named(seed, name), own) for name, state in states.items()})
    return kept


def _trackers() -> Iterator[Any]:
    """Yield the trackers that imported libraries have made. Read from their modules: asking megatron-core would make
    one before the script chooses its kind.
    """
    for module in TRACKERS:
        if module in sys.modules and (made := sys.modules[module]._CUDA_RNG_STATE_TRACKER) is not None:
            yield made


def _started(state: Any, seed: int, own: torch.Generator) -> Any:
    """Return a state like ``state``, seeded: bytes, or with CUDA graphs a generator. ``own`` stays unchanged."""
    if isinstance(state, torch.Generator):
        return state.clone_state().manual_seed(seed)
    before = own.get_state()
    made = own.manual_seed(seed).get_state()
    own.set_state(before)
    return made


def named(seed: int, name: str) -> int:
    """Return a 63-bit seed for the state ``name``, from the micro-batch's ``seed``."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1

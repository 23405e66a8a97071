"""Random numbers keyed by what they are for, not by who draws them.

A micro-batch that is run again by a peer has to meet the same dropout masks; drawn from the worker's
own stream they would differ, and the gradient would be of another function, silently.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.runtime.devices.port import Device


def key(seed: int, step: int, micro_batch: MicroBatch, stage: int, half: str = "") -> int:
    """A 63-bit seed for one forward pass, or for that ``half`` of its backward."""
    text = f"{seed}/{step}/{micro_batch}/{stage}{half and '/'}{half}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def keyed(seed: int, device: Device) -> Iterator[None]:
    """Inside of this context all default random generators start from ``seed``: torch's for ``device``, Python's and
    numpy's.

    Layers that are left out at random draw from the latter.  Afterwards the worker's own streams go on as if nothing
    was.
    """
    python, numpy = random.getstate(), sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        with keyed_torch(seed, device):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)


@contextmanager
def keyed_torch(seed: int, device: Device) -> Iterator[None]:
    """Inside of this context torch's default generators for ``device`` start from ``seed``; Python's and numpy's stay.

    That is for a backward: with the others it takes ten times as long.
    """
    states = [(generator, generator.get_state()) for generator in device.generators]
    for generator, _ in states:
        generator.manual_seed(
            seed
        )  # torch.manual_seed looks for other devices each time, which takes longer than all of this
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)

"""The stand-in accelerator: a device ``standin`` that is not the CPU, to be found by torch once this is imported.

Its kernels are the CPU's, on memory that only they may touch, so its numbers are the CPU's,
those of dropout with a generator in the same state included.  What GPUs show only as
rare wrong numbers it raises as RuntimeError: every kernel, copy, event and host access has a vector clock, and two
accesses to the same bytes of device or pinned memory, one of which writes, have to be ordered by events,
synchronisations or the order of one stream.  The error names both operators, their streams and the lines that called
them.  So do a block that is freed while another stream uses it without ``record_stream``, and one that another stream
uses without having waited for the stream that it was allocated on.  What is found where nothing can be raised (in a
destructor, or in an operation of the CPU on pinned memory) is raised by the next call to the device, or by `check`;
`violations` gives what is left, and a process that ends with some says so on stderr.

* `configure` turns clocks and stacks off, or makes asynchronous copies late: they take effect at a moment that a seed
  chooses, between their submission and what is ordered behind them.  RECYCLE_TEST_STANDIN_LATE is a seed, too.
* Fresh and freed memory is full of NaN (integers: -1).  `memory_allocated`, of torch.standin, counts exact bytes,
  `pinned_bytes` those of pinned memory.  RECYCLE_TEST_STANDIN_BYTES is what a device has (16 GiB).
* `synchronisations` counts what would stop a host until a device is done, by kind and place.
* `host_access` tells of what no operation of torch does: numpy, sockets and files that read or write pinned memory.
* `generators_digest` is equal before and after whatever restores the generators.
* ``accelerator.use()``, in the module of that name, makes it DeepSpeed's accelerator.
* A process that has used the device and forks finds it unusable in the child, as with CUDA.

It can't show: real contexts and their memory, an allocator's rounding, stalls and fragments, what kernels cost, how
many of them are resident and how streams share a device, and torch.cuda calls, as megatron-core makes them.  Threads of
the host count as one: what locks and queues order among them is not known here.  Kernels are done when their call
returns; only asynchronous copies can be late.  Tensors with many gaps count as the bytes from their first to their
last.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections import Counter

import torch

from tests.support.standin import device

extension = device.extension
NAME = device.NAME

# Raises what has been found where nothing could be raised.
check = extension.check
# Takes the messages of what has been found and not been raised.
violations = extension.violations
# Bytes of pinned memory that live.
pinned_bytes = extension.pinned_bytes
reset_synchronisations = extension.reset_synchronisations


def configure(*, clocks: bool = True, stacks: bool = True, late: int | None = None) -> None:
    """Judge the order of accesses or not, with or without stacks, and make asynchronous copies late by a seed.

    All three are set, whatever they were.
    """
    extension.configure(clocks, stacks, late)


def synchronisations() -> Counter[tuple[str, str]]:
    """Count by (kind, place); the place is the innermost line of the plugin, or else of a script."""
    return Counter(extension.synchronisations())


def host_access(tensor: torch.Tensor, *, write: bool) -> None:
    """Tell of an access of the host that is none of torch's operations; raises where it is not ordered."""
    extension.host_access(tensor, write)


def generators_digest() -> str:
    states = b"".join(generator.get_state().numpy().tobytes() for generator in device.default_generators)
    return hashlib.sha256(states).hexdigest()


def _say_what_is_left() -> None:
    for text in violations():
        print(f"never raised: {text}", file=sys.stderr, flush=True)


def _register() -> None:
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    seed = os.environ.get("RECYCLE_TEST_STANDIN_LATE")
    configure(late=int(seed) if seed else None)
    atexit.register(_say_what_is_left)


_register()

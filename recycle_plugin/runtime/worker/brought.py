"""Values that workers bring to a barrier, read as the expected type."""

from __future__ import annotations

from typing import TypeVar

from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.messages.typed import Unreadable, read
from recycle_plugin.errors import RecycleError

T = TypeVar("T")


def by_rank(kind: type[T], met: BarrierPassed) -> dict[int, T]:
    """Return what each rank has brought, as a ``kind``. Raises RecycleError if it is something else."""
    found = {}
    for rank, plain in met.values.items():
        value = read(kind, plain, f"what rank {rank} has brought to {met.barrier}")
        if isinstance(value, Unreadable):
            raise RecycleError(f"{value}: start the job again with the same version of the plugin on all hosts")
        found[int(rank)] = value
    return found

"""The activation cap as people write it, in the settings and on command lines.

Micro-batches and "1f1b" go to the planner as they are. A size and "auto" are bytes: only a profile knows how many bytes
a micro-batch takes.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TypeGuard

from recycle_plugin.core.vocabulary.plan import ONE_F_ONE_B
from recycle_plugin.core.vocabulary.profile import Profile

AUTO = "auto"
MOST = 1 << 53  # of any whole number: the planner counts in 64 bits, and adds up
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*((?P<prefix>[kmgt])(?P<binary>i?))?b", re.IGNORECASE | re.ASCII)


def size(text: str) -> int | None:
    """Return the bytes of ``12GiB``, ``1.5 TB`` or ``4096B``; None for other texts, or for none or too many."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    unit = (1024 if match["binary"] else 1000) ** " kmgt".index((match["prefix"] or " ").lower())
    found = int(Decimal(match["number"]) * unit)
    return found if 1 <= found <= MOST else None


def normal(text: str) -> str | None:
    """Return the cap in the form that the other functions take; None if it is not "1f1b", "auto" or a size."""
    word = text.strip().lower()
    return word if word in (ONE_F_ONE_B, AUTO) else text.strip() if size(text) else None


def in_bytes(cap: object) -> TypeGuard[str]:
    """Return whether ``cap`` is in bytes, and so needs a profile."""
    return isinstance(cap, str) and cap != ONE_F_ONE_B


def memory_bytes(cap: str, profile: Profile | None, stages: int, undo: str = "snapshot") -> int | tuple[int, ...]:
    """Return ``Policy.memory_bytes`` for a size, or for "auto": for each stage the device's memory minus the state.

    ``undo``: as in the settings. Raises ValueError if "auto" has no profile with the device's memory, or nothing is
    left.
    """
    if (given := size(cap)) is not None:
        return given
    if profile is None or profile.device_bytes is None:
        raise ValueError("the profile does not say how much memory its device has")
    from recycle_plugin.planner import PlanError, memory

    try:
        computing = tuple(sum(each.computing().values()) for each in profile.worker_bytes(stages, undo))
        return memory.auto(profile.device_bytes, computing, profile.working_bytes(stages))
    except PlanError as error:
        raise ValueError(str(error)) from None

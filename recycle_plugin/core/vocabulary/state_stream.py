"""What a source sends to a newcomer that catches up: the state of their stage, unit by unit, and what later steps do.

A *unit* is a parameter with all that the optimizer keeps for it, so that steps can be applied to it alone. It is of the
state after some committed step, which is what the next STEP finds. A script may change that state between the two, and
then a unit that was sent before comes *again*. From then on the source sends for each step the *sums* that its stage's
workers have exchanged, and once the step is committed a *marker*. A stream is ordered: the last sums of step k before
the marker of k are those that were applied, whatever was summed, rejected or made again before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recycle_plugin.core.vocabulary.step_batches import LiveShare


@dataclass(frozen=True)
class Asked:
    """What a newcomer asks a source for: ``units``, by name, in this order. ``head``: first what goes by value, and the
    list of all units. ``script``: what the source's script hands over, once the newcomer enters. ``leave``: the units
    are another source's from now on.
    """

    units: tuple[str, ...] = ()
    head: bool = False
    script: bool = False
    leave: bool = False


@dataclass(frozen=True)
class Head:
    """The non-tensor state after ``step``, and the weight of each unit, in bytes."""

    step: int
    value: Any
    units: Mapping[str, int]


@dataclass(frozen=True)
class Unit:
    """Unit ``name`` of the state after ``step``. ``value`` None: damaged on its way; ``again``: a script changed it."""

    step: int
    name: str
    value: Any
    again: bool = False


@dataclass(frozen=True)
class Sums:
    """The stage's sums of ``step`` for the units that this source has handed out. ``bytes``: received, over a line."""

    step: int
    values: Mapping[str, Any] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Marker:
    """The word that ``step``, applied with ``norm``, is committed; what follows is of the state after it, or later.

    ``begins``: the first marker of its stream; its step's sums have not come with it. ``ends``: another marker of the
    same step, once the source's script no longer changes the state after it; its ``settings`` are then those of the
    next step. ``valid_from``: the generation from which the source's data is valid (core/worker/step_store.py).
    ``settings``: what the optimizer applied the step with, learning rates and the like, which the source's script may
    have set for this step. ``share``: which part of the replicas has contributed to it.
    """

    step: int
    norm: Any = None
    begins: bool = False
    valid_from: int = 0
    settings: Any = None
    share: LiveShare = LiveShare()
    ends: bool = False


@dataclass(frozen=True)
class Handed:
    """The ``value`` that the source's script gives to the newcomer's script, if ``step`` is the newcomer's last past
    step.
    """

    step: int
    value: bytes


Item = Head | Unit | Sums | Marker | Handed
"""What comes over a stream."""

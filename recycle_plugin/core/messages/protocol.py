"""The list of control messages between workers, supervisors, the coordinator, its standbys and operators;
core/messages/encoding.py encodes them by their annotations. Data (activations, gradients) never passes here: a step
costs each worker a handful of messages.
"""

from __future__ import annotations

from recycle_plugin.core.messages import from_coordinator, from_operators, from_workers, mirroring

PARTS = (from_workers.LogFolder, from_coordinator.LogsAt, from_coordinator.Run, from_operators.Ask)
"""Classes of these modules that are no messages, but parts or bases of some."""

MESSAGES: tuple[type, ...] = tuple(
    each
    for module in (from_workers, from_coordinator, from_operators, mirroring)
    for each in vars(module).values()
    if isinstance(each, type) and each.__module__ == module.__name__ and each not in PARTS
)
"""All other classes of these modules, in the order in which they stand there."""

"""The shards of one seat: the data that all of them hold. They go on from the same instruction with the same data
(core/worker/lockstep.py), so data counts as held by the seat only if every shard holds it. All other data is made
again.
"""

from __future__ import annotations

from collections.abc import Sequence

from recycle_plugin.core.vocabulary.iterator_draws import Batches
from recycle_plugin.core.vocabulary.iterator_draws import pack as pack_drawn
from recycle_plugin.core.vocabulary.iterator_draws import unpack as unpack_drawn
from recycle_plugin.core.vocabulary.packed_data import PackedData, pack


def held_by_all(reported: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the data that all shards of a seat hold, from each one's ``reported`` data
    (core.vocabulary.packed_data.pack).
    """
    first, *others = reported
    return pack(frozenset(PackedData(first)).intersection(*map(PackedData, others))) if others else first


def drawn_by_all(reported: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the plain iterators' batches that all shards have ``reported`` (packed by iterator_draws.pack)."""
    first, *others = reported
    if not others:
        return first
    held = [unpack_drawn(each) for each in others]

    def common(step: int, batches: Batches) -> Batches:
        return {one: draw for one, draw in batches.items() if all(each.get(step, {}).get(one) == draw for each in held)}

    return pack_drawn(
        {step: found for step, batches in unpack_drawn(first).items() if (found := common(step, batches))}
    )

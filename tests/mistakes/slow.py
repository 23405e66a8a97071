"""Mistakes about slow replicas: whom they are taken to be.

As tests/mistakes; found in jobs in which a worker is slow and nothing else is wrong.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts import slowness
from tests.mistakes import mistake


def changed_times(monkeypatch, change) -> None:
    """What steps have taken workers is taken for something else."""
    compared = slowness.compared
    monkeypatch.setattr(
        slowness,
        "compared",
        lambda stages, step_us: compared(
            [[{one: change(took) for one, took in group.items()} for group in shards] for shards in stages], step_us
        ),
    )


mistake("who waits longest for the others is taken to hold them up", seen=65)(
    lambda monkeypatch: changed_times(monkeypatch, lambda took: took._replace(sum_us=-took.sum_us))
)
mistake("who waits longest in a slow replica is taken to be late", seen=167)(
    lambda monkeypatch: changed_times(monkeypatch, lambda took: took._replace(own_us=-took.own_us))
)

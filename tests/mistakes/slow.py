"""Mistakes about slow replicas: whom they are taken to be, and when it pays to go on without one.

As tests/mistakes; found in jobs in which a worker is slow and nothing else is wrong.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import offline, slow_replicas
from tests.mistakes import mistake


def changed_times(monkeypatch, change) -> None:
    """What steps have taken workers is taken for something else."""
    compared = slow_replicas.compared
    monkeypatch.setattr(
        slow_replicas,
        "compared",
        lambda stages, step_us: compared(
            [[{one: change(took) for one, took in group.items()} for group in shards] for shards in stages], step_us
        ),
    )


@mistake("who waits longest for the others is taken to hold them up", seen=65)
def waits_are_lateness(monkeypatch) -> None:
    changed_times(monkeypatch, lambda took: took._replace(sum_us=-took.sum_us))


@mistake("who waits longest in a slow replica is taken to be late", seen=167)
def waits_are_work(monkeypatch) -> None:
    changed_times(monkeypatch, lambda took: took._replace(own_us=-took.own_us))


@mistake("a slow replica is dropped, however slow the others are with its work", seen=65)
def dear_drops(monkeypatch) -> None:
    monkeypatch.setattr(offline, "pays", lambda slow, load: True)


@mistake("the others are taken to do a dropped replica's work in no time", seen=65)
def free_work(monkeypatch) -> None:
    monkeypatch.setattr(offline, "load_without", lambda job, micro_batches, live: 1.0)


@mistake("a replica that stays slow is dropped and started again for ever", seen=262)
def for_ever(monkeypatch) -> None:
    monkeypatch.setattr(offline, "starts_in_a_row", lambda rejoin: 1_000)
    monkeypatch.setattr(offline, "AWAY_STEPS", 1)

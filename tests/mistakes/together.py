"""Mistakes about seats that several workers hold together.

As tests/mistakes; found in jobs whose seats have two shards.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts import regrouping
from recycle_plugin.core.coordinator.facts.joining import Joining
from recycle_plugin.core.vocabulary.roster import FailureDomain, Group, Roster
from recycle_plugin.core.worker.lockstep import Lockstep
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine
from tests.mistakes import instead, mistake


class Mixed:
    """A roster in which all shards of a stage are peers."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def peers(self, stage: int, shard: int) -> Group:
        return self._roster.stage(stage)


class Crossed(Mixed):
    """A roster in which the peers of a shard are those of the other one."""

    def peers(self, stage: int, shard: int) -> Group:
        return self._roster.peers(stage, 1 - shard)


def half_a_seat_is_admitted(monkeypatch) -> None:
    """Who comes back does not wait for the other shards of its seat."""
    monkeypatch.setattr(Joining, "_whole", lambda self, newcomers: list(newcomers))


@mistake("hashes of all shards of a stage are compared with each other")
def hashes_of_all_shards(monkeypatch) -> None:
    caught_up, mismatches, add_hash = Joining.caught_up, Joining.mismatches, Joining.add_hash
    monkeypatch.setattr(
        Joining, "caught_up", lambda self, one, roster, *more: caught_up(self, one, Mixed(roster), *more)
    )
    monkeypatch.setattr(Joining, "mismatches", lambda self, roster: mismatches(self, Mixed(roster)))

    def of_both(self, message, member) -> None:
        add_hash(self, message, member)
        for of in self._asked:
            if (of.stage, of.step) == (member.seat.stage, message.step):
                self._hashes.setdefault(of, {})[message.worker] = message.digest

    monkeypatch.setattr(Joining, "add_hash", of_both)


@mistake("a newcomer takes the state of another shard, and no hash is compared")
def state_of_another_shard(monkeypatch) -> None:
    catch_up = Joining.catch_up
    monkeypatch.setattr(Joining, "catch_up", lambda self, one, roster, out: catch_up(self, one, Crossed(roster), out))
    monkeypatch.setattr(Joining, "mismatches", lambda self, roster: iter(()))
    monkeypatch.setattr(Joining, "unproven", lambda self, roster: [])


instead("a lost worker leaves the others of its seat in the job", FailureDomain, "of")(
    lambda self, member, roster: (member,)
)
instead("a shard stops where it is, and not where the others of its seat have got to", Lockstep, "_furthest", seen=115)(
    lambda self: self.finished
)
instead("a shard begins what the others of its seat have not come to", Lockstep, "_begun")(lambda self: True)
instead("what the first shard holds its seat holds", regrouping, "held_by_all", seen=142)(lambda reported: reported[0])


@instead("a tensor goes to the first shard of its target", SimulatedMachine, "transfer", seen=27)
def to_the_first_shard(self, datum, value, target, valid_from) -> None:
    self.cluster.send(self.rank, self.control_view.roster.holding(target).rank, datum, value, valid_from)

"""What the coordinator tells of a job of any size, whose workers the test plays, as an event log."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import Activity
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    Contribution,
    Heartbeat,
    Ready,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.observability.console import event_line
from tests.support.membership import job

BEGAN = 1000.0
SAMPLES = 4  # of each replica in a step


class ToldJob:
    """A job of ``replicas`` x ``stages``, one second a step; ``now``: seconds since the epoch; ``lines``: its log."""

    def __init__(self, replicas: int, stages: int, folder: Path) -> None:
        self.spec = job(
            replicas=replicas, stages=stages, batch=SAMPLES * replicas, rejoin="always", run_dir=str(folder)
        )
        self.membership = Membership(replicas * stages)
        self.now, self.step, self.generation = BEGAN, 0, 0
        self.folder, self.lines = folder, list[str]()
        self.seats = [Seat(*divmod(rank, stages)) for rank in range(replicas * stages)]
        self.live = [*range(replicas * stages)]
        for rank in self.live:
            self.membership.identify(WorkerId(rank))
            self.say(Ready(self._member(rank), 0, self.spec))
        self.regroup()

    def _member(self, rank: int, incarnation: int = 0) -> Member:
        return Member(rank, self.seats[rank], f"tcp://{rank}", f"node{rank // 8}", incarnation)

    def rank(self, seat: str) -> int:
        return self.seats.index(Seat.parse(seat))

    def say(self, message: object) -> CoordinatorOutput:
        return self._take(self.membership.receive(message, self.now))

    def _take(self, output: CoordinatorOutput) -> CoordinatorOutput:
        self.lines += [event_line(event, self.now) for event in output.events]
        return output

    def regroup(self) -> None:
        for rank in self.live:
            self.say(SurvivorReport(rank, self.generation, self.step, "plan"))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + 1.0
            for replica in range(self.spec.replicas):
                who = next(rank for rank in self.live if self.seats[rank].stage == self.spec.stages - 1)
                share = {f"{replica}.0": 5 - self.step / 10}
                self.say(Contribution(who, self.step, "loss", share, self.spec.replicas))
            for rank in self.live:
                self.say(Stepped(rank, self.generation, self.step))

    def lose(self, *seats: str, how: object = None) -> None:
        """The processes at ``seats`` end, as ``how(rank)`` says it."""
        for seat in seats:
            self.live.remove(self.rank(seat))
        for seat in seats:
            self.say(how(self.rank(seat)))
        self._take(self.membership.tick(self.now))
        self.generation = self.membership.generation

    def come(self, *seats: str) -> None:
        """New processes at ``seats`` have come to the present, and ask for the state of their stages."""
        for rank in map(self.rank, seats):
            self.membership.identify(WorkerId(rank, 1))
            self._take(self.membership.greet(WorkerId(rank, 1), "h"))
            self.say(Ready(self._member(rank, 1), 0, self.spec))
            self.say(CatchUp(rank, incarnation=1))

    def beat(self, ranks: Iterable[int], at: str, what: str = "") -> None:
        for rank in ranks:
            self.say(Heartbeat(rank, 0, 0, Activity(at, what), self.step + 1))
        self._take(self.membership.tick(self.now))

    def write(self, *more: dict) -> Path:
        """The run folder, with the log, and with ``more`` events of now."""
        lines = [*self.lines, *(json.dumps({"time": self.now, "text": "", **one}) for one in more)]
        (self.folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return self.folder

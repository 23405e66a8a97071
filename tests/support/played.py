"""A membership whose workers and supervisors are heard as a test says, in time that passes as it says."""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Event
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import End, Fence, Generation
from recycle_plugin.core.messages.from_workers import Heartbeat, Stepped, SupervisorHeartbeat
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from tests.support.membership import DEADLINES, said, started, step

BUSY_S, LAST_S = DEADLINES.busy_timeout_s, DEADLINES.last_worker_timeout_s
DEADLINE_S, IDLE_S, HEARTBEAT_S = DEADLINES.progress_timeout_s, DEADLINES.idle_timeout_s, DEADLINES.heartbeat_timeout_s


@dataclass
class Played:
    """A membership whose workers beat, and whose supervisors pulse, as ``at`` says; ``None``: not at all."""

    membership: Membership = field(default_factory=started)
    now: float = 1000.0
    at: dict[int, Activity | None] = field(default_factory=lambda: dict.fromkeys(range(4), Activity(WAITS, "")))
    done: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(4), 0))
    stopped: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # hosts that nothing comes from
    busy: set[int] = field(default_factory=set)  # processes that use a core
    cpu_s: float = 0.0  # that they have used
    outs: list[CoordinatorOutput] = field(default_factory=list)

    def live_for(self, seconds: float, instructions: tuple[int, ...] = ()) -> None:
        """Let time pass; ``instructions``: ranks that finish one with each tick."""
        for _ in range(round(seconds / TICK_S)):
            for rank in instructions:
                self.done[rank] += 1
            for rank in range(4):
                self.signs(rank)
            self.tick(TICK_S)

    def signs(self, rank: int) -> None:
        if rank in self.gone:
            return
        self.membership.receive(
            SupervisorHeartbeat(rank, rank in self.stopped, self.cpu_s if rank in self.busy else 0.0), self.now
        )
        if self.at[rank] is not None and rank not in self.stopped:
            self.membership.receive(Heartbeat(rank, 1, self.done[rank], self.at[rank]), self.now)

    def tick(self, seconds: float) -> CoordinatorOutput:
        self.now += seconds
        self.cpu_s += seconds
        self.outs.append(self.membership.tick(self.now))
        return self.outs[-1]

    def first_step(self) -> Played:
        """Done: everybody has compiled what there is to compile."""
        step(self.membership, 0, 1)
        return self

    def steps(self, numbers: range, each_s: float, after_s: float = 0.0) -> Played:
        """All report these steps, each so much later than the one before."""
        for number in numbers:
            for rank in range(4):
                self.membership.receive(Stepped(rank, 0, number), self.now + after_s + each_s * number)
        return self

    @property
    def clock(self) -> float:
        return self.membership.state.attendance.failure_detector.clock

    @property
    def events(self) -> list[Event]:
        return [event for event in self.said if event.kind not in ("suspected", "cleared")]

    @property
    def said(self) -> list[Event]:
        return [event for out in self.outs for event in out.events]

    def doubts(self) -> list[tuple[str, str]]:
        return [(event.kind, event.details["seat"]) for event in self.said if event.kind in ("suspected", "cleared")]

    def given_up(self) -> list[str]:
        return [event.text.partition(": ")[2].partition(" for ")[0] for event in self.events if event.kind == "lost"]

    def fenced(self) -> list[tuple[object, int]]:
        return [(whom, one.rank) for out in self.outs for whom, one in out.messages if isinstance(one, Fence)]


def generations(played: Played) -> list[list[int]]:
    return [[member.rank for member in one.members] for out in played.outs for one in said(out, Generation)]


def ends(played: Played) -> list[End]:
    return [one for out in played.outs for one in said(out, End)]

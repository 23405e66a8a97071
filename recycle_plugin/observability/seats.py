"""The state of each seat of a job, as a mark and in words, as far as its event log tells."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from recycle_plugin.core.messages.activity import WAITS
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.observability import comings
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import end, these


class Mark(StrEnum):
    """The mark for a seat's activity; the most urgent first."""

    SUSPECTED = "?"
    LOST = "x"
    REPLAYS = "R"
    ARRIVES = "0-9"  # the tenths of its state that have arrived
    FOLLOWS = "f"
    RUNS = "r"
    STARTS = "s"
    LEAVES = "<"
    LEFT = "-"
    WAITS = "w"
    TRAINS = "."


WORDS = {
    Mark.SUSPECTED: "suspected",
    Mark.LOST: "lost",
    Mark.REPLAYS: "replays",
    Mark.ARRIVES: "catches up (tenths)",
    Mark.FOLLOWS: "follows",
    Mark.RUNS: "runs its script",
    Mark.STARTS: "starts again",
    Mark.LEAVES: "leaves",
    Mark.LEFT: "has left",
    Mark.WAITS: "waits",
    Mark.TRAINS: "trains",
}
PHASES = {
    comings.STARTED: Mark.STARTS,
    comings.RUNS: Mark.RUNS,
    comings.CATCHES_UP: Mark.ARRIVES,
    comings.FOLLOWS: Mark.FOLLOWS,
    comings.REPLAYS: Mark.REPLAYS,
    comings.REPLAYED: Mark.FOLLOWS,
}
STAYED = "was there at the end"
TRAINING = {Mark.TRAINS, Mark.WAITS, Mark.SUSPECTED, Mark.LEAVES, Mark.FOLLOWS}
OVER = {"cleared", "lost", "left", "rejoined"}  # kinds of events that end a suspicion or a planned leave

Told = dict[str, tuple[Mark, str]]
"""{seat: (mark, words)}"""


class SeatState(NamedTuple):
    """The state of a seat: its first ``rank``, its ``mark``, and the same in words, "" if it just trains.

    ``step``: the step that it trains or follows, or that its script is at; None if not in the log. ``share``: of its
    state that has arrived, while it catches up.
    """

    seat: str
    rank: int
    mark: Mark
    text: str = ""
    step: int | None = None
    share: float = 0.0

    @property
    def sign(self) -> str:
        return str(min(9, int(10 * self.share))) if self.mark == Mark.ARRIVES else self.mark


def seat_states(history: RunHistory, now: float) -> list[SeatState]:
    """Return all seats of ``history`` in order, at ``now`` in seconds since the epoch."""
    over = end(history) is not None
    told: Told = dict.fromkeys(sorted(history.seats, key=Seat.parse), (Mark.TRAINS, STAYED if over else ""))
    told |= {} if over else _waiting(history) | _asked(history)
    told |= _gone(history, now)
    coming = () if over else comings.comings(history.events)
    came = {history.seat_of[one.rank]: one for one in coming if one.rank in history.seat_of}
    told |= {seat: (PHASES[one.phase], one.told(now)) for seat, one in came.items()}
    step = history.reached + (not over)
    at = {seat: step if mark in TRAINING else None for seat, (mark, _) in told.items()}
    at |= {seat: one.step for seat, one in came.items() if one.phase == comings.RUNS}
    share = {seat: one.share or 0.0 for seat, one in came.items()}
    return [SeatState(seat, history.seats[seat], *what, at[seat], share.get(seat, 0.0)) for seat, what in told.items()]


def _gone(history: RunHistory, now: float) -> Told:
    return {
        str(one.seat): (Mark.LEFT if one.planned else Mark.LOST, f"{one.why}, {now - one.gone_at:.0f} s ago")
        for one in history.absences
        if not one.is_over
    }


def _asked(history: RunHistory) -> Told:
    """Return the seats that are suspected or asked to leave."""
    found: Told = {}
    for event in history.events:
        seat = history.seat_of.get(event.get("rank", -1), "")
        if event["event"] in OVER:
            found.pop(seat, None)
        elif event["event"] == "suspected":
            found[seat] = Mark.SUSPECTED, event.get("text", "").partition(": ")[2]
        elif event["event"] == "leaving":
            found[seat] = Mark.LEAVES, event["why"]
    found.pop("", None)
    return found


def _waiting(history: RunHistory) -> Told:
    """Return the waiting seats, and for whom they wait, if a stage is empty or all stand still."""
    if stages := history.unmanned:
        why = f"waits for stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}, which has no worker"
        return {str(seat): (Mark.WAITS, why) for seat in history.view.live}
    of = lambda whom: f" of {these(whom)}" if whom else ""
    last = (history.of("wait_graph") or [{"time": 0.0}])[-1]
    if last["time"] <= max(history.commits.values(), default=0.0):
        return {}
    return {
        seat: (Mark.WAITS, f"waits for {edge['what']}{of(edge['whom'])}, for {edge['for_s']:.0f} s")
        for edge in last.get("edges", ())
        for seat in edge["who"]
        if edge["at"] == WAITS and seat in history.seats
    }

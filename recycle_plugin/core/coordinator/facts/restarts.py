"""Whether a dead worker's process is started again, and when. Each process that dies before it is admitted makes the
next one wait longer, and in the end the seat is given up. Workers that come as one count as one.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.vocabulary.roster import WorkerId

FIRST_S, LONGEST_S = 1.0, 60.0  # from a death to the next start: at first, and at most
IN_A_ROW = 5  # starts without an admission, after which a rank is given up
LIMITS = {"always": IN_A_ROW, "never": 0}
ELSEWHERE = "python -m recycle_plugin.launch --join takes its seat"


def starts_in_a_row(rejoin: str | int) -> int:
    """Return how many starts in vain in a row the setting ``rejoin`` allows."""
    return LIMITS[rejoin] if isinstance(rejoin, str) else rejoin


class Restarts:
    """How often each unit, named by its first rank, was started in vain. ``rejoin``: "always", "never" or how often."""

    def __init__(self, rejoin: str | int = "never") -> None:
        self._limit = starts_in_a_row(rejoin)
        self._in_vain: dict[int, int] = {}  # by unit, newcomers in a row that died before admission

    def in_vain(self, unit: int) -> None:
        """Record that newcomers of ``unit`` have died before they were admitted."""
        self._in_vain[unit] = self._in_vain.get(unit, 0) + 1

    def admitted(self, unit: int) -> None:
        """Count ``unit`` anew: its newcomers were admitted, or come from elsewhere."""
        self._in_vain.pop(unit, None)

    def has_given_up(self, unit: int) -> bool:
        """Return whether too many newcomers of ``unit`` have died in a row to start another."""
        return self._in_vain.get(unit, 0) >= self._limit

    def is_last(self, unit: int) -> bool:
        """Return whether nobody follows the newcomers of ``unit`` if they die before admission."""
        return self._in_vain.get(unit, 0) + 1 >= self._limit

    def decide(
        self, worker: WorkerId, who: str, why: str, ending: bool, unguarded: bool, out: CoordinatorOutput, unit: int
    ) -> float | None:
        """Return after how many seconds the successor of ``worker``, of ``unit``, is started, or None if it is not.
        Report either as an event, except where the settings or the job's end make it plain. ``who``: its name. ``why``:
        how it ended, in words. ``unguarded``: nobody is left to start a process.
        """
        in_vain = self._in_vain.get(unit, 0)
        if ending or not self._limit:
            return None
        if unguarded or self.has_given_up(unit):
            reason = "its guard is gone" if unguarded else f"{_processes(in_vain)} died before being admitted"
            out.say(
                "not_restarted",
                f"{who} is not started again: {reason}. {why[:1].upper()}{why[1:]}; {ELSEWHERE}",
                rank=worker.rank,
                incarnation=worker.incarnation,
                in_vain=in_vain,
            )
            return None
        after_s = min(FIRST_S * 2.0**in_vain, LONGEST_S)
        again = f"; {_processes(in_vain)} died before being admitted" if in_vain else ""
        out.say(
            "restart",
            f"{who} is started again in {after_s:g} s: {why}{again}",
            rank=worker.rank,
            incarnation=worker.incarnation,
            after_s=after_s,
            in_vain=in_vain,
        )
        return after_s


def _processes(count: int) -> str:
    return "the last process" if count == 1 else f"{count} processes in a row"

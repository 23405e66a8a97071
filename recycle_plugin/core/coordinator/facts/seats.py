"""The record of a seat: who holds it or is to, and whether anybody is there to start the next process."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass
class Vacancy:
    """A vacant seat, or a vacant shard of a seat.

    ``newcomer``: the process that is to hold it. ``due``: when its supervisor starts that process, in seconds.
    ``come``: the newcomer has connected. ``heard``: when its supervisor last reported its process. ``before``: the last
    holder, or the process that was to be; ``how``: how that process ended, in words; ``in_vain``: it ended before it
    was admitted.
    """

    newcomer: WorkerId | None = None
    due: float = 0.0
    come: bool = False
    heard: float | None = None
    before: WorkerId | None = None
    how: str = ""
    in_vain: bool = False


@dataclass
class SeatRecord:
    """The seat of a ``rank``, or a shard of one.

    ``name``: of the rank, for people. ``host``: where its processes start. ``unit``: the ranks that come as one, itself
    included. These are known from the job's start. ``holder``: the incarnation that holds the seat or is to.
    ``newest``: the largest incarnation given out. ``vacancy``: None while a member holds the seat, as far as is known
    for certain.

    Of its supervisor, ``absent_since``: when it was gone, in seconds. ``silent``: its host is silent. ``unguarded``:
    nobody is left to start a process. ``staying``: it is to stay, whatever its last process reports. ``away``: the
    holder is to leave as planned, or has, until the seat is admitted again.
    """

    rank: int
    name: str = ""
    host: str = ""
    unit: tuple[int, ...] = ()
    holder: int | None = None
    newest: int | None = None
    vacancy: Vacancy | None = None
    absent_since: float | None = None
    silent: bool = False
    unguarded: bool = False
    staying: bool = False
    away: bool = False

    @property
    def is_filled(self) -> bool:
        """Whether the seat is vacant and a newcomer is to hold it."""
        return self.vacancy is not None and self.vacancy.newcomer is not None

    @property
    def has_starter(self) -> bool:
        """Whether a supervisor is there that can start a process."""
        return not (self.unguarded or self.silent) and self.absent_since is None

    @property
    def unused(self) -> int:
        return max(self.newest or 0, self.holder or 0) + 1

    def is_for(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` is to hold the seat, and is no member yet."""
        return self.vacancy is not None and self.vacancy.newcomer == worker

    def awaits(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` is to hold the seat, and has not connected."""
        return self.vacancy is not None and self.vacancy.newcomer == worker and not self.vacancy.come

"""The record of a seat: who holds it, or is to, and whether anybody is there to start the next process."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass
class Vacancy:
    """A vacant seat, or a shard of it.  ``newcomer``: who is to hold it; ``due``: when its own supervisor starts that,
    in seconds; ``come``: it has connected; ``heard``: when its supervisor has last said that its process is there.
    ``before``: who held it last, or was to, ``how`` that has ended, in words, and whether ``in_vain``: before it was
    admitted.
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
    """The seat of a ``rank``, or a shard of one.  ``name``: of the rank, for people; ``host``: where its processes are
    started; ``unit``: the ranks that come as one, itself included; these are known once the job has started.

    ``holder``: the incarnation that holds it, or is to; ``newest``: the largest that anybody has got; ``vacancy``: None
    while a member holds it, as far as is known for certain.

    Of its supervisor ``absent_since``: since when it is gone, in seconds; ``silent``: nothing is heard of its host;
    ``unguarded``: nobody is left to start a process; ``staying``: it is to stay, whatever its last process has said.

    ``away``: its holder is to leave as planned, or has, until it is admitted.
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
        """Whether a newcomer is to hold the seat, which is vacant."""
        return self.vacancy is not None and self.vacancy.newcomer is not None

    @property
    def has_starter(self) -> bool:
        """Whether a supervisor is there that can start a process."""
        return not (self.unguarded or self.silent) and self.absent_since is None

    @property
    def unused(self) -> int:
        """An incarnation that nobody has had."""
        return max(self.newest or 0, self.holder or 0) + 1

    def is_for(self, worker: WorkerId) -> bool:
        """Whether ``worker`` is to hold the seat, and is no member yet."""
        return self.vacancy is not None and self.vacancy.newcomer == worker

    def awaits(self, worker: WorkerId) -> bool:
        """Whether ``worker`` is to hold the seat, and has not connected."""
        return self.vacancy is not None and self.vacancy.newcomer == worker and not self.vacancy.come

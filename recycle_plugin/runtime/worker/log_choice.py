"""Chooses the boundaries that a job logs if ``recycle.log.boundaries`` is "auto", and tells what any choice costs.

Each worker brings its measurements since the last checkpoint to the barrier at which a checkpoint ends. The first live
worker has the figures of all, and chooses. The coordinator sends its choice to everybody with the checkpoint
(core/coordinator/replays.py), so there is one choice, whatever others would have chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from recycle_plugin.core.vocabulary.log_boundaries import AUTO, groups, in_words, stage_hosts
from recycle_plugin.core.vocabulary.log_figures import StageFigures
from recycle_plugin.core.worker.log_meter import LogMeter
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S, measured
from recycle_plugin.planner.log_selection import Line, Selection, choose_anew, in_bytes, selection
from recycle_plugin.runtime.control.session import Session


class LogChoice:
    """One worker's choice of what the job logs, by the settings ``boundaries`` and ``budget`` (bytes), measured by
    ``meter``. ``planned(every)``: the line by an earlier run, for ``every`` steps between checkpoints; None to use
    measurements. ``state_bytes()``: bytes of this worker's state.
    """

    def __init__(
        self,
        session: Session,
        boundaries: str | tuple[int, ...],
        budget: int | None,
        stage: int,
        meter: LogMeter,
        planned: Callable[[int], Line | None],
        state_bytes: Callable[[], int],
    ) -> None:
        self._session, self._budget, self._stage, self._meter = session, budget, stage, meter
        self._planned, self._state_bytes = planned, state_bytes
        self._from = self._begun = meter.total  # when the last checkpoint began, and the one under way
        self._said: tuple[object, ...] = ()
        self._auto = boundaries == AUTO
        self._steady = not self._auto  # the last checkpoint has changed nothing
        self._too_large = False

    def begin(self) -> StageFigures:
        """Return this worker's figures since the last checkpoint, for the barrier at the end of the next one."""
        self._begun = self._meter.total
        return StageFigures(self._stage, self._state_bytes(), self._begun.since(self._from))

    def made(self) -> None:
        """Count from the begin of the last checkpoint, which is whole."""
        self._from = self._begun

    def forget(self) -> None:
        """Count from now on: the membership has changed, and so has the duration of steps."""
        self._from = self._meter.total

    def choose(self, found: Sequence[StageFigures], every: int) -> tuple[int, ...]:
        """Return the boundaries to log from now on, by the figures ``found`` by all and ``every`` steps between
        checkpoints. Report the choice if it is news.
        """
        view, budget, hosts = self._session.view, self._budget, stage_hosts(self._session.view.roster)
        now = tuple(sorted(view.logged if view.logged is not None else range(len(hosts) - 1)))
        planned = self._planned(every)
        line = measured(found, hosts, every) if planned is None else planned
        if line is None:
            self._say_unknown(now, len(hosts))
            return now
        chosen = choose_anew(line, now, budget) if self._auto else selection(line, now, budget)
        self._say(chosen, "measured" if planned is None else "by an earlier run")
        self._compare(sum(each.figures.logged for each in found))
        self._steady = chosen.logged == now
        return chosen.logged

    def _say_unknown(self, logged: tuple[int, ...], stages: int) -> None:
        """Report, once, which boundaries are logged while their cost is not measured yet."""
        if self._said:
            return
        self._said = (logged, None)
        chooses = "; recycle.log.boundaries chooses once steps are measured" * self._auto
        self._session.note(
            "log_boundaries",
            f"{in_words(logged, stages)}; its cost is not measured yet{chooses}",
            boundaries=logged,
            groups=_inclusive(groups(logged, stages)),
        )

    def _say(self, chosen: Selection, how: str) -> None:
        """Report the logged boundaries and their cost, if either has changed."""
        if self._said == (chosen.logged, chosen.fits):
            return
        self._said = (chosen.logged, chosen.fits)
        self._session.note(
            "log_boundaries",
            f"{chosen}, not counting the start of the next process ({how}; logs and checkpoints are read at "
            f"{STORAGE_BYTES_PER_S / 1e9:g} GB/s)",
            boundaries=chosen.logged,
            groups=_inclusive(chosen.groups),
            every=chosen.every,
            log_bytes=chosen.log_bytes,
            expected_s=round(chosen.expected_s, 4),
            worst_s=round(chosen.worst_s, 4),
            budget=chosen.budget,
            fits=chosen.fits,
        )

    def _compare(self, logged: int) -> None:
        """Report, once, that the logs exceeded the budget since the last checkpoint, if the choice did not change."""
        budget = self._budget
        before, self._too_large = self._too_large, budget is not None and self._steady and logged > budget
        if budget is None or before or not self._too_large:
            return
        fewer = "" if self._auto else f' set recycle.log.boundaries to "{AUTO}",'
        self._session.note(
            "log_budget",
            f"the logs took {in_bytes(logged)} since the last checkpoint, and recycle.log.budget is "
            f"{in_bytes(budget)}:{fewer} raise it, or raise recycle.checkpoint.overhead, so that checkpoints are "
            "made more often",
            log_bytes=logged,
            budget=budget,
        )


def _inclusive(found: Iterable[tuple[int, int]]) -> list[list[int]]:
    return [[first, end - 1] for first, end in found]

"""Notes on the throughput floor: how many more losses the job can have before it is slower than ``max_slowdown``
allows.

The first live worker gives one after each change of the membership.  The plans of failures that have not happened are
made in a thread; the newest membership counts.
"""

from __future__ import annotations

import threading
from functools import cached_property

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.runtime.control.session import Session


class ThroughputNotes:
    """Notes on the throughput floor of a job.

    ``full``: the view with everybody there; ``costs``: without what is measured meanwhile; ``max_slowdown``: the
    setting.
    """

    def __init__(
        self, session: Session, full: ClusterView, costs: CostModel, policy: Policy, max_slowdown: float
    ) -> None:
        self._session, self._full, self._costs, self._policy = session, full, costs, policy
        self._max_slowdown = max_slowdown
        self._view: ClusterView | None = None

    def say(self, view: ClusterView, costs: CostModel) -> None:
        """Work out, in a thread, and note how far ``view`` is from the floor; ``costs`` are what its plan was made
        with.
        """
        self._view = view
        threading.Thread(target=self._work, args=(view, costs), name="recycle: throughput floor", daemon=True).start()

    def _work(self, view: ClusterView, costs: CostModel) -> None:
        longest = self._period_us / (1 - self._max_slowdown)
        found = planner.margin(view, costs, self._policy, int(longest))
        if self._view is view and found.losses:  # else the coordinator ends the job
            self._session.note("throughput_margin", self._text(found), stage=found.stage, losses=found.losses)

    def _text(self, found: planner.Margin) -> str:
        losses = "one more loss" if found.losses == 1 else f"{found.losses} more losses"
        if found.period_us is None:
            return (
                f"{losses} of stage {found.stage} and nobody is left there; "
                "none before makes the job slower than recycle.max_slowdown allows"
            )
        share = self._period_us / found.period_us
        return (
            f"{losses} of stage {found.stage} and the job ends: at {share:.0%} of the fault-free throughput, "
            f"by recycle.max_slowdown {self._max_slowdown:g}"
        )

    @cached_property
    def _period_us(self) -> int:
        return planner.plan(self._full, self._costs, self._policy).period_us

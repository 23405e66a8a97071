"""The way of a worker that comes back into its job. Its script gets the results of steps that are over, while its
stage's state arrives and may be ahead of the script.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.worker import pushed
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.runtime.state.surroundings import SetByScript
from recycle_plugin.runtime.worker.blocking_loop import drain
from recycle_plugin.runtime.worker.changed_state import StateCounts
from recycle_plugin.runtime.worker.newcomer import NewcomersScript
from recycle_plugin.runtime.worker.parts import Parts


class Entry:
    """The entry of the newcomer that has ``parts``. It ends when the newcomer is a member with its stage's state.
    ``scripted``: what its script has set for its steps. ``ask()`` asks the coordinator for a place. ``prepared()``: its
    way in, made at the first call. ``let_in()`` is called when it is a member.
    """

    def __init__(
        self,
        parts: Parts,
        scripted: SetByScript,
        ask: Callable[[], None],
        prepared: Callable[[], Newcomer],
        let_in: Callable[[], None],
    ) -> None:
        self._parts, self._scripted, self._ask, self._prepared, self._let_in = parts, scripted, ask, prepared, let_in
        self._script = NewcomersScript(
            parts.session, parts.framework.optimizer, StateCounts(parts.state), ask, self._follow
        )
        self._newcomer: Newcomer | None = None

    @property
    def evaluated(self) -> int:
        """How many evaluations the script has gone through."""
        return self._script.evaluated

    # --- what is over ------------------------------------------------------------------------------

    def past_loss(self) -> float | None:
        """Return the script's next loss if that step is over; None to train it here, with the script's settings. Raises
        Refused if the script has gone on after a refusal.
        """
        self._parts.session.hooks.check_not_refused()
        step = self._script.position + 1
        self._scripted.begin(step)
        loss = self._script.loss()
        if loss is None:
            self._scripted.apply(step)  # settings that came from others meanwhile are older
        else:
            self._scripted.end()
        return loss

    def past_evaluation(self) -> float | None:
        """Return the mean loss of the script's next evaluation if it is over; None if this worker takes part.
        Raises Refused if the script has gone on after a refusal.
        """
        self._parts.session.hooks.check_not_refused()
        return None if self.meets(Barrier(Meets.EVALUATED, number=self.evaluated + 1)) else self._script.evaluation()

    def may_skip(self) -> bool:
        """Whether the script may skip its next step, which is over and not the last one."""
        return self._script.may_skip()

    # --- and what is not ---------------------------------------------------------------------------

    def join(self) -> None:
        """Wait until this newcomer is a member. Its script begins at the others' step. Raises Refused if the script has
        gone on after a refusal.
        """
        self._parts.session.hooks.check_not_refused()
        self._parts.feed.begin()
        self._ask()
        drain(pushed.follow(self._begun(), self._parts.session.view))
        self._let_in()

    def meets(self, barrier: Barrier) -> bool:
        """Whether others may wait at ``barrier`` for this newcomer, whose stage nobody had; if so, it is a member."""
        if self._newcomer is None or not drain(self._newcomer.meets(barrier)):
            return False
        self._let_in()
        return True

    def _follow(self, step: int) -> bool:
        """Wait until ``step`` is over, and return True. Return False if this worker, now a member, is to train it."""
        newcomer = self._begun()
        self._parts.feed.begin()
        drain(newcomer.start())
        if drain(newcomer.train(step)):
            return True
        self._let_in()
        return False

    def _begun(self) -> Newcomer:
        self._newcomer = self._prepared()
        return self._newcomer

    # --- what the script sees of the state -----------------------------------------------------------

    @property
    def caught_up(self) -> bool:
        """Whether the state is that of the script's step."""
        return self._newcomer is not None and self._newcomer.clock == self._script.position

    @property
    def drops_changes(self) -> bool:
        """Whether the script's changes of the state are dropped, since the state arrives with the other scripts'
        changes. Not so if the stage may be replayed: nobody sends it then.
        """
        return self._parts.log is None and (self._newcomer is None or not self._newcomer.enters)

    def check_trained(self) -> None:
        """Raise RecycleError if the state is arriving already: it is that of the parameters trained before."""
        if self._newcomer is not None and self._newcomer.asked > 0:
            raise self._parts.session.hooks.refusal(
                "the script of a worker that comes back freezes or thaws parameters, or adds groups, after step "
                f"{self._script.position}, while the state of its stage is on its way: its next process gets the state "
                "with these changes"
            )

    def check_caught_up(self) -> None:
        """Raise RecycleError if the script touches parameters that are not those of its step."""
        if not self.caught_up:
            raise self._parts.session.hooks.refusal(
                f"the script of a worker that comes back touches parameters after step {self._script.position}, "
                "which have not arrived yet: skip that while engine.behind is true, let engine.on_join bring what it "
                'needs, or set recycle.rejoin to "never"'
            )

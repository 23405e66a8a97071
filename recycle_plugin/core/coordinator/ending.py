"""How a job ends: at once where nobody can go on, or after a step that all come to; and that it has, when all have
left.

* A planned end holds from a step which nobody can have started.  The first one stays; only a failure goes before it.
* A failure is final, is said once, and names the checkpoint to go on from where it may cost steps.
* At a planned end all steps are committed, and a loss after that is one only for those who do something with the others
  yet, as saving the last state.
* Once a worker has left that was not to, its training script is through, and so all steps are committed: whoever dies
  after that is no loss.  But what a script does behind the last step counts: where that ends with an error, so does the
  job, once the others are through.
* All scripts end after the same step, or the job has failed.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.output import SUPERVISORS, WORKERS, CoordinatorOutput
from recycle_plugin.core.messages.protocol import End, Over
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import Member

NAMED = 3  # causes in a line: one signal may reach all supervisors


class Ending:
    """``ended``: how, once that is decided; ``finishing``: a training script is through; ``stranded``: why, at a
    planned end, those left can't go on; ``checkpoint``: the last one's path; ``causes``: of a planned end, all that
    asked for it.
    """

    def __init__(self) -> None:
        self.ended: End | None = None
        self.finishing = False
        self.stranded = ""
        self.checkpoint = ""
        self.causes: list[str] = []
        self._code = 0
        self._first_through: tuple[str, int] | None = None  # whose script was through first, and after which step

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.ended.failed

    @property
    def safe_point(self) -> str:
        return f"Last checkpoint: {self.checkpoint}" if self.checkpoint else "No checkpoint was saved"

    def through(self, committed: int) -> bool:
        """All steps up to a planned end are committed."""
        return self.ended is not None and not self.ended.failed and committed >= self.ended.step - 1

    def fail(self, reason: str, out: CoordinatorOutput, cause: str = "", killed: int | None = None) -> None:
        if self.failed:
            return
        self.ended = End(0, reason, failed=True)
        out.say(
            "end",
            f"the job ends: {f'{cause}, and so ' * bool(cause)}{reason}",
            **({} if killed is None else {"killed": killed}),
        )
        out.tell(WORKERS, self.ended)
        out.tell(SUPERVISORS, Over(1))

    def plan(self, committed: int, reason: str, code: int, out: CoordinatorOutput, cause: str = "") -> None:
        """``cause``: what has led to ``reason``."""
        why = reason + f" ({cause})" * bool(cause)
        if why not in self.causes:
            self.causes.append(why)
        if self.ended is None:
            self.ended = End(unstarted(committed), reason, failed=False, code=code)
            out.tell(WORKERS, self.ended)

    def goodbye(self, code: int, finished: bool) -> None:
        """A worker ends with that, and the job ends with the largest; ``finished``: it was not to leave before."""
        self._code = max(self._code, code)
        self.finishing |= finished

    def scripts_end(self, member: Member, step: int) -> None:
        """That of ``member`` has, after ``step``."""
        self._first_through = self._first_through or (str(member), step)

    def uneven(self, member: Member, step: int) -> str:
        """Why ``member``, which is in ``step``, can't go on, if that is so."""
        if self._first_through is None or step <= self._first_through[1]:
            return ""
        who, last = self._first_through
        return (
            f"the training script of {who} ended after step {last}, and that of {member} is in step {step}: "
            "all have to train equally many steps, so see to what ends the loop on some ranks only"
        )

    def finish(self, committed: int, crash: str, out: CoordinatorOutput) -> None:
        """All have left.  ``crash``: what scripts have ended with that had come to the last step."""
        more = f"; {len(self.causes) - NAMED} more" if len(self.causes) > NAMED else ""
        why = "; ".join(([crash] if crash else []) + self.causes[:NAMED]) + more
        out.say(
            "finished",
            f"the job has ended after step {committed}: {why}"
            if why
            else f"all workers have left after step {committed}",
            step=committed,
        )
        out.tell(SUPERVISORS, Over(self._code or int(bool(crash))))

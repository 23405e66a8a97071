"""The end of a job: at once where nobody can go on, or after a step that all come to; and that it has come, when all
have left.

* A planned end holds from a step which nobody can have started.  The first one stays; only a failure goes before it.
* A failure is final, is said once, and names the checkpoint to go on from where it may cost steps.
* At a planned end all steps are committed, and a loss after that is one only for those who do something with the others
  yet, as saving the last state.
* Once a worker has left that was not to, its training script is through, and so all steps are committed: whoever dies
  after that is no loss, as long as of each stage somebody's script comes to its end.  What a script does behind the
  last step counts: where that ends with an error, or is done by nobody of a stage, so does the job, once the others are
  through.
* All scripts end after the same step, or the job has failed.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.output import SUPERVISORS, WORKERS, CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import End, Over
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

NAMED = 3  # causes in a line: one signal may reach all supervisors
MOST = 100  # causes that are counted
KEPT = 20  # checkpoints, of which the last may have been removed


class Ending:
    """The way in which a job ends.  ``ended``: how, once that is decided; ``finishing``: a training script is through;
    ``stranded``: why, at a planned end, those left can't go on; ``checkpoints``: the paths of those that are saved, and
    not removed, in order; ``causes``: of a planned end, all that asked for it; ``held``: whose scripts are through, and
    who may not go yet; ``undone``: why the job has failed though all steps are committed, once all are through.
    """

    def __init__(self) -> None:
        self.ended: End | None = None
        self.finishing = False
        self.stranded = ""
        self.checkpoints: list[str] = []
        self.causes: list[str] = []
        self.held: set[WorkerId] = set()
        self.undone = ""
        self._code = 0
        self._said = False  # that all have left
        self._first_through: tuple[str, int] | None = None  # whose script was through first, and after which step

    @property
    def failed(self) -> bool:
        """Whether the job has ended because it could not go on."""
        return self.ended is not None and self.ended.failed

    @property
    def checkpoint(self) -> str:
        """The path of the last checkpoint that is there, or ""."""
        return self.checkpoints[-1] if self.checkpoints else ""

    def saved(self, path: str) -> None:
        """Notes that the checkpoint at ``path`` is whole."""
        self.checkpoints = [each for each in self.checkpoints if each != path][-KEPT:] + [path]

    def unusable(self, path: str) -> None:
        """Notes that the checkpoint at ``path`` is nothing to go on from."""
        self.checkpoints = [each for each in self.checkpoints if each != path]

    @property
    def safe_point(self) -> str:
        """The last checkpoint in words, for messages."""
        return f"Last checkpoint: {self.checkpoint}" if self.checkpoint else "No checkpoint was saved"

    def through(self, committed: int) -> bool:
        """Whether all steps up to a planned end are committed, where ``committed`` is the last one."""
        return self.ended is not None and not self.ended.failed and committed >= self.ended.step - 1

    def fail(self, reason: str, out: CoordinatorOutput, cause: str = "", killed: int | None = None) -> None:
        """Ends the job at once, with an error, and says so; once only.  ``cause``: what has led to ``reason``;
        ``killed``: a rank whose worker was killed.
        """
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
        """Ends the job after a step that all come to; the first such end stays.  ``cause``: what has led to
        ``reason``.
        """
        why = reason + f" ({cause})" * bool(cause)
        if why not in self.causes and len(self.causes) < MOST:
            self.causes.append(why)
        if self.ended is None:
            self.ended = End(unstarted(committed), reason, failed=False, code=code)
            out.tell(WORKERS, self.ended)

    def goodbye(self, code: int, finished: bool) -> None:
        """Notes that a worker ends with exit code ``code``, and the job ends with the largest.  ``finished``: it was
        not to leave before.
        """
        self._code = max(self._code, code)
        self.finishing |= finished

    @property
    def some_through(self) -> bool:
        """Whether somebody's script has ended after a step that others' may go beyond."""
        return self._first_through is not None

    def scripts_end(self, member: Member, step: int) -> None:
        """Notes that the script of ``member`` has ended, after ``step``."""
        self._first_through = self._first_through or (str(member), step)

    def uneven(self, member: Member, step: int) -> str:
        """The reason why ``member``, which is in ``step``, can't go on since another script has ended before; else
        empty.
        """
        if self._first_through is None or step <= self._first_through[1]:
            return ""
        who, last = self._first_through
        return (
            f"the training script of {who} ended after step {last}, and that of {member} is in step {step}: "
            "all have to train equally many steps, so see to what ends the loop on some ranks only"
        )

    def finish(self, committed: int, crash: str, out: CoordinatorOutput) -> None:
        """Says that all have left, and after which step.  ``crash``: the errors of scripts that had come to the last
        step.
        """
        out.tell(SUPERVISORS, Over(self._code or int(bool(crash))))
        if self._said:  # somebody was still to leave who was no member any more
            return
        self._said = True
        more = f"; {len(self.causes) - NAMED} more" if len(self.causes) > NAMED else ""
        why = "; ".join(([crash] if crash else []) + self.causes[:NAMED]) + more
        if self.ended is not None and self.ended.code:
            why += f". {self.safe_point}"
        out.say(
            "finished",
            f"the job has ended after step {committed}: {why}"
            if why
            else f"all workers have left after step {committed}",
            step=committed,
        )

"""The end of a job: at once if nobody can go on, or after a step that all reach.

* A planned end holds from a step that nobody can have started. The first planned end stays; only a failure overrides
  it.
* A failure is final, is reported once, and names the checkpoint to go on from if it may cost steps.
* At a planned end all steps are committed. A loss after that matters only to workers that still do something together,
  such as saving the last state.
* Once a worker has left that was not asked to, its training script is through, so all steps are committed. A death
  after that is no loss, as long as a script of each stage comes to its end. What a script does behind the last step
  counts: if it ends with an error, or no worker of a stage finishes it, the job fails once the others are through.
* All scripts end after the same step, or the job has failed.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.output import SUPERVISORS, WORKERS, CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import End, Over
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

NAMED = 3  # causes in an event: one signal may reach all supervisors
MOST = 100  # causes kept
KEPT = 20  # earlier checkpoints: the last may have been removed


class Ending:
    """How a job ends.

    ``ended``: how, once decided. ``finishing``: a training script is through. ``stranded``: why those left can't go on
    at a planned end. ``checkpoints``: paths of saved checkpoints that were not removed, in order. ``causes``: all
    requests for a planned end. ``held``: workers whose scripts are through and that may not go yet. ``undone``: why the
    job has failed though all steps are committed.
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
        self._said = False  # whether "finished" was reported
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
        """Record that the checkpoint at ``path`` is whole."""
        self.checkpoints = [each for each in self.checkpoints if each != path][-KEPT:] + [path]

    def unusable(self, path: str) -> None:
        """Record that the job can't go on from the checkpoint at ``path``."""
        self.checkpoints = [each for each in self.checkpoints if each != path]

    @property
    def safe_point(self) -> str:
        """The last checkpoint in words, for messages."""
        return f"Last checkpoint: {self.checkpoint}" if self.checkpoint else "No checkpoint was saved"

    def through(self, committed: int) -> bool:
        """Return whether all steps up to a planned end are committed, if ``committed`` is the last committed step."""
        return self.ended is not None and not self.ended.failed and committed >= self.ended.step - 1

    def fail(self, reason: str, out: CoordinatorOutput, cause: str = "", killed: int | None = None) -> None:
        """End the job at once with an error, once. ``cause``: of ``reason``. ``killed``: rank of a killed worker."""
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
        """End the job after a step that all reach. The first such end stays. ``cause``: what has led to ``reason``."""
        why = reason + f" ({cause})" * bool(cause)
        if why not in self.causes and len(self.causes) < MOST:
            self.causes.append(why)
        if self.ended is None:
            self.ended = End(unstarted(committed), reason, failed=False, code=code)
            out.tell(WORKERS, self.ended)

    def goodbye(self, code: int, finished: bool) -> None:
        """Record a worker's exit code; the job ends with the largest. ``finished``: it was not asked to leave."""
        self._code = max(self._code, code)
        self.finishing |= finished

    @property
    def some_through(self) -> bool:
        """Whether a script has ended after a step that other scripts may go beyond."""
        return self._first_through is not None

    def scripts_end(self, member: Member, step: int) -> bool:
        """Record that the script of ``member`` has ended after ``step``. Return whether it is the first."""
        first = self._first_through is None
        self._first_through = self._first_through or (str(member), step)
        return first

    def uneven(self, member: Member, step: int) -> str:
        """Return why ``member`` can't go on in ``step`` if another script ended before that step; else ""."""
        if self._first_through is None or step <= self._first_through[1]:
            return ""
        who, last = self._first_through
        return (
            f"the training script of {who} ended after step {last}, and that of {member} is in step {step}: "
            "all scripts have to train the same number of steps, so find out why the loop ends earlier on some ranks"
        )

    def finish(self, committed: int, crash: str, out: CoordinatorOutput) -> None:
        """Report that all have left, and after which step. ``crash``: errors of scripts that reached the last step."""
        out.tell(SUPERVISORS, Over(self._code or int(bool(crash))))
        if self._said:  # a worker that was no member any more has left only now
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

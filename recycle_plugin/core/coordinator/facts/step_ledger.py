"""The ledger of a job's steps: which workers have applied each step, their results, and the committed steps. A step is
committed when every live worker has applied it. core/coordinator/commits.py decides which workers are live, and what
follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from recycle_plugin.core.coordinator.facts.output import LAST_STAGE, WORKERS, CoordinatorOutput, Whom
from recycle_plugin.core.coordinator.facts.recorded import Recorder
from recycle_plugin.core.coordinator.facts.replica_check import Fingerprints, Mismatch
from recycle_plugin.core.coordinator.facts.slowness import Slowness
from recycle_plugin.core.coordinator.facts.step_figures import StepFigures
from recycle_plugin.core.coordinator.facts.step_validation import StepValidation
from recycle_plugin.core.messages.contributions import EACH, LOSS, MEAN, NORM, SHARE, Contributions
from recycle_plugin.core.messages.from_coordinator import Collected, Committed
from recycle_plugin.core.messages.from_workers import Contribution, Fingerprint, Stepped
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.losses import Loss, logs_more, mean, number
from recycle_plugin.core.vocabulary.packed_data import PackedData
from recycle_plugin.core.vocabulary.recovery_plan import counted, uninformed
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches


class StepLedger:
    """The coordinator's knowledge of the steps. ``committed``: the last committed step. ``shards``: how many each seat
    has. ``slowness``: the slow workers. ``figures``: sums of the workers' figures.
    """

    def __init__(
        self,
        committed: int = 0,
        validation: StepValidation | None = None,
        shards: int = 1,
        slowness: Slowness | None = None,
    ) -> None:
        self.committed = committed
        self.validation = validation or StepValidation()
        self.slowness = slowness or Slowness()
        self.recorded = Recorder(committed)
        self._applied: dict[WorkerId, int] = {}
        # (roster, committed, members that have not applied the next step)
        self._late: tuple[Roster, int, set[WorkerId]] = Roster(), 0, set()
        self._contributions = Contributions(shards)
        self._fingerprints = Fingerprints()
        self.figures = StepFigures()
        self.valid_from = 0  # the generation from which work counts: the last that discarded work

    @property
    def unfinished(self) -> tuple[int, int]:
        """The steps that somebody may have begun: two at most (core/vocabulary/commit_rule.py)."""
        return self.committed + 1, self.committed + 2

    # --- what workers say --------------------------------------------------------------------------

    def add_compute_time(self, worker: WorkerId, step: int, time: ComputeTime) -> None:
        """Record the time that ``step`` took on a worker. Steps that no worker can have begun, or that are long
        committed, are ignored.
        """
        if not self.committed <= step < unstarted(self.committed):
            return
        self.figures.add(worker, step, time)
        self.slowness.add(worker, step, time)

    def add_fingerprint(self, message: Fingerprint) -> None:
        """Record the hash of a worker's state after a step."""
        self._fingerprints.add(message)

    def apply(self, message: Stepped, roster: Roster) -> range:
        """Record that a worker has applied a step. Return the steps after the last committed one that all of ``roster``
        have applied. O(members) after a commit or a change of roster, else O(1) until the last member has applied the
        step.
        """
        self._applied[message.worker] = count = max(message.step, self._applied.get(message.worker, 0))
        of, behind, late = self._late
        if of is not roster or behind != self.committed:
            late = {worker for worker in roster.workers if self._applied.get(worker, 0) <= self.committed}
            self._late = roster, self.committed, late
        if count > self.committed:
            late.discard(message.worker)
        if late:
            return range(0)
        return range(self.committed + 1, min(self._applied[worker] for worker in roster.workers) + 1)

    def contribute(self, message: Contribution, out: CoordinatorOutput) -> float | None:
        """Record a contribution, and tell all workers what is complete. Return the norm of a step that must be taken
        back, or None.
        """
        if message.step <= self.committed:
            return None  # repeated after a failure, and the others were quicker
        if message.name == SHARE:
            shares = {stage: number(share) for stage, share in message.values.items()}
            return self.validation.add(message.step, shares, message.shard)
        values = self._contributions.add(message)
        if values is None:
            return None
        if message.name == NORM and self.validation.hopeless(norm := sum(map(number, values.values()))):
            return norm
        self._tell_collected(message.step, message.name, values, out)
        return None

    def tell_again(self, worker: WorkerId, out: CoordinatorOutput) -> None:
        """Send ``worker``, which enters in the middle of a step, the numbers of the step that all others have been
        told.
        """
        for (step, name), values in sorted(self._contributions.told.items()):
            _tell(step, name, values, worker, worker, out)

    # --- what follows ------------------------------------------------------------------------------

    def commit(self, step: int, roster: Roster, now: float, out: CoordinatorOutput, batches: StepBatches) -> None:
        """Commit ``step``, for good. ``roster``: live members. ``now``: seconds. ``batches``: contributors by step."""
        self.committed = step
        self.validation.committed(step)
        self.slowness.committed(step, roster, now)
        for slow in self.slowness.replicas_changed(roster):
            slow.tell(out)
        for late, values in self._contributions.committed(step):  # a lost worker took the rest with it
            out.say(
                "warning",
                f"the loss of step {late} is the mean of {len(values)} micro-batches: the others' losses were lost",
                step=late,
            )
            self._tell_collected(late, LOSS, values, out)
        figures, more = self.figures.committed(
            step, {rank: seat.stage for rank, seat in roster.seats_by_rank().items()}, now
        )
        out.tell(WORKERS, Committed(step, figures))
        share = batches.share(step)
        if share.whole:
            out.say("committed", f"step {step} committed", step=step, **figures, **more)
        else:
            text = f"step {step} committed: {share} have contributed, at {share.rate_factor:.3g} of the learning rate"
            factor, of = round(share.rate_factor, 6), list(batches.of(step))
            more |= {"contributed": of, "replicas": share.total, "rate_factor": factor}
            out.say("committed", text, step=step, **figures, **more)

    def mismatches(self, roster: Roster) -> Iterator[Mismatch]:
        """Return the replicas that differ in committed steps that were not compared yet."""
        return self._fingerprints.committed(self.committed, roster) if self._fingerprints else iter(())

    def rebalance(self, roster: Roster, now: float, out: CoordinatorOutput) -> str | None:
        """Return why work is to be dealt out anew, if a worker has become slow or is slow no longer; else None."""
        news = self.slowness.seats_changed(now)
        for seat, percent in news.items():
            out.say(
                "rebalance",
                f"{roster.holder(seat)} needs {percent}% of the time that its stage's other workers need: "
                "work is dealt out anew",
                seat=str(seat),
                percent=percent,
            )
        return f"pace of {', '.join(map(str, news))}" if news else None

    def sum_up(self, out: CoordinatorOutput) -> None:
        """Report how many steps were judged and rejected; no step follows."""
        if (validation := self.validation).judged:
            out.say(
                "validated",
                f"{validation.rejected} of {validation.judged} steps were rejected and applied again",
                rejected=validation.rejected,
                judged=validation.judged,
            )

    # --- over changes of the membership ------------------------------------------------------------

    def rewind(self, step: int, out: CoordinatorOutput) -> None:
        """Go on from a checkpoint of ``step``, earlier or later than the last step."""
        self.committed = step
        self.recorded.rewind(step)
        out.say("loaded", f"all workers go on from a checkpoint of step {step}", step=step)

    def agree(
        self, generation: int, counts: Iterable[int], held: Mapping[str, dict[str, str]], all_valid_from: Iterable[int]
    ) -> tuple[int, float | None, bool]:
        """Decide where a generation goes on. Its members have applied ``counts`` steps, hold ``held``, and their data
        is valid from ``all_valid_from``. Return the last step that is committed by that, the norm that the next one was
        rejected for (or None), and whether later work is discarded (core.messages.from_coordinator.Resume).
        """
        fewest, behind = min(counts), min(all_valid_from) < self.valid_from
        committed = fewest - self._unheard(fewest, held, behind)
        norm, rejected = self.validation.rejection(committed + 1), self._unheard(committed + 1, held, behind)
        if rejected:
            self.valid_from = generation
            self._contributions.discard_after(committed + 1)
            self.validation.discard_after(committed + 1)
        return committed, norm, rejected

    def lose(self, committed: int, held: Mapping[str, dict[str, str]], last_stage: int) -> None:
        """Drop losses of the steps after ``committed`` that are computed again, since nobody holds what came of them.
        Costs time in proportion to the micro-batches held by ``last_stage``.
        """
        have = [PackedData(packed) for seat, packed in held.items() if Seat.parse(seat).stage == last_stage]
        for step in (committed + 1, committed + 2):
            if (kept := counted(have, step, last_stage)) is not None:
                self._contributions.lose(step, {str(micro_batch) for micro_batch in kept})

    def without(self, batches: StepBatches, micro_batches: int, out: CoordinatorOutput) -> None:
        """Drop contributions that no longer count, and tell losses that are complete by that, or were told for a void
        step. ``micro_batches``: of a replica.
        """
        for step, values in self._contributions.without(batches, micro_batches):
            self._tell_collected(step, LOSS, values, out)

    def leave_out(self, step: int) -> None:
        """Drop contributions to ``step``, which plain iterators can't fill, and to later steps."""
        self._contributions.discard_after(step - 1)
        self.validation.discard_after(step - 1)

    def resume(self, roster: Roster, committed: int) -> None:
        """Let the members of ``roster`` go on from step ``committed``; those ahead report their step again."""
        self._applied = dict.fromkeys(roster.workers, committed)
        self._late = Roster(), 0, set()
        self.slowness.interrupted(roster)

    def _unheard(self, step: int, held: Mapping[str, dict[str, str]], behind: bool) -> bool:
        """Return whether ``step`` was rejected and somebody does not know, or is ``behind``. ``behind``: a worker has
        found the rejection out by itself and applied the step as all have by now, but a newer generation came before it
        heard that what others have computed since is discarded.
        """
        if self.validation.rejection(step) is None:
            return False
        return behind or bool(uninformed({Seat.parse(seat): PackedData(packed) for seat, packed in held.items()}, step))

    def _tell_collected(self, step: int, name: str, values: dict[str, Loss], out: CoordinatorOutput) -> None:
        _tell(step, name, values, WORKERS, LAST_STAGE, out)
        if name == LOSS:
            self.recorded.lost(step, values)
            out.say("loss", f"step {step}", step=step, loss=mean(values))


def _tell(step: int, name: str, values: dict[str, Loss], whom: Whom, last: Whom, out: CoordinatorOutput) -> None:
    """Tell ``whom`` complete contributions; of losses only the mean. What a framework logs by micro-batch ``last`` is
    told before.
    """
    if name == LOSS:
        if logs_more(values):
            out.tell(last, Collected(step, EACH, values))
        values = {MEAN: mean(values)}
    out.tell(whom, Collected(step, name, values))

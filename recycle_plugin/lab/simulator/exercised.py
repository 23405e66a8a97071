"""Counts how often each rule of the protocol was needed: a rule that no seed needs is a rule that no seed checks. The
counts come from messages to and from the coordinator, and from what workers do with theirs. Nothing in the code under
test counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from recycle_plugin.core.coordinator.facts.joining import Phase
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, SupervisorOf
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_coordinator import Committed, Fence, Generation, Replay, Resume
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    Contribution,
    Exited,
    Left,
    Missing,
    Post,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.messages.said import WORKER, OfWorker
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.dataflow import of_layers
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.whereabouts import board_of


class ProtocolRule(str, Enum):
    """The rules of the protocol, each in words."""

    LATE_COMMIT = "a STEP waited for the commit before it"
    TAKEN_BACK = "a step was taken back"
    ROLLED_FORWARD = "a stage's sum was taken from who had it"
    SUMMED_AGAIN = "a sum was made again after a failure"
    CHANGE_APPLIED = "somebody had applied what scripts make of a sum, and nobody asked for it again"
    TIED_AGAIN = "a tied sum was made again after a failure"
    NORM_KEPT = "a norm was asked for again, and was there"
    TWICE_REJECTED = "a rejection was heard twice"
    OLD_GENERATION = "a tensor computed with rejected weights was dropped"
    OLD_STEP = "a tensor of a committed step was dropped"
    FOR_WANT_OF_ROOM = "a kept tensor went for want of room"
    REPLACED = "a change was replaced before it was adopted"
    PLAN_AFTER = "a planned change waited for one that holds at once"
    LOST_HEARTBEAT = "a lost worker's heartbeat, note or goodbye was dropped"
    LOST_WORD = "a lost worker's word on a step was dropped"
    STALE_REPORT = "a report was overtaken by a newer generation"
    STALE_COMPLAINT = "a complaint of a passed generation was dropped"
    HALTED_STEP = "a step applied while the membership changes was not counted"
    COMMITTED_WORD = "a word on a committed step was dropped"
    LEFT_MEANWHILE = "a worker left while the membership changed"
    FENCED = "a worker was fenced"
    SENT_AGAIN = "all met again over new lines"
    DEAF = "a worker that does not receive its own data was given up"
    CHANGED_AGAIN = "the membership changed while it was changing"
    COMMITTED_BY_CHANGE = "a step was committed by a change of the membership"
    AHEAD = "somebody was a step ahead at a change of the membership"
    REJECTED = "a step was rejected"
    DISCARDED = "later work was void"
    CONFIRMED = "a death was known before the connection broke"
    CONFIRMED_LATER = "a death was confirmed after the connection broke"
    ENOUGH = "too few were left to go on, until a death was known"
    LOSSES_GONE = "losses went down with a worker"
    PLANNED = "a planned change was entered"
    PLAN_LOST = "a planned change was overtaken by a loss"
    PLANNED_AGAIN = "a leave was planned again"
    END_LOST = "a planned end met a loss"
    TURNED_AWAY = "a second process of a rank was turned away"
    DEALT = "a lost replica's data was drawn by others"
    KEPT_DATA = "a lost worker's data was there"
    REBALANCED = "work was dealt out anew for a slow worker"
    EVALUATED_AGAIN = "an evaluation was run again"
    SAVED_AGAIN = "a checkpoint was written again"
    SWALLOWED = "a tensor was lost, and nobody complained"
    STOOD_STILL = "everybody waited, and all met again"
    SUSPECTED = "somebody was suspected"
    CLEARED = "a suspicion came to nothing"
    LAST_SPARED = "a stage's last worker was suspected"
    NO_PROOF = "work that had cost a worker was no proof against the next"
    NOT_SAVED = "a checkpoint could not be written"
    DAMAGED = "a unit of a newcomer's state was damaged"
    LINE_BROKE = "a source's line to a newcomer broke, and both lived"
    RETURNED = "a newcomer came to be a member"
    CALLED_OFF = "a newcomer was announced again"
    NEWCOMER_LOST = "a newcomer was lost before it was a member"
    RAN_ON = "a shard had stopped before another one of its seat"
    SEAT_RETURNED = "a seat of several shards came to have work again"
    REPLAYED = "a stage was replayed"
    REPLAYED_BESIDE = "a stage was replayed beside another"
    ACCOMPANIED = "a live worker replayed its stage along"
    SHARED = "another worker made a share of a replay"
    HELPED_BESIDE = "a newcomer that waited for its stage made a share of its replay"
    REFUSED = "a worker could not help with a replay"
    DEALT_AGAIN = "what a helper was to make was dealt again"
    WAITED = "a newcomer waited for another's replay"
    GIVEN_UP = "a replay was given up for a stated reason"
    MADE_AGAIN = "what was lost with a worker's disk tail was made again"
    LOG_GONE = "logs were gone with a host"
    LET_GO = "a checkpoint let a log go"
    LOGS_AGAIN = "a log that had broken off was one again from a checkpoint on"
    SHRUNK = "a step lacked what a lost replica had"
    KEPT_WHOLE = "a step had what a lost replica had, in all its sums"
    MADE_VOID = "a step was void, since not all sums had what a lost replica had"
    WHOLE_RETURNED = "a replica came back whole"
    SLOW_REPLICA = "a replica that held the exchange up was named"
    BOUNDARY_MOVED = "a script had more micro-batches to give than it had been told"
    GIVEN_AGAIN = "a micro-batch that a script had given was asked for again"
    HEARD_BETWEEN = "a script met a change of the membership between two of its steps"
    PUSHED_RETURNED = "a replica came back to scripts with loops of their own"
    REFUSED_WORD = "a word that is another's to say was refused"
    CONFUSED = "a worker that said what can't be was given up"
    COUNTED_ON = "a newcomer heard where the others were as it was let in"
    SAID_LATER = "a worker said where it was in a membership that it had passed over"
    WENT_ON = "a process on the coordinator's host took its place"
    MOVED = "a process on another host took the coordinator's place"
    DEPOSED = "a coordinator found that the others may go on without it"
    RELOADED = "the coordinator's state was written down and read again"


OF_TAKEOVERS = (ProtocolRule.WENT_ON, ProtocolRule.MOVED, ProtocolRule.DEPOSED)
"""Rules that only jobs need whose coordinator dies."""


class Exercised(Counter[ProtocolRule]):
    """How often one run has needed each rule."""

    def __init__(self, counts: Iterable = ()) -> None:
        super().__init__(counts)
        self._planned = False  # whether the last published generation is planned, and nobody has resumed in it

    def said(self, message: object, membership: Membership) -> None:
        """Count the rules needed by ``message``, which is about to be handed to ``membership``."""
        if isinstance(message, OfWorker) and message.BY == WORKER and message.worker in membership.lost:
            self[
                ProtocolRule.LOST_WORD
                if isinstance(message, (SurvivorReport, Stepped, Contribution))
                else ProtocolRule.LOST_HEARTBEAT
            ] += 1
            return
        changing = membership.regrouping is not None
        match message:
            case SurvivorReport() if message.generation < membership.generation:
                self[ProtocolRule.STALE_REPORT] += 1
            case Missing() if message.generation < membership.generation:
                self[ProtocolRule.STALE_COMPLAINT] += 1
            case Stepped() if changing:
                self[ProtocolRule.HALTED_STEP] += 1
            case Contribution() if message.step <= membership.committed:
                self[ProtocolRule.COMMITTED_WORD] += 1
            case Left() if changing:
                self[ProtocolRule.LEFT_MEANWHILE] += 1
            case Post():
                self[ProtocolRule.SAID_LATER] += message.board != board_of(message.generation)
            case Exited():
                self[ProtocolRule.CONFIRMED_LATER if message.worker in membership.lost else ProtocolRule.CONFIRMED] += 1

    def answered(
        self, message: object, output: CoordinatorOutput, membership: Membership, changing: bool, lost: bool
    ) -> None:
        """Count the rules that ``output`` shows. Before ``message``, was the membership ``changing``, its sender
        ``lost``?
        """
        told = [
            each for whom, each in output.messages if not (isinstance(whom, SupervisorOf) and isinstance(each, Fence))
        ]
        for each in told:
            match each:
                case Fence():
                    self[ProtocolRule.FENCED] += 1
                case Resume():
                    self[ProtocolRule.PLANNED] += self._planned
                    self[ProtocolRule.COMMITTED_BY_CHANGE] += any(isinstance(other, Committed) for other in told)
                    self[ProtocolRule.DISCARDED] += each.rejected
                    self[ProtocolRule.PLANNED_AGAIN] += any(
                        isinstance(other, Generation) and other.from_step > 0 for other in told
                    )
                    self._planned = False
                case Replay():
                    self[ProtocolRule.REPLAYED_BESIDE] += len(each.stages) > 1
                case Generation():
                    self._published(each, message, membership, changing, lost)
        newcomer = membership.state.joining.get(message.worker) if isinstance(message, CatchUp) else None
        self[ProtocolRule.WAITED] += newcomer is not None and newcomer.phase is Phase.WAITING
        for event in output.events:
            self[ProtocolRule.REJECTED] += event.kind == "rejected"
            self[ProtocolRule.TURNED_AWAY] += event.kind == "late"
            self[ProtocolRule.RETURNED] += event.kind == "rejoined"
            self[ProtocolRule.REPLAYED] += event.kind == "replayed"
            self[ProtocolRule.GIVEN_UP] += event.kind == "recovery" and event.details["way"] == "end"
            self[ProtocolRule.LOG_GONE] += event.kind == "log_gone"
            self[ProtocolRule.NEWCOMER_LOST] += event.kind in ("restart", "not_restarted") and event.details["in_vain"]
            self[ProtocolRule.REBALANCED] += event.kind == "rebalance"
            self[ProtocolRule.LOSSES_GONE] += event.text.startswith("the loss of step")
            self[ProtocolRule.SUSPECTED] += event.kind == "suspected"
            self[ProtocolRule.CLEARED] += event.kind == "cleared"
            self[ProtocolRule.LAST_SPARED] += event.kind == "suspected" and "it is the last worker" in event.text
            self[ProtocolRule.NO_PROOF] += event.kind == "suspected" and "which has cost a worker already" in event.text
            self[ProtocolRule.STOOD_STILL] += event.text.startswith("all workers have waited")
            self[ProtocolRule.CONFUSED] += event.kind == "lost" and event.details["cause"] == Cause.CONFUSED.value
            self[ProtocolRule.DEAF] += event.kind == "lost" and "misses its own data" in event.text
            self[ProtocolRule.SHRUNK] += event.kind == "committed" and "contributed" in event.details
            self[ProtocolRule.KEPT_WHOLE] += event.kind == "contributing" and bool(event.details["kept"])
            self[ProtocolRule.MADE_VOID] += event.kind == "contributing" and event.details["void"] > 0
            self[ProtocolRule.SLOW_REPLICA] += event.kind == "slow_replica" and not event.details["over"]
            self[ProtocolRule.AHEAD] += event.kind == "resume" and event.details["ahead"] > 0

    def _published(
        self, generation: Generation, message: object, membership: Membership, changing: bool, lost: bool
    ) -> None:
        self[ProtocolRule.SENT_AGAIN] += isinstance(message, Missing)
        self[ProtocolRule.ENOUGH] += isinstance(message, Exited) and lost
        if not generation.from_step:
            self[ProtocolRule.CHANGED_AGAIN] += changing
            self[ProtocolRule.PLAN_LOST] += self._planned
            self[ProtocolRule.END_LOST] += membership.ended is not None
        self[ProtocolRule.CALLED_OFF] += "not back" in generation.cause
        self._planned = generation.from_step > 0

    def delivered(self, message: object, control_view: ControlView, store: StepStore) -> None:
        """Count the rules needed by ``message``, which a worker with ``control_view`` and ``store`` is about to get."""
        if isinstance(message, Resume) and message.norm is not None:
            self[ProtocolRule.TWICE_REJECTED] += of_layers("norm", store.seat, message.committed + 1) in store
        if isinstance(message, Generation) and control_view.interruption() is not None:
            self[ProtocolRule.PLAN_AFTER if message.from_step else ProtocolRule.REPLACED] += 1

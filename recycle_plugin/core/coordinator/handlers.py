"""How messages are handled, by their class: messages of members, and of workers that are no members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle_plugin.core.coordinator import (
    between_steps,
    commits,
    comparisons,
    contributing,
    departures,
    goodbyes,
    heartbeats,
    losses,
    lost_messages,
    notes,
    operating,
    posting,
    replayable,
    replays,
    resuming,
    returns,
    starting,
    vanishing,
)
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.coordinator.words import objection
from recycle_plugin.core.messages.from_workers import (
    Accompanied,
    BarrierReached,
    CatchUp,
    CaughtUp,
    CheckpointLoaded,
    Contribution,
    Crashed,
    Durable,
    Exited,
    Fatal,
    Fingerprint,
    Heartbeat,
    HostGoes,
    Leaving,
    Left,
    LogBroken,
    Logged,
    LogsServed,
    Missing,
    Note,
    OutOfData,
    Post,
    ReadBoard,
    Ready,
    Replaying,
    Resized,
    Serving,
    StateHash,
    Stepped,
    StrangersAtLogs,
    SupervisorHeartbeat,
    SurvivorReport,
    Terminate,
    Through,
    Unguarded,
    Unreplayable,
    Vanishing,
    WantResult,
)
from recycle_plugin.core.messages.of_worker import OfWorker

Handler = Callable[[JobState, Any], None]

OF_MEMBERS: dict[type, Handler] = {
    Heartbeat: heartbeats.of_member,
    SupervisorHeartbeat: heartbeats.of_supervisor,
    Fingerprint: commits.fingerprint,
    Contribution: commits.contribute,
    Stepped: commits.stepped,
    Ready: starting.ready,
    Serving: returns.serving,
    StateHash: comparisons.state_hash,
    SurvivorReport: resuming.report,
    OutOfData: contributing.out_of_data,
    BarrierReached: between_steps.arrive,
    CheckpointLoaded: between_steps.load,
    Resized: between_steps.resize,
    Terminate: departures.terminate,
    Leaving: departures.leaving,
    Left: departures.goodbye,
    Through: goodbyes.through,
    Vanishing: vanishing.vanish,
    Exited: losses.died,
    Unguarded: losses.unguarded,
    Missing: lost_messages.missing,
    Fatal: notes.fatal,
    Crashed: notes.crashed,
    Note: notes.note,
    StrangersAtLogs: notes.stranger,
    Durable: replayable.durable,
    Logged: replayable.logged,
    LogBroken: replayable.log_broken,
    LogsServed: replayable.served,
    Replaying: replays.progress,
    Unreplayable: replays.unreplayable,
    Accompanied: replays.accompanied,
    CaughtUp: replays.accompanied,
}
"""The handlers of all messages."""

OF_NEWCOMERS: dict[type, Handler] = {
    each: OF_MEMBERS[each]
    for each in (Replaying, Unreplayable, LogBroken, Through, SurvivorReport, Unguarded, StateHash)
} | {
    Exited: returns.died,
    CatchUp: returns.catch_up,
    CaughtUp: returns.caught_up,
    Heartbeat: heartbeats.of_newcomer,
    SupervisorHeartbeat: heartbeats.of_newcomers_supervisor,
    Fatal: notes.error_of_newcomer,
    Crashed: notes.error_of_newcomer,
    Note: notes.note_of_newcomer,
}
"""The handlers of messages of workers that are no members yet; all else that they send is dropped."""

OF_ALL: dict[type, Handler] = {
    Post: posting.post,
    ReadBoard: posting.read,
    WantResult: posting.want_result,
    HostGoes: operating.host_goes,
}
"""The handlers of messages that anybody may send."""

OF_STEPS = (StateHash, Stepped, Contribution, Fingerprint)


def handle(state: JobState, message: object) -> None:
    """Handle a message. If it is to be dropped, drop it; if it is impossible, give up its worker."""
    handlers = OF_MEMBERS
    if isinstance(message, OfWorker):
        if (why := objection(message, state)) is not None:
            if why:
                losses.give_up_confused(state, message.worker, why)
            return
        if type(message) in OF_ALL:
            handlers = OF_ALL
        elif state.vacancies.is_outside(message.worker) and not _is_entering(state, message):
            handlers = OF_NEWCOMERS
    if (handler := handlers.get(type(message))) is not None:
        handler(state, message)


def _is_entering(state: JobState, message: OfWorker) -> bool:
    """Return whether a newcomer that awaits the rest of its unit sends something of a step, which then counts."""
    newcomer = state.joining.get(message.worker)
    return newcomer is not None and newcomer.reported and isinstance(message, OF_STEPS)

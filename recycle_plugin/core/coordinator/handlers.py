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
from recycle_plugin.core.messages import from_workers
from recycle_plugin.core.messages.said import OfWorker

Handler = Callable[[JobState, Any], None]

OF_MEMBERS: dict[type, Handler] = {
    from_workers.Heartbeat: heartbeats.of_member,
    from_workers.SupervisorHeartbeat: heartbeats.of_supervisor,
    from_workers.Fingerprint: commits.fingerprint,
    from_workers.Contribution: commits.contribute,
    from_workers.Stepped: commits.stepped,
    from_workers.Ready: starting.ready,
    from_workers.Serving: returns.serving,
    from_workers.StateHash: comparisons.state_hash,
    from_workers.SurvivorReport: resuming.report,
    from_workers.OutOfData: contributing.out_of_data,
    from_workers.BarrierReached: between_steps.arrive,
    from_workers.Resized: between_steps.resize,
    from_workers.Terminate: departures.terminate,
    from_workers.Leaving: departures.leaving,
    from_workers.Left: departures.goodbye,
    from_workers.Through: goodbyes.through,
    from_workers.Vanishing: vanishing.vanish,
    from_workers.Exited: losses.died,
    from_workers.Unguarded: losses.unguarded,
    from_workers.Missing: lost_messages.missing,
    from_workers.Fatal: notes.fatal,
    from_workers.Crashed: notes.crashed,
    from_workers.Note: notes.note,
    from_workers.StrangersAtLogs: notes.stranger,
    from_workers.Durable: replayable.durable,
    from_workers.Logged: replayable.logged,
    from_workers.LogBroken: replayable.log_broken,
    from_workers.LogsServed: replayable.served,
    from_workers.Replaying: replays.progress,
    from_workers.Unreplayable: replays.unreplayable,
    from_workers.Accompanied: replays.accompanied,
    from_workers.CaughtUp: replays.accompanied,
}
"""The handlers of all messages."""

OF_NEWCOMERS: dict[type, Handler] = {
    each: OF_MEMBERS[each]
    for each in (
        from_workers.Replaying,
        from_workers.Unreplayable,
        from_workers.LogBroken,
        from_workers.Through,
        from_workers.SurvivorReport,
        from_workers.Unguarded,
        from_workers.StateHash,
    )
} | {
    from_workers.Exited: returns.died,
    from_workers.CatchUp: returns.catch_up,
    from_workers.CaughtUp: returns.caught_up,
    from_workers.Heartbeat: heartbeats.of_newcomer,
    from_workers.SupervisorHeartbeat: heartbeats.of_newcomers_supervisor,
    from_workers.Fatal: notes.error_of_newcomer,
    from_workers.Crashed: notes.error_of_newcomer,
    from_workers.Note: notes.note_of_newcomer,
}
"""The handlers of messages of workers that are no members yet; all else that they send is dropped."""

OF_ALL: dict[type, Handler] = {
    from_workers.Post: posting.post,
    from_workers.ReadBoard: posting.read,
    from_workers.StoreCall: posting.store_call,
    from_workers.WantResult: posting.want_result,
    from_workers.HostGoes: operating.host_goes,
}
"""The handlers of messages that anybody may send."""

OF_STEPS = (from_workers.StateHash, from_workers.Stepped, from_workers.Contribution, from_workers.Fingerprint)


def handle(state: JobState, message: object) -> None:
    """Handle a message. If it is to be dropped, drop it; if it is impossible, give up its worker."""
    kind, handlers = type(message), OF_MEMBERS
    if isinstance(message, OfWorker):
        if (why := objection(message, state)) is not None:
            if why:
                losses.give_up_confused(state, message.worker, why)
            return
        if kind in OF_ALL:
            handlers = OF_ALL
        elif state.vacancies.is_outside(message.worker) and not _is_entering(state, message):
            handlers = OF_NEWCOMERS
    if (handler := handlers.get(kind)) is not None:
        handler(state, message)


def _is_entering(state: JobState, message: OfWorker) -> bool:
    """Return whether a newcomer that awaits the rest of its unit sends something of a step, which then counts."""
    newcomer = state.joining.get(message.worker)
    return newcomer is not None and newcomer.reported and isinstance(message, OF_STEPS)

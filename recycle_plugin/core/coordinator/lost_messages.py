"""Complaints of workers that miss something from a live one: a connection between them has lost it. All regroup over
new connections, and it is sent again. If that does not help, the doubted worker goes
(core/coordinator/facts/complaints.py). The job ends if nobody knows whom to doubt.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import ends, generations, losses
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Missing
from recycle_plugin.core.vocabulary.causes import Cause


def missing(state: JobState, message: Missing) -> None:
    """Handle a complaint."""
    complaint = state.complaints.add(message, state.roster, state.committed, state.holds(message.generation))
    if complaint is None:
        return
    why, tries, doubted = complaint
    if complaint.again:
        state.say("warning", f"{why}: all regroup over new connections")
        generations.regroup(state, why)
    elif doubted is not None:
        losses.give_up(state, doubted, Cause.LINK, f"{why}, for the {tries}th time")
    else:
        ends.end(
            state,
            f"{why}, {tries} times, and all workers that take part in it are alive: check the network between their "
            f"hosts, or let GLOO_SOCKET_IFNAME name the interface that connects them. {state.ending.safe_point}",
        )

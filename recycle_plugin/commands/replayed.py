"""What the demo tells of a stage that nobody was left in: how it was replayed from the log, and what that took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from recycle_plugin.commands.rejoined import draw_absence, size_text
from recycle_plugin.observability.absences import Absence
from recycle_plugin.observability.run_history import Failure, RunHistory
from recycle_plugin.runs import RunFailed

LOG = "log"  # the log's folder in a run folder, where no setting names another


class LogSize:
    """The bytes of the segments in ``folder`` over time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[float, int]] = []  # seconds since the epoch, bytes

    def look(self) -> None:
        """Takes in what is there now; segments may go meanwhile."""
        held = 0
        for path in self._folder.glob("*.log"):
            try:
                held += path.stat().st_size
            except FileNotFoundError:
                continue
        self._seen.append((time.time(), held))

    def at(self, moment: float) -> int:
        """The bytes when somebody looked last before ``moment``, in seconds since the epoch."""
        return max((each for each in self._seen if each[0] <= moment), default=(moment, 0))[1]


def absence(history: RunHistory, killed: Sequence[Failure]) -> Absence:
    """How the stage of the first of the killed workers was replayed.  Raises RunFailed where it was not."""
    found = killed[0].absence
    if not found.is_over or not found.replayed_at:
        said = next((event["text"] for event in reversed(history.of("recovery"))), "nothing was said of a recovery")
        raise RunFailed(f"the stage of seat {found.seat} was not replayed: {said}")
    if not found.restarted_at or not found.came_at or not found.restored_at:
        raise RunFailed(f"seat {found.seat} has replayed its stage, and the log does not tell how it came to that")
    return found


def figures(history: RunHistory, killed: Sequence[Failure]) -> dict:
    """What report.json has of the replay, beside the stall: seconds of its parts, steps, and by how many helpers.

    ``restart_s``: until the next process was ordered, ``start_up_s``: until its script had come to its first step,
    which has the wait before a restart in it; ``load_s``: of the checkpoint; ``replay_s``: of the steps behind it.
    """
    back, struck_at = absence(history, killed), killed[0].struck_at
    assert back.restarted_at and back.came_at and back.restored_at and back.replayed_at  # absence() has seen to it
    recovery = history.of("recovery")[-1]["way"]  # others of the stage may have been rerouted before
    return {
        "recovered_by": recovery,
        "replayed_steps": back.replayed_steps,
        "helpers": back.helpers,
        "restart_s": round(back.restarted_at - struck_at, 4),
        "start_up_s": round(back.came_at - back.restarted_at, 4),
        "load_s": round(back.restored_at - back.came_at, 4),
        "replay_s": round(back.replayed_at - back.restored_at, 4),
        "bytes": back.bytes,
    }


def draw(path: Path, fault_free: RunHistory, failed: RunHistory, killed: Sequence[Failure]) -> None:
    """Write the picture of the throughput over time: nothing is trained until the stage is replayed."""
    back = absence(failed, killed)
    on_its_way = (
        ("starts, and builds its model", back.restarted_at, back.came_at),
        ("loads, and replays its stage", back.came_at, back.replayed_at),
    )
    draw_absence(path, fault_free, failed, killed[0].struck_at, back, on_its_way)


def told(found: Mapping) -> str:
    """How the stage was replayed, in a line."""
    steps = f"{found['replayed_steps']} step{'s' * (found['replayed_steps'] != 1)}"
    return (
        f"{steps} from the log, of {size_text(found['log_bytes'])}: {found['restart_s']:.1f} s to notice, "
        f"{found['start_up_s']:.1f} s to start, {found['load_s']:.1f} s to load a checkpoint "
        f"({size_text(found['bytes'])}), {found['replay_s']:.1f} s to replay; helpers: {found['helpers']}"
    )

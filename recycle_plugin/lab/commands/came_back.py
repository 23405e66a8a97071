"""How the demo reports the return of the killed worker: by catching up from its peers, or by a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recycle_plugin.lab.runs import RunFailed
from recycle_plugin.observability.run_history import Failure, RunHistory


class NotBack(RunFailed):
    """The run ended too soon after the worker's return, or before it."""


def rejoined(history: RunHistory, killed: Sequence[Failure]) -> dict:
    """Return report.json's entry ``rejoined``: seconds and bytes of the first return. Raises NotBack, RunFailed."""
    back = killed[0].absence
    if not back.is_over:
        raise NotBack(f"the worker of seat {back.seat} did not come back in {history.last} steps: give more --steps")
    if not back.restarted_at or not back.came_at or not back.caught_up_at:
        raise RunFailed(f"seat {back.seat} has a worker again, and the log does not tell how it came")
    if history.last <= back.back_step + 1:
        raise NotBack(f"the worker of seat {back.seat} came back in the last steps: give more --steps")
    return {
        "seat": str(back.seat),
        "step": back.back_step,
        "start_up_s": round(back.came_at - back.restarted_at, 4),
        "catch_up_s": round(back.caught_up_at - back.came_at, 4),
        "away_s": round(back.lasted_s, 4),
        "bytes": back.bytes,
        "step_s_since": round(history.now_s, 4),
    }


def replayed(history: RunHistory, killed: Sequence[Failure]) -> dict:
    """Return the entries of report.json on the replay, beside the stall: seconds of its parts, steps, helpers.

    ``restart_s``: until the next process was ordered; ``start_up_s``: until its script reached its first step;
    ``load_s``: of the checkpoint; ``replay_s``: of the steps after it. Raises RunFailed if nothing was replayed.
    """
    back = killed[0].absence
    if not back.is_over or not back.replayed_at:
        said = next((event["text"] for event in reversed(history.of("recovery"))), "nothing was said of a recovery")
        raise RunFailed(f"the stage of seat {back.seat} was not replayed: {said}")
    if not back.restarted_at or not back.came_at or not back.restored_at:
        raise RunFailed(f"seat {back.seat} has replayed its stage, and the log does not tell how it came to that")
    return {
        "recovered_by": history.of("recovery")[-1]["way"],  # others of the stage may have been rerouted before
        "replayed_steps": back.replayed_steps,
        "helpers": back.helpers,
        "restart_s": round(back.restarted_at - killed[0].struck_at, 4),
        "start_up_s": round(back.came_at - back.restarted_at, 4),
        "load_s": round(back.restored_at - back.came_at, 4),
        "replay_s": round(back.replayed_at - back.restored_at, 4),
        "bytes": back.bytes,
    }


def told(found: Mapping) -> tuple[str, str] | None:
    """Return name and text of the report's line on a return or a replay, or None if it has neither."""
    if back := found.get("rejoined"):
        return "back", (
            f"seat {back['seat']} has work from step {back['step']} on, {back['away_s']:.1f} s after its loss: "
            f"{back['start_up_s']:.1f} s to start, {back['catch_up_s']:.1f} s to catch up "
            f"({back['bytes'] / 1e6:.3g} MB of state); since then {back['step_s_since']:.3f} s a step"
        )
    if "recovered_by" in found:
        return "replayed", (
            f"{found['replayed_steps']} steps from the log: {found['restart_s']:.1f} s to notice, "
            f"{found['start_up_s']:.1f} s to start, {found['load_s']:.1f} s to load a checkpoint "
            f"({found['bytes'] / 1e6:.3g} MB), {found['replay_s']:.1f} s to replay; helpers: {found['helpers']}"
        )
    return None

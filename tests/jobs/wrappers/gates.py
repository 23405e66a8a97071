"""Gates that fix an order of events, and membership changes in the middle of a sum."""

from __future__ import annotations

from pathlib import Path

import torch

from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.worker.machine import TorchMachine
from wrappers.trainers import TRAINERS, inside, wait_until


def gate(folder: str, before: str, until: str, by: list[str]) -> None:
    """Whoever is about to run ``before`` waits until the seats ``by`` have run ``until``; and these, having run it,
    wait for each other: one of them may die then, which would keep another from running it.
    """
    reach = TorchMachine.reach
    flags = Path(folder)
    flags.mkdir(parents=True, exist_ok=True)

    def changed(self: TorchMachine, when: str, seat=None, instruction=None) -> None:
        if (when, str(instruction)) == ("after", until):
            (flags / str(seat)).touch()
        if (when, str(instruction)) == ("before", before) or (when, str(instruction), str(seat) in by) == (
            "after",
            until,
            True,
        ):
            wait_until(lambda: all((flags / name).exists() for name in by), f"{until} by {by}")
        reach(self, when, seat, instruction)

    TorchMachine.reach = changed


def replay_beside() -> None:
    """Whoever replays its stage does not begin before another newcomer of it is there, and waits for that."""
    gather = Helpers.gather

    def changed(self: Helpers):
        wait_until(lambda: bool(self._machine.control_view.beside), "a second newcomer of the stage")
        yield from gather(self)

    Helpers.gather = changed


def replay_waits(folder: str, step: int, until: str) -> None:
    """Whoever replays its stage makes the file replays-<rank> in ``folder`` before it is at ``step``, and waits there
    for the file ``until``.
    """
    replays = StageReplay._step

    def changed(self: StageReplay, work, record, times):
        if record.step == step:
            (Path(folder) / f"replays-{self._machine.control_view.rank}").touch()
            wait_until((Path(folder) / until).exists, until)
        yield from replays(self, work, record, times)

    StageReplay._step = changed


def lose_result(seats: list[str], reduce: str, folder: str = "", before: str = "", by: list[str] = ()) -> None:
    """``seats`` take part in the collective of ``reduce``, whose result the others get, and a membership change comes
    before they have it themselves.  ``before``, ``by``: a gate, so that whoever is about to run that waits until these
    have the result.
    """
    if by:
        gate(folder, before, reduce, by)
    collective = Gradients._sum

    def changed(self: Gradients, bucket, step: int, *of: object) -> torch.Tensor:
        made, (trainer,) = collective(self, bucket, step, *of), TRAINERS
        if (
            str(trainer.seat) in seats
            and f"{trainer.seat.stage}REDUCE@{step}" == reduce
            and not trainer._made.worker.program.resumed
        ):
            inside(trainer).session.waiting.until("a membership change", lambda: None)
        return made

    Gradients._sum = changed


def lose_tied(seats: list[str], step: int) -> None:
    """``seats`` take part in the TIE of ``step``, whose result the others get, and a membership change comes before
    they have it themselves.
    """
    tie = Gradients.tie

    def changed(self: Gradients, of: int) -> dict[int, torch.Tensor]:
        (trainer,) = TRAINERS
        if str(trainer.seat) in seats and of == step and not trainer._made.worker.program.resumed:
            for place, weight in self._tied.items():
                weight.total(self._whole(step)[place])
            inside(trainer).session.waiting.until("a membership change", lambda: None)
        return tie(self, of)

    Gradients.tie = changed


def begin_late(until: str) -> None:
    """The script does not begin before the file ``until`` is there."""
    wait_until(Path(until).exists, until)

"""A script's own loop with Accelerate: evaluations are dealt to the live ranks. If a replica is lost in an evaluation,
the evaluation goes on without its samples, since the script can't begin it again. A warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate import accelerator, data_loader
from accelerate.utils import operations

from recycle_plugin.adapters.hugging_face.operations import wrap_method
from recycle_plugin.adapters.hugging_face.team import Team
from recycle_plugin.adapters.wandb_run import one_run
from recycle_plugin.runtime.control.session import Session


def install(team: Team, trains: Callable[[], bool]) -> None:
    """Have loops of this process follow ``team``. ``trains()``: whether the model is in training mode."""
    made = Evaluations(team, trains)
    wrap_method(data_loader.DataLoaderShard, "__iter__", made.iterate)
    wrap_method(accelerator.Accelerator, "gather_for_metrics", made.gather_for_metrics)
    wrap_method(accelerator.Accelerator, "prepare_data_loader", made.prepare_data_loader)
    for name in ("log", "get_tracker", "end_training"):
        wrap_method(accelerator.Accelerator, name, _start_trackers)


def note_trackers(module: Any, session: Session) -> None:
    """Have Accelerators of ``module`` keep how to start trackers, for a process that becomes the first after a loss."""

    def init_trackers(stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> None:
        def start() -> None:
            with one_run(session.job_id):
                stock(of, *arguments, **named)

        of.recycle_trackers = start
        start()

    wrap_method(module.Accelerator, "init_trackers", init_trackers)


def _start_trackers(stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> Any:
    """Call ``stock``. If this process became the first only through losses, start the trackers before."""
    if of.is_main_process and not of.trackers and hasattr(of, "recycle_trackers"):
        of.recycle_trackers()
    return stock(of, *arguments, **named)


class Evaluations:
    """Replacements for Accelerate's methods, which call ``stock``."""

    def __init__(self, team: Team, trains: Callable[[], bool]) -> None:
        self._team, self._trains = team, trains
        self._evaluates = False
        self._lacks: set[int] = set()  # lost ranks that the evaluation was dealt to

    def prepare_data_loader(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> Any:
        """Prepare a loader. Its samples are dealt to all ranks, lost ones too, since they may come back while it is
        read.
        """
        with self._team.as_at_start():
            return stock(of, *arguments, **named)

    def iterate(self, stock: Callable[..., Iterator[Any]], of: Any) -> Iterator[Any]:
        """Yield a loader's batches; an evaluation's samples are dealt to the live ranks."""
        if self._trains():
            yield from stock(of)
            return
        self._team.deal(of)
        self._evaluates, self._lacks = True, set()
        try:
            with self._team.told_of_losses(self._note):
                yield from stock(of)
        finally:
            self._evaluates = False

    def _note(self, left: tuple[int, ...]) -> None:
        lost = {*self._team.dealt} - {*left}
        if lost != self._lacks:
            self._lacks = lost
            self._team.warn(
                f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, sorted(lost)))} {'were' if len(lost) > 1 else 'was'} "
                "lost in an evaluation, whose metrics lack the samples that were left there: "
                "the next evaluation has all samples again"
            )

    def gather_for_metrics(
        self, stock: Callable[..., Any], of: Any, input_data: Any, use_gather_object: bool = False
    ) -> Any:
        """Gather as Accelerate does, without the samples that were added to fill the last batches."""
        state = of.gradient_state
        if not (self._evaluates and state.end_of_dataloader and state.remainder > 0):
            return stock(of, input_data, use_gather_object)
        if use_gather_object or not _of_tensors(input_data):
            found = self._team.objects(input_data).items()
            return [one for rank, rows in found for one in rows[: self._real(rank, len(rows), state.remainder)]]
        kept = lambda rank, size: self._real(rank, size, state.remainder)
        return self._team.steadily(
            lambda: operations.recursively_apply(lambda each: self._team.joined(each, kept), input_data)
        )

    def _real(self, rank: int, size: int, remainder: int) -> int:
        """Return how many of the last ``size`` samples of ``rank`` are real, of ``remainder`` real ones overall."""
        return min(size, max(0, remainder - size * self._team.dealt.index(rank)))


def _of_tensors(data: Any) -> bool:
    try:
        operations.recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return False
    return True

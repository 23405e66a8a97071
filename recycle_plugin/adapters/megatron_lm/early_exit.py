"""Ends a Megatron-LM job before its last step: the plugin's planned end, with all workers after the same step."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from megatron.training import global_vars, training

from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.runtime.control.session import Session


class EarlyExit:
    """Asks for the end that ``--exit-duration-in-mins`` or ``--exit-signal-handler`` calls for, after a step, as
    Megatron's loop does. One worker's request is enough. The duration is removed from ``args``: Megatron's loop would
    ask all ranks about it.
    """

    def __init__(self, session: Session, args: Namespace) -> None:
        self._session, self._args, self._asked = session, args, False
        self._minutes, args.exit_duration_in_mins = args.exit_duration_in_mins, None
        self._signal = global_vars.get_signal_handler() if args.exit_signal_handler else None
        self._raised: JobEnded | None = None  # by the script, after it has saved

    def ask_if_due(self) -> None:
        """Ask for the job's end, once, if the time is over or a signal has come."""
        if self._asked or self._session.view.outside:
            return
        minutes = (time.time() - training._TRAIN_START_TIME) / 60.0
        if self._signal is not None and self._signal._signal_received:
            self._ask("--exit-signal-handler: a signal has come")
        elif self._minutes and minutes > self._minutes:
            self._ask(f"--exit-duration-in-mins {self._minutes}: it has run for {minutes:.1f} minutes")

    def _ask(self, reason: str) -> None:
        self._asked = True
        self._session.ask_to_end(reason)

    def saves(self, end: JobEnded, folder: Path, is_saved: bool) -> bool:
        """Whether Megatron's loop saves a checkpoint before it leaves: if ``--save`` is given or ``end`` asks for one.
        Without ``--save`` the checkpoint goes to ``folder``. ``is_saved``: the last step's checkpoint exists. Raises
        ``end`` if the script is to leave with it: the others go on, the job has failed, or everything is saved.
        """
        planned = self._session.view.end
        of_all = planned is not None and planned.step and not planned.failed and str(end) == planned.reason
        asks = end.code == TRY_AGAIN
        if not of_all or (asks and is_saved):
            raise end
        if asks:
            self._raised, self._args.save = end, self._args.save or str(folder)
        return bool(self._args.save) and not is_saved

    def leave_if_asked(self) -> None:
        """Raise the end that asked for the checkpoint just saved, if one did; its exit code leaves the script."""
        if self._raised is not None:
            raise self._raised

"""Checks on the caller of a collective: would all members make this call, and can its result be right after a loss?

A group keeps its logical size when members are lost. The plugin cannot tell whether a sum counts what is there or
scales with the group's size. So a script's sum over a group with lost members is reported with the script's line, or
scaled or refused if the job asks for that.

After a loss other workers run the programs' work, such as a micro-batch's forward and backward, some more often than
others. A collective in there would be called by some members only: it would wait forever, or be taken for another one.
So it is refused at once, also while everybody is alive.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType

import torch

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.lockstep import JOINT, SUMS
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session

BETWEEN = frozenset(
    {
        *("torch", "deepspeed", "accelerate", "transformers", "recycle_plugin", "pathlib"),
        *("typing_extensions", "warnings", "contextlib", "functools"),
    }
)  # what may stand between the script and a group, or a file; decorators too
NAMED = 16  # ranks in a message
SCALE = "scale"  # of the setting group_sums
NO_BACKWARD = -1  # in a thread that runs none


class Callers:
    """The checks that all groups of one worker apply to their collectives, by the job's setting ``group_sums``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._said: set[str] = set()  # lines of the script

    def admit(self, called: str, ranks: Sequence[int]) -> None:
        """Raise RecycleError if not all members of ``ranks`` would make this call of torch.distributed's ``called``.

        That is so inside a program, and outside the thread that trains. A group of one waits for nobody, and is
        admitted. Not for calls that are the plugin's own.
        """
        if len(ranks) == 1:
            return
        work, trainer = self._session.thread.work, self._session.thread.ident
        elsewhere = trainer is not None and not self._trains_here
        if work is None and not elsewhere:
            return
        where = f"torch.distributed.{called} over {named(ranks)}, called at {calling_line()}"
        if elsewhere:
            raise RecycleError(
                f"{where} in thread {threading.current_thread().name!r}: groups that can lose members match calls "
                "by their order in one thread; "
                "call it in the thread that trains, between steps"
            )
        raise RecycleError(
            f"{where} in {work}: after a loss other workers run its micro-batches, some more often than others, "
            "so the members would wait for each other in vain; leave collectives out of layers, but for those over "
            "recycle_plugin.seat_group(), out of loss functions, data and optimizers: train_batch() returns the loss "
            "over all micro-batches, "
            "and between steps there is recycle_plugin.mean(tensor, group)"
        )

    def sum_without(
        self, called: str, ranks: Sequence[int], live: Sequence[int], line: str, scales: bool = True
    ) -> None:
        """Warn about, or refuse, a script's sum over a group without its lost members.

        Does nothing if the sum ``scales`` and ``group_sums`` is "scale". ``live``: the remaining ``ranks``; ``line``:
        the script's ``file:line``, for which the lowest live rank warns once. Raises RecycleError if ``group_sums`` is
        "raise".
        """
        if len(live) == len(ranks) or (scales and self._session.group_sums == SCALE):
            return
        lost = [rank for rank in ranks if rank not in live]
        text = (
            f"{line}: torch.distributed.{called} over {named(ranks)} adds up over {len(live)} of {len(ranks)} members "
            f"({named(lost)} lost), but get_world_size() still counts all"
        )
        if self._session.group_sums == "raise":
            raise RecycleError(
                f"{text}: write recycle_plugin.mean(tensor, group) for an average over the live; recycle.group_sums "
                '"warn" lets such sums be'
            )
        if line not in self._said:
            self._said.add(line)
            if self._session.rank == live[0]:
                self._session.note(
                    "warning",
                    f"{text}: for an average over the live write recycle_plugin.mean(tensor, group), and for sums that "
                    f'go with the world size, such as counts of tokens, set recycle.group_sums to "{SCALE}"',
                    line=line,
                    lost=lost,
                )

    @property
    def in_layer(self) -> bool:
        """Whether the call comes from a layer or a framework's step, in work that a seat's workers do together."""
        work = self._session.thread.work
        return isinstance(work, Instruction) and work.op in JOINT and self._trains_here

    @property
    def is_own(self) -> bool:
        """Whether the call is a sum of the plugin's own (REDUCE, TIE): rerouting has replaced lost parts in these."""
        work = self._session.thread.work
        return isinstance(work, Instruction) and work.op in SUMS and self._session.thread.ident == threading.get_ident()

    @property
    def _trains_here(self) -> bool:
        """Whether the calling thread trains, or is autograd's while the training thread waits: hooks of tensors on an
        accelerator run there.
        """
        session = self._session
        return session.thread.ident == threading.get_ident() or (
            session.thread.backward and torch._C._current_graph_task_id() != NO_BACKWARD
        )


def calling_line() -> str:
    """Return the script's ``file:line`` that called into torch, DeepSpeed or this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a line of torch's"


def named(ranks: Sequence[int]) -> str:
    """Return the ranks in words, as "ranks 0, 1, 5"; past 16 ranks only the number of further ones."""
    shown = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"

"""Checks of who calls a collective: whether all members would call it, and whether its result can be right after a
loss.

A group keeps its logical size when members are lost, and nobody can see whether a sum is a count of what there is or
goes with the group's size.  So a script's sum over a group with lost members is reported, with the script's line,
scaled where the job asks for it, or refused.

What a program runs, a micro-batch's forward and backward first of all, is run by other workers after a loss, and more
often by some than by others.  A collective in there would be called by some members and not by others, and wait for
ever, or be taken for another one; so it is refused at once, while everybody is alive too.
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
    {"torch", "deepspeed", "recycle_plugin", "typing_extensions", "warnings", "contextlib", "functools"}
)  # the script and a group; decorators too
NAMED = 16  # ranks in a message
SCALE = "scale"  # of the setting group_sums
NO_BACKWARD = -1  # in a thread that runs none


class Callers:
    """The checks that all groups of one worker apply to the collectives that are asked of them.

    The setting ``group_sums`` of ``session`` says whether a sum that lacks lost members' parts warns, is scaled, or
    raises.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._said: set[str] = set()  # lines of the script

    def admit(self, called: str, ranks: Sequence[int]) -> None:
        """Refuse a collective that not all members would call.

        ``called`` is the function of torch.distributed, ``ranks`` the members of its group.  Raises RecycleError inside
        of what a program runs, and in threads other than the one that trains.  A group of one has nobody to wait for.
        """
        if len(ranks) == 1 or self.is_own:
            return
        work, trainer = self._session.thread.work, self._session.thread.ident
        elsewhere = trainer is not None and not self._trains_here
        if work is None and not elsewhere:
            return
        where = f"torch.distributed.{called} over {named(ranks)}, called at {calling_line()}"
        if elsewhere:
            raise RecycleError(
                f"{where} in thread {threading.current_thread().name!r}: groups that can lose members meet in the "
                "order of one thread's calls; "
                "call it in the thread that trains, between steps"
            )
        raise RecycleError(
            f"{where} in {work}: after a loss other workers run what a micro-batch needs, some more often than others, "
            "so the members would wait for each other in vain; leave collectives out of layers, but for those over "
            "recycle_plugin.seat_group(), out of loss functions, data and optimizers: train_batch() returns the loss "
            "over all micro-batches, "
            "and between steps there is recycle_plugin.mean(tensor, group)"
        )

    def sum_without(
        self, called: str, ranks: Sequence[int], live: Sequence[int], line: str, scales: bool = True
    ) -> None:
        """Warn about, or refuse, a sum of a script over a group that has lost members, unless it ``scales`` and the
        job asks for that.

        ``live`` are those of ``ranks`` that are left, ``line`` is the script's ``file:line``; the lowest live rank
        warns once for each line.  Raises RecycleError where ``group_sums`` is "raise".
        """
        if len(live) == len(ranks) or (scales and self._session.group_sums == SCALE):
            return
        lost = [rank for rank in ranks if rank not in live]
        text = (
            f"{line}: torch.distributed.{called} over {named(ranks)} adds up what {len(live)} of {len(ranks)} have, "
            f"{named(lost)} being lost, and get_world_size() stays as it was"
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
        """Whether what is called now is called by a layer, or a framework's step, in what all workers of a seat do
        together.
        """
        work = self._session.thread.work
        return isinstance(work, Instruction) and work.op in JOINT and self._trains_here

    @property
    def is_own(self) -> bool:
        """Whether the collective that is called now is one of the plugin's own sums, a REDUCE or TIE instruction:
        rerouting has put the lost members' part into it.
        """
        work = self._session.thread.work
        return isinstance(work, Instruction) and work.op in SUMS and self._session.thread.ident == threading.get_ident()

    @property
    def _trains_here(self) -> bool:
        """Whether the calling thread is the one that trains, or one in which autograd runs a backward for it: where
        tensors are on an accelerator their hooks are called in autograd's own thread, and the other one waits for that.
        """
        session = self._session
        return session.thread.ident == threading.get_ident() or (
            session.thread.backward and torch._C._current_graph_task_id() != NO_BACKWARD
        )


def calling_line() -> str:
    """The line of the script, as ``file:line``, that called into torch, DeepSpeed or this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a line of torch's"


def named(ranks: Sequence[int]) -> str:
    """The ranks in words for a message, "ranks 0, 1, 5"; past 16 only how many more there are."""
    shown = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"

"""Lines between workers, or to the coordinator, that break or swallow something."""

from __future__ import annotations

import os
import socket

from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.runtime.collectives.gloo import GlooLink
from recycle_plugin.runtime.control.heartbeats import Heartbeats
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.operations import TorchOperations
from wrappers.trainers import TRAINERS


def swallow(seat: str, only: str, times: int) -> None:
    """What the worker at ``seat`` is to send in the instruction ``only`` is gone without a trace, so many ``times``."""
    transfer, begin, left = TorchMachine.transfer, TorchMachine.begin, [True] * times

    def begins(self: TorchMachine, instruction):
        self.swallows = str(instruction) == only
        begin(self, instruction)

    def changed(self: TorchMachine, datum, value, target, valid_from) -> None:
        if str(TRAINERS[0].seat) == seat and self.swallows and left:
            left.pop()
        else:
            transfer(self, datum, value, target, valid_from)

    TorchMachine.transfer, TorchMachine.begin = changed, begins


def break_sum(seat: str, step: int, times: int) -> None:
    """The first ``times`` that the worker at ``seat`` begins its stage's sum of ``step``, the connections to the others
    break.
    """
    add_up, start, left, due = TorchOperations.add_up, GlooLink.start, [True] * times, []

    def changed(self: TorchOperations, instruction, have, *given):
        if left and (str(have.seat), instruction.op, instruction.step) == (seat, Op.REDUCE, step):
            due.append(left.pop())
        return add_up(self, instruction, have, *given)

    def broken(self: GlooLink, operation):
        if due:
            due.pop()
            self.connect().wait(60)
            _shut(self._opened)
        return start(self, operation)

    TorchOperations.add_up, GlooLink.start = changed, broken


def _shut(inodes: set[int]) -> None:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.stat(f"/proc/self/fd/{descriptor}").st_ino in inodes:
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed meanwhile, or a listener


def cut_line(seat: str, step: int) -> None:
    """From ``step`` on nothing gets through between the worker at ``seat`` and the coordinator, and neither end sees a
    broken line.
    """
    execute, send, take, heard = Worker.execute, Session.send, ControlView.take, Heartbeats.heard
    cut = []

    def changed(self: Worker, program):
        if str(self.seat) == seat and program.step == step:
            cut.append(True)
        return execute(self, program)

    Worker.execute = changed
    for owner, name, function in ((Session, "send", send), (ControlView, "take", take), (Heartbeats, "heard", heard)):
        setattr(owner, name, lambda self, message, function=function: None if cut else function(self, message))

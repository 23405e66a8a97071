"""The causes for which workers are suspected and given up: few words, so that failures can be counted by them."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """A reason to suspect or give up a worker. Its value, in events and metrics, is the same in all releases."""

    ERROR = "error"  # its script ended with an error
    DIED = "died"  # its process was ending or has ended, or its connection broke: what is seen first is chance
    SILENT = "silent"  # neither it nor its supervisor was heard
    STOPPED = "stopped"  # its process was stopped, by SIGSTOP or the like
    STUCK = "stuck"  # it made no progress with what others waited for
    DIFFERS = "differs"  # its state differs from that of its stage's other replicas
    LINK = "link"  # data between it and another live worker was lost again and again
    CONFUSED = "confused"  # it said what can't be (core/coordinator/words.py)
    TOGETHER = "together"  # it shares a failure domain with one that is lost

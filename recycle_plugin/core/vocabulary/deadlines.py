"""All deadlines of a running job: who waits how long for what, and what happens then.

Giving up a healthy worker costs a worker; waiting for a dead one costs time. An ended process and a broken connection
are seen at once and have no deadline. Deadlines are for workers that are silent, stopped or stuck. A slow moment looks
the same: a long micro-batch, a switch that fails over, a virtual machine that moves, a busy disk. So suspicion comes
first (after a third of the time), and a worker that may be healthy gets more time than one that hardly can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

SUSPECTED = 1 / 3  # of a deadline, after which a suspicion is reported
STEPS = 3  # median steps: what an instruction may take in slow jobs, whatever the settings say
TICK_S = 0.25  # between two ticks of the failure detector
LATE_S = 2 * TICK_S  # the most time that is counted between two ticks
HEARD_A_SECOND = 512  # heartbeats of each sort that the coordinator hears, in large jobs
WORKER_BEAT_S, SUPERVISOR_BEAT_S = 1.0, 0.5  # between two heartbeats of one process, in small jobs
STALL = 2  # times an instruction's deadline: the worker to blame for a standstill, if there is one, is found first
APART = 8  # times heartbeat_timeout_s, within which the others have long given up a worker that hears nobody


class Deadline(NamedTuple):
    """A row of the table: after ``seconds``, decided by ``setting``, without what is ``awaited``, ``then`` happens."""

    seconds: float
    setting: str
    awaited: str
    then: str


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of a job in seconds, each named like its setting; infinite if it is off."""

    heartbeat_timeout_s: float = inf
    progress_timeout_s: float = inf
    busy_timeout_s: float = inf
    last_worker_timeout_s: float = inf
    idle_timeout_s: float = inf
    wait_timeout_s: float = inf

    def instruction_s(self, step_s: float) -> float:
        """Return the seconds for an instruction whose process uses no CPU. ``step_s``: the median step, or 0."""
        return max(self.progress_timeout_s, STEPS * step_s)

    def busy_s(self, step_s: float) -> float:
        """Return the seconds for an instruction whose process computes. ``step_s``: the median step, or 0."""
        return max(self.busy_timeout_s, STEPS * step_s)

    def stall_s(self, step_s: float) -> float:
        """Return the seconds for which all may wait for each other idly. ``step_s``: the median step, or 0."""
        return STALL * self.instruction_s(step_s)

    @property
    def cut_off_s(self) -> float:
        """The seconds without a message from the coordinator after which a worker ends."""
        return APART * self.heartbeat_timeout_s

    @property
    def agreement_s(self) -> float:
        """The seconds for which the survivors of a failure may wait for each other: late ones are given up before, and
        no worker has reached its ``wait_timeout_s``.
        """
        return (self.idle_timeout_s + self.wait_timeout_s) / 2

    @property
    def table(self) -> list[Deadline]:
        """The finite deadlines, one row each, in the order in which they fire."""
        rows = [
            Deadline(
                self.heartbeat_timeout_s,
                "heartbeat_timeout_s",
                "a message from a worker or its supervisor",
                "it is given up",
            ),
            Deadline(
                self.progress_timeout_s,
                "progress_timeout_s",
                f"an instruction of a process that is stopped or uses no CPU; {STEPS} median steps where these are "
                "longer",
                "its worker is given up",
            ),
            Deadline(
                STALL * self.progress_timeout_s,
                "progress_timeout_s",
                "progress of any worker, while all wait for each other",
                "all regroup; a second time, the job ends",
            ),
            Deadline(
                self.busy_timeout_s,
                "busy_timeout_s",
                "an instruction of a process that uses the CPU",
                "its worker is given up",
            ),
            Deadline(
                self.cut_off_s, "heartbeat_timeout_s", "a message from the coordinator to a worker", "its process ends"
            ),
            Deadline(self.agreement_s, "wait_timeout_s", "the survivors' agreement after a failure", "the job ends"),
            Deadline(
                self.last_worker_timeout_s,
                "last_worker_timeout_s",
                "a stage's last worker, whatever it does",
                "the job ends",
            ),
            Deadline(
                self.idle_timeout_s,
                "idle_timeout_s",
                "the script's own code, data, a checkpoint, the first step, or an instruction for which a worker "
                "was given up before",
                "its worker is given up",
            ),
            Deadline(self.wait_timeout_s, "wait_timeout_s", "anything else that a worker waits for", "the job ends"),
        ]
        return sorted((row for row in rows if isfinite(row.seconds)), key=lambda row: row.seconds)

    def contradictions(self) -> list[tuple[str, str]]:
        """Return pairs of settings that contradict each other: the first has to be at most the second, and less than
        ``wait_timeout_s``.
        """
        pairs = (
            ("progress_timeout_s", "busy_timeout_s"),
            ("busy_timeout_s", "idle_timeout_s"),
            ("heartbeat_timeout_s", "last_worker_timeout_s"),
            ("progress_timeout_s", "last_worker_timeout_s"),
            ("idle_timeout_s", "wait_timeout_s"),
            ("last_worker_timeout_s", "wait_timeout_s"),
        )
        return [
            (first, last)
            for first, last in pairs
            if (getattr(self, first), first) > (getattr(self, last), "" if last == "wait_timeout_s" else first)
        ]


def lease_s(deadlines: Deadlines) -> float:
    """Return the seconds after a heartbeat for which its worker is not given up for silence. They are the shorter of
    ``progress_timeout_s`` and of what remains of ``heartbeat_timeout_s`` if the failure detector's ticks come late.
    """
    return min(deadlines.progress_timeout_s, deadlines.heartbeat_timeout_s - LATE_S - TICK_S)


def paced_s(every_s: float, ranks: int, deadlines: Deadlines) -> float:
    """Return the seconds between two heartbeats of one process in a job of ``ranks``: ``every_s`` in small jobs. One
    coordinator hears all, so in large jobs each sends fewer, yet five within ``heartbeat_timeout_s``.
    """
    return max(every_s, min(ranks / HEARD_A_SECOND, deadlines.heartbeat_timeout_s / 5))


def shown(table: list[Deadline]) -> str:
    """Return the table of deadlines as text, one line for each."""
    width = max((len(f"{row.seconds:g}") for row in table), default=0)
    return "\n".join(
        f"  {row.seconds:>{width}g} s  {row.awaited}: then {row.then} (recycle.{row.setting})" for row in table
    )

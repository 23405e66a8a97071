"""What is on the stand-in accelerator goes over the false NCCL (tests/support/standin/nccl.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from recycle_plugin.runtime.collectives import nccl, nccl_door, outcomes, pairs, transports
from recycle_plugin.runtime.collectives.asked import ON_DEVICE, SCRIPT, SUMS_ON_DEVICE, Asked, Call
from recycle_plugin.runtime.collectives.in_flight import Flight
from recycle_plugin.runtime.collectives.link import Broadcast, unheard
from recycle_plugin.runtime.collectives.nccl import Begun, NcclLink, process_group, thin_group
from recycle_plugin.runtime.collectives.pairs import LinkedPairs, Parcel, Way
from recycle_plugin.runtime.movers.wire import Apart
from recycle_plugin.runtime.worker.trainer import Trainer
from wrappers.trainers import TRAINERS, inside, wait_until

LINKED = 3  # the step before which links stand
HELD_S = 0.5  # how long the training thread does not hear of a loss; it has to be less than DEATH_S


def over_false_nccl(
    folder: str, mistake: str = "", connections: int = 0, lazy: bool = False, launches: int = 0, stuck_s: float = 0
) -> None:
    """How many sums and tensors have ended well over it is in a file for each worker, behind each step; the third step
    waits for the links of boundary tensors.

    ``mistake``: one of tests/mistakes/nccl.py is planted.  ``connections``: so many queues of the hardware, in which
    streams stand behind each other; ``lazy``: a kernel that runs for the first time waits for stuck ones;
    ``launches``: so many kernels a stream takes; ``stuck_s``: so long an operation between two may take.
    """
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.support import standin
    from tests.support.standin import nccl as false
    from tests.support.standin.device import extension

    extension.share_queues(connections)
    extension.load_lazily(lazy)
    false.LAUNCHES = launches or false.LAUNCHES
    pairs.STUCK_S = stuck_s or pairs.STUCK_S

    os.environ |= nccl_door.sets(os.environ)
    dist.ProcessGroupNCCL = false.ProcessGroupNCCL
    made, thin = (partial(transports.over_nccl, make) for make in (process_group, thin_group))
    transports.LINKS[standin.NAME] = transports.Way(made, takes=nccl.takes, open_thin=thin)
    train = Trainer.train

    def trained(self: Trainer) -> float:
        mover = self._parts.transport
        if self.step == LINKED - 1 and isinstance(mover, LinkedPairs):
            wait_until(lambda: all(way.stands or way.over for way in mover._ways()), "links of boundary tensors")
        loss = train(self)
        Path(folder, f"{self.seat}.json").write_text(json.dumps(false.counted))
        return loss

    Trainer.train = trained
    if mistake:
        from tests.mistakes.nccl import IN_SUMS

        IN_SUMS[mistake]()


def never_abort(folder: str, seat: str) -> None:
    """At ``seat`` an abort does not end; others begin theirs later, which would end what it is stuck in."""
    from tests.support.standin import nccl as false

    nccl.ABORT_S = outcomes.ABORT_S = 1.0
    abort = false.ProcessGroupNCCL.abort

    def changed(self: false.ProcessGroupNCCL) -> None:
        begun = Path(folder, f"{seat} aborts")
        if str(TRAINERS[0].seat) == seat:
            if self._size > 2:  # a sum's, and not of boundary tensors
                begun.touch()
            threading.Event().wait()
        wait_until(begun.exists, f"abort at {seat}")
        abort(self)

    false.ProcessGroupNCCL.abort = changed


def die_beside_stuck_sums(folder: str, seat: str, step: int, others: list[str], last: str = "") -> None:
    """The worker at ``seat`` dies in a sum of ``step`` that ``others`` have launched.  Their threads that train hear
    of the loss later than their links do, as if somebody else had the machine meanwhile.  The links of ``last``, one of
    the others, hear of it only when they have seen that another one's abort has ended their kernels.
    """
    launch, begin, give_up = NcclLink._launch, Flight.begin, Flight.give_up_links

    def now() -> tuple[str, int]:
        work = inside().session.thread.work
        return str(TRAINERS[0].seat), work.step if work is not None else 0

    def launched(self: NcclLink, begun: Begun) -> None:
        launch(self, begun)
        if self.connected and now()[1] == step:
            Path(folder, f"{now()[0]} has launched").touch()

    def begun(self: Flight, asked: Asked, link: str = SCRIPT) -> Call:
        if link == SUMS_ON_DEVICE and now() == (seat, step):
            wait_until(lambda: all(Path(folder, f"{other} has launched").exists() for other in others), "launches")
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, asked, link)

    def given_up(self: Flight) -> None:
        links = [link for which, (link, _) in self._links.items() if which.startswith(ON_DEVICE)]
        stuck = [each for link in links for each in link.device._launched]
        if now()[0] == last:
            wait_until(lambda: all(each.handle.poll() for each in stuck), "what other members' aborts do here")
        give_up(self)
        if stuck:
            threading.Event().wait(HELD_S)

    NcclLink._launch, Flight.begin, Flight.give_up_links = launched, begun, given_up


def fail_a_launch(seat: str, step: int, at: str) -> None:
    """At ``seat``, which sends or receives (``at``), the first boundary tensor of ``step`` can't be launched."""
    name = {"the sender": "_begin_sending", "the receiver": "_begin_receiving"}[at]
    begin, start, failing = getattr(LinkedPairs, name), NcclLink._start, set()

    def noted(self: LinkedPairs, way: Way | str, what: Parcel | Apart) -> None:
        if str(TRAINERS[0].seat) == seat and what.datum.step == step and not failing:
            link = (self._in[way] if isinstance(way, str) else way).link
            failing.add(link.device)
        begin(self, way, what)

    def started(self: NcclLink, begun: Begun) -> None:
        if self in failing and isinstance(begun.operation, Broadcast):
            raise RuntimeError("CUDA error: too many resources requested for launch")
        start(self, begun)

    setattr(LinkedPairs, name, noted)
    NcclLink._start = started


def receive_late(folder: str, seat: str, step: int) -> None:
    """At ``seat`` what comes first of ``step`` is begun only when the membership has changed."""
    begin, held = LinkedPairs._begin_receiving, set()

    def late(self: LinkedPairs, sender: str, message: Apart) -> None:
        if str(TRAINERS[0].seat) == seat and message.datum.step == step and not held:
            held.add(message.datum)
            Path(folder, "announced").touch()
            wait_until(lambda: self._session.view.number > message.generation, "change of the membership")
        begin(self, sender, message)

    LinkedPairs._begin_receiving = late


def die_in_the_making(seat: str, at: str, generation: int = 1) -> None:
    """The worker at ``seat`` dies as it makes its first link of boundary tensors of ``generation`` or a later one, or
    as it sends its first tensor over one: ``at`` says where.
    """

    def dies(link: NcclLink, moment: str) -> None:
        of_tensors = "boundary tensors" in link._meeting._called
        if moment == at and of_tensors and link.generation >= generation and str(TRAINERS[0].seat) == seat:
            os.kill(os.getpid(), signal.SIGKILL)

    meet, first, launch = NcclLink._meet, NcclLink._start_first, NcclLink._launch

    def met(self: NcclLink) -> None:
        come = self._meeting.come

        def came(timeout: timedelta) -> None:
            dies(self, "before its word")
            come(timeout)
            dies(self, "behind its word")

        self._meeting.come = came
        meet(self)

    def first_started(self: NcclLink, begun: Begun) -> None:
        dies(self, "before its first use")
        first(self, begun)
        dies(self, "in its first use")

    def launched(self: NcclLink, begun: Begun) -> None:
        announce = begun.launched
        if announce is not unheard:

            def said() -> None:
                dies(self, "before its announcement")
                announce()
                dies(self, "behind its announcement")

            begun.launched = said
        launch(self, begun)
        if announce is unheard:
            dies(self, "behind its half")

    NcclLink._meet, NcclLink._start_first, NcclLink._launch = met, first_started, launched


def receive_slowly(seat: str, each_s: float) -> None:
    """At ``seat`` what comes is begun late, one after the other."""
    begin = LinkedPairs._begin_receiving

    def late(self: LinkedPairs, sender: str, message: Apart) -> None:
        if str(TRAINERS[0].seat) == seat:
            threading.Event().wait(each_s)
        begin(self, sender, message)

    LinkedPairs._begin_receiving = late

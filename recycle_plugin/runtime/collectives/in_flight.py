"""The operations of one process group that are under way, over the links of its live members.

Each call starts at once and runs in the background, in call order. A membership change inside a training step breaks
it, and recovery handles that. The script's calls between steps survive: each member leaves its unfinished calls, and
says which ones are behind it (runtime/collectives/outcomes.py). Once all have said so, a member takes a result from one
that has it, or starts the call again among the remaining members, still in call order.

A newcomer takes part in calls made after it came in. Earlier calls of all go on among those that made them, over a link
of their own. Before that its script runs alone (runtime/collectives/startup.py).

An interruption leaves nothing half done. The script's operations have buffers of their own (runtime/collectives/
link.py), new ones for each try, in host memory or beside the tensors for a link of their accelerator. The script's
tensors are written after success. The plugin's own sums go straight to buffers that nobody reads after an interruption.
These sums have a link of their own, since recovery runs them in another order than the script's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import is_

import torch
from torch.distributed import ReduceOp

from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.from_workers import Missing
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.core.worker.whereabouts import Reading
from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.collectives.asked import (
    EACH,
    OF_SCRIPT,
    ON_DEVICE,
    SCRIPT,
    SCRIPT_ON_DEVICE,
    SUMS,
    SUMS_ON_DEVICE,
    Asked,
    Call,
    Channel,
)
from recycle_plugin.runtime.collectives.link import Broken, Handle, Link
from recycle_plugin.runtime.collectives.outcomes import LARGEST, Outcomes, Said, lines_of
from recycle_plugin.runtime.collectives.startup import Startup
from recycle_plugin.runtime.collectives.transports import open_link, stays_there
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import HOST, on_host
from recycle_plugin.runtime.devices.kinds import fetch, order_of, write
from recycle_plugin.runtime.movers.tcp import DEATH_S
from recycle_plugin.runtime.state.touch import tensors_in

NEWS_TIMEOUT_S = 30.0  # from a broken connection to the coordinator's report of the loss


class Flight:
    """All operations under way of one group, over the links of its live members. ``name``: the group's; ``ranks``: its
    members' global ranks; ``rank``: this worker's logical one.
    """

    def __init__(
        self,
        session: Session,
        outcomes: Outcomes,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
    ) -> None:
        self._session, self._outcomes = session, outcomes
        self._name, self._ranks, self._rank, self._timeout = name, ranks, rank, timeout
        self._lock = threading.RLock()
        self._calls: list[Call] = []  # not over, or not yet noticed to be
        self._links: dict[str, tuple[Link, Handle]] = {}  # each with the handle of its connecting
        # by logical member; None: not known yet, so the script's calls have to wait
        self._said: dict[int, dict[str, Said]] | None
        self._join()
        outcomes.follow(self)

    # --- calls ----------------------------------------------------------------------------------------

    def begin(self, asked: Asked, link: str = SCRIPT) -> Call:
        """Start the call, or queue it until all members have said which calls are behind them. Raises the error of a
        call that fails at once, and RecycleError if its check refuses it.
        """
        if link == SCRIPT and self._on_device(asked):
            link = SCRIPT_ON_DEVICE
        outside = self._session.hooks.between_steps is not None or self._session.view.generation is None
        lasts, startup = link in OF_SCRIPT and outside and len(self._ranks) > 1, self._outcomes.startup
        if link in OF_SCRIPT:
            self._hand_over_finished()
            self._count_on()
        with self._lock:
            try:
                asked.check()
            except RecycleError:
                if lasts and not startup.alone:
                    self._refuse(asked)
                raise
            order = order_of(tensors_in((asked.tensors, asked.given)))
            call = Call(asked, link, None, lasts, order, frozenset(self._live))
            if lasts and startup.alone:
                self._replay(call, startup)
                return call
            if lasts:
                call.number = self._number_of(asked)
                call.kept = startup.keep(self._line(asked.gives), asked.called, asked.tensors, asked.has_result)
            self._calls.append(call)
            if link not in OF_SCRIPT:
                self._start(call)
            elif self._said is not None:
                self._go_on_with(call)
            elif not self._asking:
                self._ask()
            self._notice(call)
            if call.error is not None:
                self._forget(call)
                raise call.error
        return call

    def _on_device(self, asked: Asked) -> bool:
        """Whether a script's call goes over a link of its accelerator; messages between two members do not. The members
        agree since each decides by the tensors it writes to, or by those it gives if it writes to none.
        """
        decide = [*tensors_in(asked.tensors or asked.given)]
        return not isinstance(asked.gives, Channel) and stays_there(self._session, decide, asked.op)

    def _refuse(self, asked: Asked) -> None:
        """Count a refused call as over: other members may hear of the loss or return before or after their own call."""
        number = self._number_of(asked)
        if number is not None:
            self._outcomes.add(self._line(asked.gives), number, None)

    def _replay(self, call: Call, startup: Startup) -> None:
        """Give a newcomer's script the result that its predecessor's got."""
        asked = call.asked
        kept = startup.replay(self._line(asked.gives), asked.called, asked.tensors, self._ranks)
        call.asked, call.held = asked._replace(writes=bool(kept.values)), kept.values or []
        call.source, call.over = kept.source, True

    def _count_on(self) -> None:
        """Continue the others' numbers in this group's sequences, once, as a newcomer."""
        while (hear := self._outcomes.count_on(self._name, self.live_ranks())) is not None:
            try:
                self._session.waiting.run(f"the other members' positions in {self._name}", hear)
            except Interrupted:
                if self._session.hooks.between_steps is None:
                    raise
                self._session.hooks.between_steps()

    def finish(self, call: Call, timeout_s: float = 0) -> None:
        """Return when the call is over and its caller has the result; raises its error. A membership change interrupts
        it inside a step. Between steps recovery runs first, then the call goes on.
        """
        while not call.over:
            self._see_to(
                call,
                lambda: self._session.waiting.until(
                    lambda: self._awaited(call), lambda: call.has_news, timeout_s=timeout_s
                ),
            )
        with self._lock:
            self._forget(call)
        self._hand_over(call)
        call.order.join()
        if call.link in OF_SCRIPT:
            self._hand_over_finished()

    def poll(self, call: Call) -> bool:
        """Return whether the call is over; if so without error, its caller has the result."""
        if not call.over:
            self._see_to(call, self._session.view.check)
        if call.over and call.error is None:
            self._hand_over(call)
            call.order.join()
        return call.over

    def _see_to(self, call: Call, look: Callable[[], object]) -> None:
        try:
            look()
            broken = self._notice(call)
            if broken is not None:
                self._await_news(call, broken)
        except Interrupted:
            if self._session.hooks.between_steps is None:
                self.break_off(call)
                raise
            self._session.hooks.between_steps()

    def break_off(self, call: Call) -> None:
        """Leave a call inside a step, since the step makes it anew; the script's calls between steps stay."""
        with self._lock:
            if not call.lasts:
                self._forget(call)
                if call.handle is not None:
                    call.handle.leave()

    def _forget(self, call: Call) -> None:
        if call in self._calls:
            self._calls.remove(call)

    def _number_of(self, asked: Asked) -> int | None:
        """Number a script's call. None for a receive from any source: its sequence is known only when it ends. Raises
        RecycleError for a second receive beside such a receive: after a loss it would not be known which of the two
        gets which message.
        """
        way = asked.gives
        if isinstance(way, Channel) and way.target == self._rank:
            for other in self._calls:
                if (
                    isinstance(other.asked.gives, Channel)
                    and other.asked.gives[1:] == way[1:]
                    and None in (way.source, other.asked.gives.source)
                ):
                    raise RecycleError(
                        f"torch.distributed.{asked.called} with tag {way.tag} while another one is under way, "
                        "one of them from any source: wait for that one first, so that after a loss it is known which "
                        "message each was to get"
                    )
            if way.source is None:
                return None
        return self._outcomes.take_number(self._line(asked.gives))

    def _line(self, gives: str | Channel) -> str:
        """Return the name of the sequence that counts a call."""
        return lines_of(self._name) + gives.name if isinstance(gives, Channel) else self._name

    # --- tries ----------------------------------------------------------------------------------------

    def _go_on_with(self, call: Call) -> None:
        """Start a call whose turn it is, or take its result from other members. Called once all members have posted
        which calls they have finished.
        """
        try:
            if not call.lasts or not self._taken(call):
                call.asked.check()
                self._start(call)
        except RecycleError as error:
            self._end(call, error)

    def _start(self, call: Call) -> None:
        asked = call.asked
        try:
            with call.order.kept():
                call.held = [_buffer(call, tensor) for tensor in asked.tensors]
        except torch.OutOfMemoryError as error:
            self._leave_device(call, error)
            return
        # it makes no difference whether two members ask before or after a third comes in
        of_two = isinstance(asked.gives, Channel)
        call.members = [logical for logical in self._live if of_two or logical in call.asking]
        if len(call.members) == 1 and not asked.alone:
            _adjust(call)
            self._end(call)
            return
        try:
            with call.order.kept():
                operation = asked.make(call.held, _positions(call.members))
        except RuntimeError as error:  # tensors that do not fit together, or a full device
            self._leave_device(call, error)
            return
        where = call.held[0].device if call.link in ON_DEVICE else HOST
        link, call.connecting = self._link(call.link, call.members, where)
        with call.order.kept():
            call.handle = link.start(operation)
        call.handle.when_over(self._session.waiting.wake)

    def _leave_device(self, call: Call, error: BaseException) -> None:
        """End a call that could not be launched. On an accelerator its link goes too: without numbers, the next
        operation would meet the one that the others have begun.
        """
        if call.link in ON_DEVICE:
            self.give_up_links()
        self._end(call, error)

    def _notice(self, call: Call) -> Broken | None:
        """Record the outcome of the present try; return the error that broke it, or None."""
        with self._lock:
            handle = call.handle
            if call.over or handle is None or not handle.poll():
                return None
            if isinstance(handle.error, Broken):
                return handle.error
            if handle.error is None:
                _adjust(call)
            if handle.source is not None:
                call.source = call.members[handle.source]
            self._end(call, handle.error)
            return None

    def _end(self, call: Call, error: BaseException | None = None) -> None:
        call.error, call.handle, call.fetched, call.over = error, None, None, True
        if call.lasts:
            self._count(call)
        self._session.waiting.wake()

    def _count(self, call: Call) -> None:
        """Record that a call is behind this worker. A failed call counts too: it has failed elsewhere as well."""
        if call.kept is not None:
            here = [fetch(value, call.asked.called) for value in call.held if call.error is None]
            self._outcomes.startup.fill(call.kept, here, call.source, call.error)
            call.kept = None
        gives = call.asked.gives
        if call.number is None and call.source is not None:
            assert isinstance(gives, Channel), "only what comes from anybody has no number yet"
            gives = gives._replace(source=call.source)
            call.number = self._outcomes.take_number(self._line(gives))
        if call.number is not None:
            whole = gives != EACH and call.error is None and len(call.held) == len(call.asked.tensors)
            with call.order.kept():
                self._outcomes.add(self._line(gives), call.number, call.held if whole else None)

    def _hand_over_finished(self) -> None:
        """Hand all finished calls their results, also those that nobody has waited for."""
        with self._lock:
            for call in self._calls:
                self._notice(call)
            finished, self._calls = (
                [call for call in self._calls if call.over],
                [call for call in self._calls if not call.over],
            )
        for call in finished:
            if call.error is None:
                with suppress(RuntimeError):  # whoever waits for that call gets it, not whoever makes the next one
                    self._hand_over(call)

    def _hand_over(self, call: Call) -> None:
        if call.error is not None:
            raise call.error
        if call.handed:
            return
        call.handed = True
        if not call.asked.writes or all(map(is_, call.held, call.asked.tensors)):
            return
        try:
            with torch.no_grad(), call.order.kept():
                # without no_grad, autograd would treat the tensor as modified
                for tensor, value in zip(call.asked.tensors, call.held):
                    if value is not tensor:
                        write(tensor, value, call.asked.called)
        except RuntimeError as error:  # of a tensor that can't be written to, such as an expanded one
            call.error = error
            raise

    # --- membership -----------------------------------------------------------------------------------

    def live_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the live members, in the group's order."""
        if self._session.view.generation is None:
            return self._ranks
        live = set(self._session.view.roster.ranks)
        return tuple(rank for rank in self._ranks if rank in live)

    def _join(self) -> None:
        """Adopt the session's membership: the live members, and their positions in links."""
        self._generation = self._session.view.number
        live = set(self.live_ranks())
        self._live = [logical for logical, rank in enumerate(self._ranks) if rank in live]
        self.position = _positions(self._live)
        self._others = [logical for logical in self._live if logical != self._rank]
        self._said = None if self._generation and self._others else {}
        self._ends: dict[str, int] = {}  # one past the last call that is over elsewhere
        self._asking = False

    def give_up_links(self) -> None:
        """Abort links on accelerators before a membership change. Takes no lock: its holder may wait for the device."""
        for which, (link, _) in list(self._links.items()):
            if which.startswith(ON_DEVICE):
                link.abort()

    def cut(self) -> list[Handle]:
        """Leave unfinished calls, those inside a step as Interrupted; returns the handles of aborted links."""
        with self._lock:
            for call in self._calls:
                self._notice(call)
                if call.handle is not None and not call.over:
                    call.handle.leave()
                    call.handle = None
                call.fetched = None
                if not call.lasts and not call.over:
                    self._end(call, Interrupted(f"the membership has changed during {call.asked.called}"))
            # links of part of the old members, or on accelerators
            ends = [self._links.pop(which)[0].abort() for which in self._links.keys() - {SCRIPT, SUMS}]
            self._join()
        return ends

    def go_on(self) -> None:
        """Resume calls that survive the membership change, once it is known which are behind the other members. A
        newcomer asks for that at once: two of the others may be about to meet on the link of all.
        """
        with self._lock:
            if self._said is not None:
                self._go_on_with_all()
            elif self._outcomes.lets_in or any(not call.over for call in self._calls):
                self._ask()

    def _ask(self) -> None:
        self._asking = True
        threading.Thread(
            target=self._hear,
            args=(self._generation, [self._ranks[other] for other in self._others]),
            name=f"recycle: what is behind {self._name}",
            daemon=True,
        ).start()

    def _hear(self, generation: int, others: list[int]) -> None:
        """Learn which calls are behind the others, in its own thread. Waiting callers have their own deadlines."""
        try:
            said = self._outcomes.of_others(generation, others, self._name)
        except WaitTimeout:
            return
        except RecycleError as error:  # one of them has sent nonsense
            with self._lock:
                for call in self._calls:
                    if generation == self._generation and call.lasts and not call.over:
                        self._end(call, error)
            return
        with self._lock:
            if generation == self._generation:
                self._said = {self._ranks.index(rank): lines for rank, lines in said.items()}
                for line, each in (one for lines in said.values() for one in lines.items()):
                    self._ends[line] = max(self._ends.get(line, 0), each.end)
                    if self._outcomes.lets_in and line != self._name and each.under_way:
                        self._link(SCRIPT, self._live)  # its script may not come to it soon
                self._go_on_with_all()

    def _go_on_with_all(self) -> None:
        for call in self._calls:
            if call.handle is None and call.fetched is None and not call.over:
                self._go_on_with(call)

    def _taken(self, call: Call) -> bool:
        """Return whether a call is behind other members; if so it ends here too, with their result once that has come.
        Raises RecycleError if the result is no longer available.
        """
        asked, ahead, holders = call.asked, None, []
        if call.number is not None and call.number >= self._ends.get(self._line(asked.gives), 0):
            return False
        for other in self._sources(asked.gives):
            gives = asked.gives
            if call.number is None:
                assert isinstance(gives, Channel), "only what comes from anybody has no number yet"
                gives = gives._replace(source=other)
            line = self._line(gives)
            number = self._outcomes.next_number(line) if call.number is None else call.number
            assert self._said is not None, "it is not known yet what is behind the others"
            said = self._said.get(other, {}).get(line, Said())
            if said.is_over(number) and not (asked.tensors and asked.writes):
                call.held, call.source = [], other
                self._end(call)
                return True
            if said.is_over(number) and said.has(number):
                holders.append((other, line, number))
            ahead = other if said.is_over(number) else ahead
        if holders:
            self._fetch(call, *holders[self._rank % len(holders)])
            return True
        if ahead is not None:
            raise self._cant_be_had(call, ahead)
        return False

    def _fetch(self, call: Call, holder: int, line: str, number: int) -> None:
        reading = self._outcomes.ask(self._ranks[holder], line, number)
        call.fetched = holder, reading
        reading.when_news(lambda: self._take_result(call, holder, reading))
        self._take_result(call, holder, reading)

    def _take_result(self, call: Call, holder: int, reading: Reading) -> None:
        with self._lock:
            if call.fetched != (holder, reading) or reading.missing([self._ranks[holder]]):
                return
            values = self._outcomes.result(self._ranks[holder], reading)
            asked = [(tensor.shape, tensor.dtype) for tensor in call.asked.tensors]
            if values is None or [(value.shape, value.dtype) for value in values] != asked:
                self._end(call, self._cant_be_had(call, holder))
                return
            call.held, call.source = values, holder
            self._end(call)

    def _cant_be_had(self, call: Call, ahead: int) -> RecycleError:
        return RecycleError(
            f"{call.asked.called} was over on rank {self._ranks[ahead]} but not on rank {self._session.rank} when a "
            f"worker was lost, and its result (another one for each member, or more than {LARGEST >> 20} MiB) "
            "can't be fetched: go on from the last checkpoint"
        )

    def _sources(self, gives: str | Channel) -> list[int]:
        """Return the members that may be through with a call."""
        if not isinstance(gives, Channel):
            return self._others
        ends = {gives.source, gives.target}
        return [other for other in self._others if other in ends or gives.source is None]

    # --- waiting --------------------------------------------------------------------------------------

    def _wait_of(self, call: Call) -> Activity:
        ranks = tuple(self._ranks[logical] for logical in call.members) or self.live_ranks()
        return Activity(WAITS, f"{call.asked.called} among ranks {_listed(ranks)}", ranks=ranks)

    def _awaited(self, call: Call) -> Activity:
        fetched = call.fetched  # another thread may be asking, for a heartbeat
        if fetched is not None:
            rank = self._ranks[fetched[0]]
            return Activity(WAITS, f"the result of {call.asked.called} from rank {rank}", ranks=(rank,))
        if call.handle is None:
            silent = self._outcomes.whereabouts.read(self._generation).missing(
                self._ranks[other] for other in self._others
            )
            what = f"the outcome of {call.asked.called} elsewhere" + f", on rank {_listed(silent)}" * bool(silent)
            return Activity(WAITS, what, ranks=tuple(silent))
        connecting, wait = call.connecting, self._wait_of(call)
        if connecting is None or connecting.poll():
            return wait
        return wait._replace(what=f"{connecting.what} for {wait}")

    def _await_news(self, call: Call, failure: Broken) -> None:
        """Wait until the coordinator names a lost worker or has all meet again; raises Interrupted. After DEATH_S the
        coordinator is told of the failure; RecycleError follows after another NEWS_TIMEOUT_S.
        """
        wait, session = self._wait_of(call), self._session
        news = wait._replace(what=f"news of a lost worker after {wait} failed")
        try:
            session.waiting.until(news, lambda: None, timeout_s=DEATH_S)
        except WaitTimeout:
            session.send(Missing(session.rank, session.view.number, str(wait), ""))
        try:
            session.waiting.until(news, lambda: None, timeout_s=NEWS_TIMEOUT_S)
        except WaitTimeout:  # before the job's start nobody can be told to meet again
            raise RecycleError(
                f"{wait} failed, and after {NEWS_TIMEOUT_S:.0f} s none of its members is known to be lost: check the "
                "network between their hosts, "
                f"or let GLOO_SOCKET_IFNAME name the interface that connects them ({failure})"
            ) from failure

    # --- links ----------------------------------------------------------------------------------------

    def apart(self, called: str) -> Link:
        """Open a link of all members, named ``called``, that no membership change breaks."""
        return self._open(0, called, range(len(self._ranks)))

    def _open(self, generation: int, called: str, members: Sequence[int], where: torch.device = HOST) -> Link:
        """Open a link of these logical members, named ``called`` in this group, for tensors at ``where``."""
        ranks = [self._ranks[logical] for logical in members]
        return open_link(self._session, generation, f"{called} of {self._name}", ranks, self._timeout, where)

    def link_of(self, flat: torch.Tensor) -> str:
        """Return the link for the plugin's own sums of such a tensor."""
        return SUMS_ON_DEVICE if stays_there(self._session, [flat], ReduceOp(ReduceOp.SUM)) else SUMS

    def _link(self, which: str, members: Sequence[int], where: torch.device = HOST) -> tuple[Link, Handle]:
        """Return the present membership's link among these logical members, and the handle of its connecting. The
        previous link is aborted once the new link stands: no worker needs it by then, and the abort ends all waits on
        it.
        """
        some = "" if len(members) == len(self._live) else f" of {_listed(members)}"
        last, _ = self._links.get(which + some, (None, None))
        if last is None or last.generation != self._generation:
            link = self._open(self._generation, f"generation{self._generation}{which}{some}", members, where)
            self._links[which + some] = link, link.connect()
            if last is not None:
                self._links[which + some][1].when_over(last.abort)
        return self._links[which + some]


def _positions(members: Sequence[int]) -> dict[int, int]:
    """Return {logical member: position in the link}."""
    return {logical: place for place, logical in enumerate(members)}


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _adjust(call: Call) -> None:
    asked = call.asked
    if asked.adjust is None and all(map(is_, call.held, asked.tensors)):
        return
    with torch.no_grad(), call.order.kept():
        if asked.adjust is not None:
            for tensor in call.held:
                asked.adjust(tensor, len(call.members))
        call.held = [held.to(tensor.dtype) for held, tensor in zip(call.held, asked.tensors, strict=True)]


def _buffer(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Return the buffer for ``tensor`` in the present try of ``call``, laid out alike on all members. It is the tensor
    itself if nobody reads that after an interruption.
    """
    if call.link == SUMS_ON_DEVICE or (on_host(tensor) and not call.lasts):
        return tensor
    if call.link == SCRIPT_ON_DEVICE:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return fetch(tensor, "what goes to other workers", shared=False)

"""A false NCCL: process groups on the stand-in accelerator, with the methods and the semantics of torch's
ProcessGroupNCCL.

Members are processes.  Semantics are those that four processes on one H200 have shown (NCCL 2.30.7, torch 2.11):

* An operation is a kernel on a stream of its communicator; the call returns at once, also if a member is dead.
* A kernel waits for its peers, and nothing tells it that one is gone: it ends when they have come, or by `abort`.
* Other streams compute, and memory is allocated, beside a stuck kernel.  A kernel that runs for the first time
  (`standin.device.extension.load_lazily`) waits for the stuck one's end.
* `abort` waits for all kernels of the device, those of other groups too: of several groups with stuck kernels one after
  the other never ends, and all at once do.  Groups of the living work on, and a new one can be made.
* The first use of a direction between two members is made in the call, by both.  If the peer is dead, the call blocks
  for TORCH_NCCL_NONBLOCKING_TIMEOUT seconds and raises DistBackendError.
* So does the first call of all, which makes the group; meanwhile `abort` waits.  What it began goes on, and a later
  call finds it.

From NVIDIA's and torch's sources, not measured:

* A send ends only when it is received, at every size.  There are no tags; a pair has one stream for both directions.
* After an abort the kernel's output is garbage, and events behind it happen all the same.
* An aborted kernel leaves each of its waits, and goes on: what it has not received it passes on as garbage, with the
  flags that say that data has come.  So kernels of members that are not aborted end well, with garbage; also those
  that begin later, which find its own data spoilt: it has gone on without waiting for room.
* A stream takes LAUNCHES kernels, and then the call blocks.
* torch has 32 streams of a priority, and then gives the first one again: what is launched in one of another group waits
  for that one's kernels.
* Streams share CUDA_DEVICE_MAX_CONNECTIONS queues, where a kernel waits for all that came into its queue before
  (`standin.device.extension.share_queues`).  In fact one may begin beside another that runs, and only what stands
  behind a wait is held up.
* A broadcast in place only reads the root's buffer (src/device/broadcast.h).
* A call of a communicator that is not non-blocking can't be ended by an abort.

Stricter than NCCL: an output is NaN from the launch to the end of its kernel.  What is launched behind a kernel runs at
once on the stand-in, and so reads what it would read after an abort.  Sums are added from the last member to the first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from multiprocessing.connection import Client, Connection, Listener
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from tests.support.standin import NAME
from tests.support.standin.device import extension

LAUNCHES = 1024
# kinds of frames; SENDS, RECEIVES: of a direction's first use; in the place of ALL GARBAGE, passed on by an abort, and
# SPOILT, where the abort was the sender's own
WHOLE, ALL, MESSAGE, TAKEN, SENDS, RECEIVES, GARBAGE, SPOILT = range(8)
HUB = -1
REDUCTIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}

Key = tuple[int, int, int]  # who has sent it, kind, number
Sent = tuple[int, int, int, bytes]  # a frame: to whom, kind, number, and what
Does = tuple[Sequence[Sent], Sequence[Key], Callable[[Sequence[bytes]], object]]  # of a kernel: what it sends, needs,
# and finishes with
counted: Counter[str] = Counter()  # kernels that have ended well, by operation
under_way: set[int] = set()  # kernels, of all groups of this process
ended = threading.Condition()  # some of them


class Kernel(NamedTuple):
    """``sends`` and ``needs`` are frames; ``finish`` writes the outputs from those that have come.

    ``behind``: the kernels of this process that have to end before it begins.
    """

    name: str
    held: int
    behind: frozenset[int]
    sends: Sequence[Sent]
    needs: Sequence[Key]
    finish: Callable[[Sequence[bytes]], object]


class Work:
    """An operation that was launched."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Have the caller's stream wait for it; the host goes on."""
        torch.accelerator.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether its kernel has ended, well or by an abort."""
        return self._event.query()


class Hub:
    """Passes frames on between the members of a group.  Nobody hears of a member that has gone."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._members: dict[int, Connection] = {}
        self.number = uuid4().int
        self._listener = Listener(address_of(self.number), "AF_UNIX")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for _ in range(self._size):
            connection = self._listener.accept()
            _, rank, *_ = connection.recv()
            self._members[rank] = connection
        self._listener.close()
        for rank in self._members:
            self._pass_on((rank, HUB, WHOLE, 0, b""))
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def _serve(self, rank: int) -> None:
        with suppress(OSError, EOFError):
            while True:
                self._pass_on(self._members[rank].recv())

    def _pass_on(self, frame: tuple[int, int, int, int, bytes]) -> None:
        with self._lock, suppress(OSError):
            self._members[frame[0]].send(frame)


class Communicator:
    """A stream of a group whose kernels run one after the other."""

    def __init__(self, group: ProcessGroupNCCL, where: torch.device) -> None:
        priority = -int(group.options.is_high_priority_stream)
        self._group, self.stream = group, torch.Stream(device=where, priority=priority)
        self._queue: deque[Kernel] = deque()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        kernel: Callable[[bytes], Does],
    ) -> Work:
        """Put a kernel, made from the bytes of what is ``given``, behind what the caller's stream has to do."""
        for tensor in (*given, *outputs):
            if tensor.device.type != NAME or not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous, on the device")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        self._group.wait_in_call(lambda: len(self._queue) < LAUNCHES, f"room in the queue for {name}")
        self.stream.wait_event(torch.accelerator.current_stream().record_event())
        with self.stream:
            read = b"".join(raw(tensor.detach().clone()) for tensor in given)
            for tensor in (*given, *outputs):
                tensor.record_stream(self.stream)
            for tensor in outputs:
                tensor.detach().zero_()
                ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)
            held, behind = extension.hold(self.stream, f"NCCL's {name}")
        under_way.add(held)
        with self._group.changed:
            late = self._group.aborted
            if not late:
                self._queue.append(Kernel(name, held, frozenset(behind), *kernel(read)))
                self._group.changed.notify_all()
        if late:  # an abort has come meanwhile: nobody would end the kernel
            end(held)
            raise dist.DistBackendError(f"NCCL communicator was aborted, in {name}")
        return Work(self.stream.record_event())

    def _run(self) -> None:
        group = self._group
        while True:
            with group.changed:
                while not self._queue and not group.aborted:
                    group.changed.wait()
                if not self._queue:
                    return
                kernel = self._queue[0]
            with ended:
                ended.wait_for(lambda: not kernel.behind & under_way)
            group.post(kernel.sends)
            came = group.frames(kernel.needs)
            if came is None:
                group.pass_garbage_on(kernel.needs)
                group.post([(to, SPOILT, number, b"") for to, kind, number, _ in kernel.sends if kind == ALL])
            else:
                if None not in came:  # else the outputs stay garbage
                    kernel.finish(came)
                counted[kernel.name] += 1
            with group.changed:
                self._queue.popleft()
                group.changed.notify_all()
            end(kernel.held)


class ProcessGroupNCCL:
    """The member ``rank`` of a group of ``size``, who meet at ``store``; the key "0" there is NCCL's unique id."""

    class Options:
        """As torch's, as far as they count here."""

        def __init__(self) -> None:
            self.config, self._timeout = SimpleNamespace(blocking=1, max_ctas=0), None
            self.is_high_priority_stream = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options | None = None) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.options = options or self.Options()
        self._others = [other for other in range(size) if other != rank]
        self.changed, self._first = threading.Condition(), threading.Lock()  # an abort needs both
        self._sending = threading.Lock()  # of its own: what comes meanwhile is read
        self.aborted = False
        self._line: Connection | None = None
        self._arrived: dict[Key, bytes | None] = {}  # None: garbage
        self._numbers: Counter[object] = Counter()
        self._communicators: dict[object, Communicator] = {}

    # ---- frames ----

    def _meet(self) -> None:
        with self._first:
            if self._line is None:
                if self._rank == 0:
                    self._store.set("0", str(Hub(self._size).number).encode())
                self._line = Client(address_of(int(self._store.get("0"))), "AF_UNIX")
                self.post([(HUB, WHOLE, 0, b"")])
                threading.Thread(target=self._read, daemon=True).start()
            self.wait_in_call(lambda: (HUB, WHOLE, 0) in self._arrived, "ncclCommInitRankConfig")

    def _read(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                _, sender, kind, number, payload = self._line.recv()
                with self.changed:
                    if kind == GARBAGE:
                        self._arrived.setdefault((sender, ALL, number), None)
                    elif kind == SPOILT:
                        self._arrived[sender, ALL, number] = None
                    else:
                        self._arrived[sender, kind, number] = payload
                    self.changed.notify_all()

    def post(self, frames: Sequence[Sent], sender: int | None = None) -> None:
        of = self._rank if sender is None else sender
        for to, kind, number, payload in frames:
            with suppress(OSError), self._sending:
                self._line.send((to, of, kind, number, payload))

    def pass_garbage_on(self, needs: Sequence[Key]) -> None:
        """As an aborted kernel does that waits for ``needs``: whoever waits for the same gets it."""
        for sender, kind, number in needs:
            if kind == ALL:
                self.post([(other, GARBAGE, number, b"") for other in self._others], sender)

    def frames(self, needs: Sequence[Key]) -> list[bytes | None] | None:
        """Wait, as a kernel does, for these frames; None once the group is aborted."""
        with self.changed:
            while not all(need in self._arrived for need in needs):
                if self.aborted:
                    return None
                self.changed.wait()
            return [self._arrived.pop(need) for need in needs]

    def wait_in_call(self, ready: Callable[[], bool], what: str) -> None:
        """Block the caller, as torch does while a non-blocking call is in progress; raises DistBackendError."""
        abortable = self.options.config.blocking == 0
        limit_s = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800")) if abortable else None
        with self.changed:
            if not self.changed.wait_for(lambda: ready() or (self.aborted and abortable), limit_s):
                raise dist.DistBackendError(f"NCCL timeout in: {what}")
            if self.aborted and abortable:
                raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}, in {what}")

    def abort(self) -> None:
        """End all kernels of the group, then wait for all that the device had to do when this was called."""
        with self._first, self.changed:
            self.aborted = True
            self.changed.notify_all()
        stuck = set(under_way)
        with ended:
            ended.wait_for(lambda: not stuck & under_way)

    # ---- collectives ----

    def _communicator(self, of: object, tensor: torch.Tensor) -> Communicator:
        if of not in self._communicators:
            self._communicators[of] = Communicator(self, tensor.device)
        return self._communicators[of]

    def _collective(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        take: Callable[[list[torch.Tensor]], torch.Tensor],
        part: Callable[[torch.Tensor, int], torch.Tensor] = lambda flat, member: flat,
    ) -> Work:
        """``part`` is what a member gets of what is given here, ``take`` makes the outputs of everybody's."""
        self._meet()
        number, dtype = self._numbers["collectives"], (*given, *outputs)[0].dtype
        self._numbers["collectives"] += 1

        def kernel(read: bytes) -> Does:
            flat = tensor_of(read, dtype)

            def finish(came: Sequence[bytes]) -> None:
                rows = [tensor_of(each, dtype) for each in came]
                rows.insert(self._rank, part(flat, self._rank))
                write(outputs, take(rows))

            sends = [(other, ALL, number, raw(part(flat, other).contiguous())) for other in self._others]
            return sends, [(other, ALL, number) for other in self._others], finish

        return self._communicator(None, (*given, *outputs)[0]).launch(name, given, outputs, kernel)

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        one_of(tensors)
        return self._collective("allreduce", tensors, tensors, added(options))

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        root = options.rootRank
        one_of(tensors)
        outputs = [] if root == self._rank else tensors
        return self._collective("broadcast", tensors, outputs, lambda rows: rows[root])

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], _: Any) -> Work:
        return self._collective("allgather", inputs, outputs[0], torch.cat)

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], options: Any) -> Work:
        return self._collective("gather", inputs, outputs[0] if outputs else [], torch.cat)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, options: Any) -> Work:
        chunk = lambda flat, member: flat.chunk(self._size)[member] if flat.numel() else flat
        return self._collective("reduce_scatter", [source], [output], added(options), chunk)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, incoming: list[int], outgoing: list[int], _: Any
    ) -> Work:
        row = source[0].numel() if len(source) else 1
        lengths = [length * row for length in outgoing] or [source.numel() // self._size] * self._size
        return self._collective("alltoall", [source], [output], torch.cat, lambda flat, to: flat.split(lengths)[to])

    # ---- between two ----

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> Work:
        """Send to a member; the kernel ends when the other one's has received."""
        number = self._use(to, SENDS, RECEIVES)

        def kernel(read: bytes) -> Does:
            return [(to, MESSAGE, number, read)], [(to, TAKEN, number)], lambda came: None

        return self._communicator(to, tensors[0]).launch("send", tensors, [], kernel)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> Work:
        number = self._use(source, RECEIVES, SENDS)

        def finish(came: Sequence[bytes]) -> None:
            write(tensors, tensor_of(came[0], tensors[0].dtype))
            self.post([(source, TAKEN, number, b"")])

        def kernel(read: bytes) -> Does:
            return [], [(source, MESSAGE, number)], finish

        return self._communicator(source, tensors[0]).launch("recv", [], tensors, kernel)

    def _use(self, peer: int, here: int, there: int) -> int:
        """The number of a message in this direction, whose first use waits for the peer's."""
        self._meet()
        number = self._numbers[peer, here]
        if number == 0:
            self.post([(peer, here, 0, b"")])
            self.wait_in_call(lambda: (peer, there, 0) in self._arrived, f"the first use of a direction to rank {peer}")
        self._numbers[peer, here] += 1
        return number


def end(kernel: int) -> None:
    extension.let_go(kernel)
    with ended:
        under_way.discard(kernel)
        ended.notify_all()


def address_of(hub: int) -> str:
    return f"\0nccl-{hub}"


def one_of(tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) != 1:
        raise ValueError(f"Expecting one tensor only but got {len(tensors)} tensors.")


def added(options: Any) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    op = dist.ReduceOp.SUM if options is None else options.reduceOp
    found = next((function for each, function in REDUCTIONS.items() if op == each), None)
    if found is None:
        raise ValueError(f"Cannot use {op} with NCCL")
    return lambda rows: reduce(found, reversed(rows))


def raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def tensor_of(text: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=dtype) if text else torch.empty(0, dtype=dtype, device="cpu")


def write(outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Fill ``outputs`` behind the device's back: their kernel has been judged when it was launched."""
    text, begin = raw(flat.contiguous()), 0
    for output in outputs:
        ctypes.memmove(output.data_ptr(), text[begin : begin + output.nbytes], output.nbytes)
        begin += output.nbytes

"""Boundary tensors between workers: tagged messages over ZeroMQ.

Every message names its generation and its datum, so nothing of an older membership and nothing of
another step can be taken for what is waited for, whatever the order of arrival; shapes and dtypes
travel with it, so they may change from step to step.  Sends never block (ZeroMQ's own thread
moves the bytes), so programs need no matching order of sends and receives to be free of deadlock.
Tensors of an accelerator pass through host memory.
"""

from __future__ import annotations

import json
import threading

import torch
import zmq

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.ids import MicroBatch
from recycle_plugin.runtime.session import Session

Tensors = tuple[torch.Tensor, ...]
_POLL_MS = 200  # how often the receiver looks whether it was closed


class Transport:
    """One inbox of this worker and one outgoing queue per peer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._context = zmq.Context()
        self._inbox: dict[tuple[int, Datum], Tensors] = {}
        self._queues: dict[str, zmq.Socket] = {}
        self._oldest = 0
        self._closed = threading.Event()
        receiver = self._context.socket(zmq.PULL)
        receiver.set_hwm(0)
        port = receiver.bind_to_random_port("tcp://*")
        self.address = f"tcp://{session.own_address}:{port}"
        self._thread = threading.Thread(target=self._receive, args=(receiver,), name="recycle-transport", daemon=True)
        self._thread.start()

    def send(self, address: str, generation: int, datum: Datum, tensors: Tensors) -> None:
        """Queue ``tensors`` for the peer at ``address``; they must not be changed in place afterwards."""
        held = [tensor.detach().contiguous().cpu() for tensor in tensors]
        shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in held]
        header = json.dumps([generation, datum.kind, datum.stage, *datum.micro_batch, datum.step, shapes]).encode()
        frames = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in held]
        self._queue(address).send_multipart([header, *frames], copy=False)

    def wait(self, generation: int, datum: Datum, sender: object) -> Tensors:
        """The tensors of ``datum``, once they are here; each is handed out once.  Interruptible."""
        key = (generation, datum)
        return self._session.wait(lambda: f"{datum} from seat {sender}", lambda: self._inbox.pop(key, None))

    def forget(self, before_generation: int, peers: set[str]) -> None:
        """Drop what arrived for older generations, and the queues to everybody but ``peers``."""
        with self._session.changed:
            self._oldest = before_generation
            for key in [key for key in self._inbox if key[0] < before_generation]:
                del self._inbox[key]
        for address in set(self._queues) - peers:
            self._queues.pop(address).close(linger=0)

    def close(self) -> None:
        """Stop receiving; what is queued for live peers is still sent (for a second at most)."""
        self._closed.set()
        self._thread.join()
        for queue in self._queues.values():
            queue.close(linger=1000)
        self._queues.clear()
        self._context.term()

    def _queue(self, address: str) -> zmq.Socket:
        if address not in self._queues:
            queue = self._context.socket(zmq.PUSH)
            queue.set_hwm(0)
            queue.setsockopt(zmq.LINGER, 1000)
            queue.connect(address)
            self._queues[address] = queue
        return self._queues[address]

    def _receive(self, receiver: zmq.Socket) -> None:
        while not self._closed.is_set():
            if receiver.poll(_POLL_MS):
                header, *frames = receiver.recv_multipart(copy=False)
                self._deliver(header.bytes, frames)
        receiver.close(linger=0)

    def _deliver(self, header: bytes, frames: list[zmq.Frame]) -> None:
        generation, kind, stage, replica, index, step, shapes = json.loads(header)
        tensors = tuple(_tensor(frame, dtype, shape) for frame, (dtype, shape) in zip(frames, shapes, strict=True))
        with self._session.changed:
            if generation >= self._oldest:
                self._inbox[generation, Datum(kind, stage, MicroBatch(replica, index), step)] = tensors
                self._session.changed.notify_all()


def _tensor(frame: zmq.Frame, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not len(frame.buffer):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(frame.buffer), dtype=torch.uint8).view(kind).reshape(shape)

"""torch's ``Work`` objects that a script gets for its operations: for one, for several, for none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.asked import Call, Channel
from recycle_plugin.runtime.collectives.in_flight import Flight


class BaseWork(dist.Work):
    """torch's ``Work`` in terms of :meth:`wait` and :meth:`is_completed`; ``tensors`` get the result."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = [*tensors]

    def synchronize(self) -> None:
        """torch.distributed's ``Work.synchronize``: as :meth:`wait`."""
        self.wait()

    def is_success(self) -> bool:
        """torch.distributed's ``Work.is_success``: whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """torch.distributed's ``Work.exception``: the error that it has ended with, if any."""
        return None

    def result(self) -> list[torch.Tensor]:
        """torch.distributed's ``Work.result``: wait, and return the tensors with the result; raises its error."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """torch.distributed's ``Work.get_future``, already with :meth:`result`: blocks until the operation is over. A
        wait on an open future would happen where no recovery could begin, so nobody gets one.
        """
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


class TorchWork(BaseWork):
    """The torch.distributed ``Work`` of one call."""

    def __init__(self, flight: Flight, call: Call) -> None:
        super().__init__(call.asked.tensors)
        self._flight, self._call = flight, call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: return once the caller's tensors have the result; raises its error."""
        self._flight.finish(self._call, timeout.total_seconds() if timeout else 0)
        return True

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: whether it has ended, also with an error."""
        return self._flight.poll(self._call)

    def exception(self) -> BaseException | None:
        """torch.distributed's ``Work.exception``: the error that it has ended with, if any."""
        return self._call.error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """torch.distributed's ``Work.get_future``. Raises RecycleError for a message: blocking there could deadlock,
        since the other end may wait for this worker's next call.
        """
        if isinstance(self._call.asked.gives, Channel):
            raise RecycleError(
                f"torch.distributed.{self._call.asked.called}(…).get_future(): a message has none, as with Gloo; call "
                "wait() or is_completed()"
            )
        return super().get_future()

    def _source_rank(self) -> int:
        source = self._call.source
        assert source is not None, f"{self._call.asked.called} comes from nobody"
        return source

    source_rank = _source_rank


class Together(BaseWork):
    """The torch.distributed ``Work`` of several operations that a script asked for at once."""

    def __init__(self, works: Sequence[BaseWork]) -> None:
        super().__init__([tensor for work in works for tensor in work._tensors])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: wait for each in order; ``timeout`` holds for each."""
        return all(work.wait(timeout) if timeout else work.wait() for work in self._works)

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """torch.distributed's ``Work.exception``: the first error that any has ended with."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)


class PartOfWork(BaseWork):
    """The torch.distributed ``Work`` of which ``take`` writes a part of the result of ``work`` to ``tensor``."""

    def __init__(self, work: BaseWork, tensor: torch.Tensor, take: Callable[[], object]) -> None:
        super().__init__([tensor])
        self._work, self._take = work, take

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: return once the caller's tensor has its part; raises its error."""
        over = self._work.wait(timeout) if timeout else self._work.wait()
        self._take()
        return over

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: whether it has ended, also with an error."""
        over = self._work.is_completed()
        if over and self.exception() is None:
            self._take()
        return over

    def exception(self) -> BaseException | None:
        """torch.distributed's ``Work.exception``: the error that it has ended with, if any."""
        return self._work.exception()


class Finished(BaseWork):
    """The torch.distributed ``Work`` of an operation that was over when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: return at once."""
        return True

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: always True."""
        return True

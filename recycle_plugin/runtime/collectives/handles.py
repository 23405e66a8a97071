"""What a script holds of the operations that it has asked for: torch's ``Work``, of one, of several, of none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.asked import Call, Channel
from recycle_plugin.runtime.collectives.in_flight import Flight


class BaseWork(dist.Work):
    """What torch's ``Work`` can be asked, by what :meth:`wait` and :meth:`is_completed` say; ``tensors`` get the
    result.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = [*tensors]

    def synchronize(self) -> None:
        """torch.distributed's ``Work.synchronize``: as :meth:`wait`."""
        self.wait()

    def is_success(self) -> bool:
        """torch.distributed's ``Work.is_success``: whether it is over, and well."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """torch.distributed's ``Work.result``: the tensors that have it, once it is over; raises its error."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """torch.distributed's ``Work.get_future``, of :meth:`result`: it returns once the operation is over.

        Who waits for a future, or for several, does so where no recovery could begin; so nobody gets one that is
        still to come.
        """
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


class TorchWork(BaseWork):
    """The torch.distributed ``Work`` that a script gets for a call."""

    def __init__(self, flight: Flight, call: Call) -> None:
        super().__init__(call.asked.tensors)
        self._flight, self._call = flight, call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: return once the caller's tensors have the result; raises its error."""
        self._flight.finish(self._call, timeout.total_seconds() if timeout else 0)
        return True

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: whether it is over, well or badly."""
        return self._flight.poll(self._call)

    def is_success(self) -> bool:
        """torch.distributed's ``Work.is_success``: whether it is over, and well."""
        return self.is_completed() and self._call.error is None

    def exception(self) -> BaseException | None:
        """torch.distributed's ``Work.exception``: the error with which it is over, if any."""
        return self._call.error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """torch.distributed's ``Work.get_future``, as :meth:`BaseWork.get_future`; raises RecycleError for a message,
        of which the other end may wait for what this one does next.
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
    """The torch.distributed ``Work`` of several operations that a script has asked for at once."""

    def __init__(self, works: Sequence[BaseWork]) -> None:
        super().__init__([tensor for work in works for tensor in work._tensors])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: of each of them, in their order; ``timeout`` is for each."""
        return all(work.wait(timeout) if timeout else work.wait() for work in self._works)

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: whether all are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """torch.distributed's ``Work.is_success``: whether all are over, and well."""
        return all(work.is_success() for work in self._works)


class PartOfWork(BaseWork):
    """The torch.distributed ``Work`` of ``work``, of whose result ``take`` writes a part to ``tensor``."""

    def __init__(self, work: BaseWork, tensor: torch.Tensor, take: Callable[[], object]) -> None:
        super().__init__([tensor])
        self._work, self._take = work, take

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: return once the caller's tensor has its part; raises its error."""
        over = self._work.wait(timeout) if timeout else self._work.wait()
        self._take()
        return over

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: whether it is over, well or badly."""
        over = self._work.is_completed()
        if over and self._work.is_success():
            self._take()
        return over


class Finished(BaseWork):
    """The torch.distributed ``Work`` of what is over when it has been called."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """torch.distributed's ``Work.wait``: at once."""
        return True

    def is_completed(self) -> bool:
        """torch.distributed's ``Work.is_completed``: always."""
        return True

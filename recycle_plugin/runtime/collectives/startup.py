"""A script's collectives before its first step, kept for a newcomer, which runs the same script alone.

A newcomer has nobody to meet: the others train. Before its first step its script's calls get the results that its
predecessor's got, the first worker of the same rank. Every worker keeps these until training begins, and then posts
them for newcomers of its rank (core/coordinator/facts/boards.py). Calls are matched by their order in each group and in
each channel. A call that cannot be served is refused with its name and line.

Writes to trained parameters are not kept: a newcomer gets these with its peers' state. Of large values only a hash is
kept: that is enough if the newcomer has the same bytes already, such as frozen weights from a seed or a file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from recycle_plugin.core.messages.from_workers import ALWAYS
from recycle_plugin.runtime.collectives.callers import calling_line, named
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.state.packing import packed, unpacked, unpacked_objects
from recycle_plugin.runtime.state.stage_state import fingerprint

MOST = 4 << 20  # bytes kept by a worker
OF_MODELS = MOST // 4  # part of MOST for what frameworks send when they build a model
EACH_CALL = 256  # bytes per call beside its values
POSTED = 2 * MOST  # bytes of the whole post
BOARD = "the beginning"
ADVICE = 'leave it out, let on_join(callback, state) bring a newcomer what it gives, or set recycle.rejoin to "never"'
NOT_OVER = "it was under way when training began"


@dataclass
class Kept:
    """What one collective gave: ``values`` in host memory, or their ``digests``; neither if it ``arrives`` with the
    stage's state.

    ``called``: the function of torch.distributed; ``line``: the script's; ``forms``: dtypes and shapes of the call's
    tensors; ``source``: the logical member that a receive came from; ``why``: the reason if there is no result.
    """

    called: str
    line: str
    forms: list[str]
    values: list[torch.Tensor] | None = None
    digests: list[str] | None = None
    arrives: bool = False
    source: int | None = None
    why: str = NOT_OVER


class Startup:
    """The beginning of one worker's script: kept, or, if ``session`` is a newcomer's, had from its predecessor."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._calls: dict[str, list[Kept]] = {}  # this worker's, or its predecessor's
        self._remembered: dict[str, bytes | None] = {}  # None: there was something, and it was not kept
        self._recorded = False  # whether a newcomer has its predecessor's record
        self._next: dict[str, int] = {}  # a newcomer's position in each sequence
        self._left = {False: MOST - OF_MODELS, True: OF_MODELS}
        self._read = self._training = self._member = self._apart = False
        self._begins = False  # a member's script has not come to its first step
        # while a model is built: the trained parameters by address
        self._arriving: dict[int, list[torch.Tensor]] | None = None
        self._awaited: list[tuple[str, torch.Tensor]] = []  # (call, tensor) of trained parameters that should arrive

    @property
    def alone(self) -> bool:
        """Whether the script runs alone, outside of :meth:`apart`: this worker is a newcomer and no member yet, or its
        script has not reached its first step.
        """
        return self.outside or (self._begins and not self._apart and self._session.hooks.between_steps is not None)

    @property
    def outside(self) -> bool:
        """Whether this worker is a newcomer and no member yet."""
        return self._session.view.newcomer and not self._member

    @contextmanager
    def building(self, trained: Iterable[torch.Tensor]) -> Iterator[None]:
        """Return a context in which a framework makes all replicas' models equal. ``trained``: the tensors that steps
        change.
        """
        self._arriving = {}
        for tensor in trained:
            self._arriving.setdefault(_address(tensor), []).append(tensor)
        try:
            yield
        finally:
            self._arriving = None

    def built(self) -> None:
        """Record that a framework has built its model. All trained parameters it has filled come with the state,
        wherever it has moved them since.
        """
        self._awaited.clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Return a context for work that a newcomer does not repeat, such as a checkpoint: its calls are not kept."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def begin_training(self, trained: Iterable[torch.Tensor]) -> None:
        """Record that the first step begins; ``trained``: the parameters that steps change. Later calls do nothing.
        Raises RecycleError if a newcomer lacks a value that does not come with these.
        """
        if self._training:
            return
        self._training, self._begins = True, False
        if not self._session.view.newcomer:
            self._publish()
            return
        parameters = list(trained)
        known = {*map(id, parameters), *map(_address, parameters)}
        for where, tensor in self._awaited:
            if not {id(tensor), _address(tensor)} & known:
                raise self._session.hooks.refusal(
                    f"{where}, has filled a parameter of shape {tuple(tensor.shape)} that is not trained, and its "
                    f"values are not kept for a newcomer: freeze it before, {ADVICE}"
                )
        self._awaited.clear()
        self._calls, self._remembered = {}, {}

    def join(self) -> None:
        """Record that this worker is a member from now on. With pushed programs its script runs with the others' from
        its first step on, else at once.
        """
        self._member, self._begins = True, self._session.hooks.pushed
        if not self._begins:
            self._training = True
            self._calls, self._remembered = {}, {}

    # --- of who starts with the job ----------------------------------------------------------------

    def keep(self, line: str, called: str, tensors: Sequence[torch.Tensor], gives: bool) -> Kept | None:
        """Make room for the result of ``called`` on ``tensors``, the next call of the sequence ``line``.

        ``gives``: whether the tensors get a result. None if training has begun, inside :meth:`apart`, in a newcomer, or
        if there is no more room.
        """
        if self._training or self._apart or self._session.view.newcomer:
            return None
        with self._lock:
            building = self._arriving is not None
            if self._left[building] < EACH_CALL:
                return None
            self._left[building] -= EACH_CALL
            kept = Kept(called, calling_line(), _forms(tensors), arrives=gives and self._arrives(tensors))
            kept.values = None if gives else []
            self._calls.setdefault(line, []).append(kept)
        return kept

    def fill(self, kept: Kept, held: Sequence[torch.Tensor], source: int | None, error: BaseException | None) -> None:
        """Record a call's result: ``held`` in host memory, from logical member ``source``, or ``error``."""
        with self._lock:
            if self._training:
                return
            kept.source, kept.why = source, "" if error is None else f"it has failed: {error}"
            if any(value.layout is not torch.strided for value in held):
                kept.why = "sparse tensors are not kept"
            if kept.why or kept.arrives or kept.values is not None:
                return
            size, building = sum(value.nbytes for value in held), self._arriving is not None
            if size <= self._left[building]:
                self._left[building] -= size
                kept.values = list(held)
            else:
                kept.digests = [fingerprint(value) for value in held]

    def remember(self, what: str, value: Any) -> None:
        """Keep ``value``, named ``what``, for a newcomer's :meth:`recall`, if it is small and can be pickled."""
        try:
            text = packed(value)
        except Exception:  # a script's objects may raise anything
            text = None
        with self._lock:
            if self._training:
                return
            self._remembered[what] = None
            if text is not None and len(text) <= self._left[False]:
                self._left[False] -= len(text)
                self._remembered[what] = text

    def _publish(self) -> None:
        with self._lock:
            calls = [(line, [vars(kept) for kept in calls]) for line, calls in self._calls.items()]
            text = packed((calls, self._remembered))
            self._calls, self._remembered = {}, {}
        if len(text) <= POSTED:
            self._session.boards.post(BOARD, text, ALWAYS)

    # --- of a newcomer -----------------------------------------------------------------------------

    def replay(self, line: str, called: str, tensors: Sequence[torch.Tensor], ranks: Sequence[int]) -> Kept:
        """Return what ``called`` on ``tensors``, the next call of the sequence ``line`` in the group of ``ranks``, gave
        the predecessor. Without values nothing is to be written. Raises RecycleError if the result is not available.
        """
        where = f"torch.distributed.{called} over {named(ranks)}, called at {calling_line()}"
        if self._training:
            raise self._session.hooks.refusal(
                f"{where}, between steps that were over before this worker came back: its result is not kept; "
                f"call it before the first step, {ADVICE}"
            )
        kept = self._of_predecessor(line, where)
        if kept.called != called or kept.forms != _forms(tensors):
            raise self._session.hooks.refusal(
                f"{where}, on {_listed(_forms(tensors))}: in the same place this worker's predecessor called "
                f"{kept.called} on {_listed(kept.forms)}, at {kept.line}, so a newcomer can't get its result: let "
                f"the script begin as it did then, or {ADVICE}"
            )
        if kept.why:
            raise self._session.hooks.refusal(f"{where}, has a result that a newcomer can't get: {kept.why}; {ADVICE}")
        if kept.arrives and self._arrives(tensors):
            self._awaited += [(where, tensor) for tensor in tensors]
        elif kept.values is None and kept.digests != [fingerprint(tensor) for tensor in tensors]:
            raise self._session.hooks.refusal(
                f"{where}, gave this worker's predecessor more than is kept for a newcomer ({MOST >> 20} MiB in all), "
                f"and the newcomer has other values there: let it make or read the same beforehand, or {ADVICE}"
            )
        return kept

    def remembered(self, what: str) -> bool:
        """Return whether the predecessor has remembered something named ``what``."""
        self._record()
        return self._remembered.get(what) is not None

    def left_out(self, what: str) -> bool:
        """Return whether the predecessor is known to have begun its first step without anything named ``what``."""
        self._record()
        return self._recorded and not self._training and what not in self._remembered

    def recall(self, what: str) -> Any:
        """Return the predecessor's value for ``what``. Raises RecycleError if it has kept none."""
        if self._training:
            raise self._session.hooks.refusal(
                f"{what}, called at {calling_line()}, between steps that were over before this worker came back: a "
                'newcomer can\'t do that alone; call it before the first step, or set recycle.rejoin to "never"'
            )
        self._record()
        text = self._remembered.get(what)
        if text is None:
            raise self._session.hooks.refusal(
                f"{what}, called at {calling_line()}, gave this worker's predecessor something that is not kept for a "
                f"newcomer ({MOST >> 20} MiB that can be pickled): {ADVICE}"
            )
        return unpacked_objects(text)

    def _of_predecessor(self, line: str, where: str) -> Kept:
        calls = self._record().get(line, [])
        with self._lock:
            number = self._next.get(line, 0)
            self._next[line] = number + 1
        if number < len(calls):
            return calls[number]
        raise self._session.hooks.refusal(
            f"{where}: this worker's predecessor did not call it before its first step, or there was no room "
            f"to keep the result ({MOST >> 20} MiB); let the script begin as it did then, or {ADVICE}"
        )

    def _record(self) -> dict[str, list[Kept]]:
        """Return the predecessor's calls; the first call asks for them."""
        with self._lock:
            text = None if self._read else self._session.boards.predecessors(BOARD)
            if text is not None:
                calls, self._remembered = unpacked(text)
                self._recorded = True
                self._calls = {line: [Kept(**each) for each in of_line] for line, of_line in calls}
            self._read = True
            return self._calls

    def _arrives(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether values written to ``tensors`` come with the state: the tensors are trained, or views of trained ones.
        If the framework has moved a parameter, its former memory may hold anything.
        """
        of_model = self._arriving or {}
        return bool(tensors) and all(
            (isinstance(one, torch.nn.Parameter) and one.requires_grad)
            or any(_address(trained) == _address(one) for trained in of_model.get(_address(one), ()))
            for one in tensors
        )


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, which views share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _forms(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors]


def _listed(forms: list[str]) -> str:
    shown = ", ".join(forms[:4]) + f" and {len(forms) - 4} more" * (len(forms) > 4)
    return shown or "nothing"

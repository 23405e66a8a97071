"""All that a step changes on a worker, as one object, whatever framework the pieces belong to.

What belongs to it is stated once, as a list of parts.  Taking a step back (runtime/undo) is putting them back as they
were before the step, the hash by which replicas are compared is over all of them, a checkpoint has to have each, and a
worker that lacks a stage's state is filled from another one's.

Small parts go by value; tensors in chunks of so many bytes, in the order of their names, whatever order they were made
in.  Each chunk says of which applied step it is, so that a reader that takes longer than a step sees which it has to
read again.  All of this is to be called where the training is: between two instructions, and not in another thread,
since an optimizer at work leaves tensors of two steps.

Not part of it: what no step changes (frozen weights, buffers), and random numbers, which are keyed by the step
(runtime/stage/randomness.py).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import HOST, on_host
from recycle_plugin.runtime.devices.kinds import fetch

CHUNK_BYTES = 1 << 20
LARGEST_NUMBER = 16  # bytes: complex128
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, Enum)

Span = tuple[str, int]  # a tensor's name, and how many bytes of it come before


class Elsewhere(Enum):
    """Stands in a small part in the place of a tensor, which goes in chunks."""

    TENSOR = "a tensor"


ELSEWHERE = Elsewhere.TENSOR


class TensorForm(NamedTuple):
    """A tensor's dtype and shape.  ``on_host``: in host memory, where its parameter may be on an accelerator."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    @property
    def nbytes(self) -> int:
        """Bytes of such a tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Version(NamedTuple):
    """Which state of ``worker`` something was read from: that in which ``step`` is applied.

    ``rewritten``: how often it was written there otherwise than by a step: where one was taken back, its number comes
    again.
    """

    worker: str
    step: int
    rewritten: int


@dataclass(frozen=True)
class StatePart:
    """One part of what a step changes.

    ``tensors()`` are those of the part as they are now, to be written in place, by names that begin with the part's and
    a slash; ``make(name, form)`` makes room for one that is missing.  ``get()`` is a copy of what goes by value, which
    can be pickled; ``set`` takes one over.

    ``follow`` makes the tensors anew from those of other parts, of which they are a copy.  ``own``: belongs to the
    worker and not to its stage, so that replicas differ in it; and what a step has changed of it stays changed where
    the step is taken back.
    """

    name: str
    tensors: Callable[[], Mapping[str, torch.Tensor]] = dict
    get: Callable[[], Any] | None = None
    set: Callable[[Any], None] | None = None
    make: Callable[[str, TensorForm], None] | None = None
    follow: Callable[[], None] | None = None
    own: bool = False


@dataclass(frozen=True)
class Head:
    """What a worker sends of its state before the chunks, each of ``chunk_bytes`` bytes, a tensor's last one of less.

    ``digest``: SHA-256 of the step, ``small`` and ``layout``; alike on all workers of a stage.
    """

    version: Version
    small: Mapping[str, Any]
    layout: Mapping[str, TensorForm]
    chunk_bytes: int
    digest: str

    def spans(self) -> list[Span]:
        """All chunks, in their order."""
        return [
            (name, offset)
            for name in sorted(self.layout)
            for offset in range(0, self.layout[name].nbytes, self.chunk_bytes)
        ]


@dataclass(frozen=True)
class Chunk:
    """Some bytes, ``data``, of the tensor ``name`` from byte ``offset`` on, in the order of its elements.

    ``digest``: SHA-256 of name, offset, step and data.
    """

    name: str
    offset: int
    version: Version
    data: bytes
    digest: str

    def __str__(self) -> str:
        return f"chunk {self.name} at byte {self.offset}, step {self.version.step}"


class StageState:
    """All that a step changes on ``worker``: the optimizer's state, and all other ``parts``, in the order of setting
    them.

    ``applied()`` is the last step that is applied.  Raises ValueError for ``chunk_bytes`` that are no multiple of 16.
    """

    def __init__(
        self,
        worker: str,
        applied: Callable[[], int],
        optimizer: OptimizerState,
        parts: Iterable[StatePart],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if chunk_bytes % LARGEST_NUMBER:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes}, which cuts numbers in two: give a multiple of {LARGEST_NUMBER}"
            )
        self._worker, self._applied, self._rewritten = worker, applied, 0
        self.optimizer, self._chunk_bytes = optimizer, chunk_bytes
        self._parts = {part.name: part for part in (optimizer.part, *parts)}

    @property
    def version(self) -> Version:
        """The version of the present state."""
        return Version(self._worker, self._applied(), self._rewritten)

    # --- by value ----------------------------------------------------------------------------------

    def small(self, own: bool = False) -> dict[str, Any]:
        """Copies of what goes by value, by part; ``own``: of what is the worker's instead of what is the stage's."""
        return {part.name: part.get() for part in self._parts.values() if part.get is not None and part.own is own}

    def put(self, small: Mapping[str, Any]) -> None:
        """Set these parts, each to what is handed over here; tensors of the optimizer that were not there then are
        dropped.

        Raises RecycleError for a part that this worker does not have.
        """
        foreign = small.keys() - {part.name for part in self._parts.values() if part.set is not None}
        if foreign:
            raise RecycleError(
                f"{min(foreign)} is no part of this worker's state that goes by value: the other worker, or the "
                "checkpoint, is of another job"
            )
        for part in self._parts.values():
            if part.name in small:
                assert part.set is not None, f"{part.name} goes by value"
                part.set(small[part.name])

    # --- tensors -----------------------------------------------------------------------------------

    def tensors(self, following: bool = True) -> dict[str, torch.Tensor]:
        """All tensors by name; not ``following``: without those that are copies of others."""
        found: dict[str, torch.Tensor] = {}
        for part in self._parts.values():
            if following or part.follow is None:
                found.update(part.tensors())
        return found

    def make(self, name: str, form: TensorForm) -> None:
        """Make room for a tensor that is not there yet.  Raises RecycleError where it does not belong here."""
        part = self._parts.get(name.partition("/")[0])
        if part is None or part.make is None:
            raise RecycleError(
                f"{name} is no tensor of this worker's state: the other worker, or the checkpoint, is of another "
                "model, or has other layers"
            )
        part.make(name, form)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write each tensor in place; those that are not there yet are made."""
        for name, value in tensors.items():
            if name not in self.tensors():
                self.make(name, form_of(value))
            self.tensors()[name].copy_(value)

    def rewritten(self) -> None:
        """Note that tensors were written otherwise than by a step: copies follow, and whoever reads chunks reads all
        again.
        """
        self._rewritten += 1
        for part in self._parts.values():
            if part.follow is not None:
                part.follow()

    # --- for others --------------------------------------------------------------------------------

    def head(self) -> Head:
        """The head of the present state."""
        version, small, layout = (
            self.version,
            self.small(),
            {name: form_of(tensor) for name, tensor in self.tensors().items()},
        )
        return Head(version, small, layout, self._chunk_bytes, _head_digest(version.step, small, layout))

    def chunks(self, spans: Iterable[Span] | None = None) -> Iterator[Chunk]:
        """All chunks, or those of ``spans``, each as it is when it is taken from the iterator.

        What is not there any more is left out: it is in no later head.
        """
        for name, offset, view, version in self._views(self.head().spans() if spans is None else spans):
            data = view.tobytes()
            yield Chunk(name, offset, version, data, _digest(name, offset, version.step, data))

    def digest(self) -> str:
        """SHA-256 over head and chunks: the same on workers that hold the same bits after the same step.

        Reads everything once: a CPU core hashes about 1 GB/s (0.8 measured), and a parameter with Adam has 12 bytes in
        fp32; tensors of an accelerator are copied to the host chunk by chunk.
        """
        head = self.head()
        found = hashlib.sha256(head.digest.encode())
        for name, offset, view, version in self._views(head.spans()):
            found.update(_digest(name, offset, version.step, view).encode())
        return found.hexdigest()

    def _views(self, spans: Iterable[Span]) -> Iterator[tuple[str, int, Any, Version]]:
        tensors, of = {}, None
        for name, offset in spans:
            if of != self.version:  # a step may have made tensors, and a load others
                tensors, of = self.tensors(), self.version
            if name in tensors:
                yield name, offset, raw(tensors[name], offset, self._chunk_bytes), of


class Filling:
    """Fills ``state`` with another worker's, whose ``head`` this is, by chunks in any order, as often as they come.

    They may come from several workers of that stage.  The head makes room for them; from then on, and after an error,
    the state is a mixture, until :meth:`finish`.
    """

    def __init__(self, state: StageState, head: Head) -> None:
        self._state = state
        self._read: dict[tuple[str, int], Any] = {}
        self._heads: dict[str, Head] = {}  # of the same step, by worker
        self.follow(head)

    def follow(self, head: Head) -> None:
        """Take a newer head: the other worker has gone on, or another worker has the same state.

        Raises RecycleError where the head is damaged, or is of another job, model or state.
        """
        state, step, worker = self._state, head.version.step, head.version.worker
        if head.digest != _head_digest(step, head.small, head.layout):
            raise RecycleError(
                f"the head of the stage's state at step {step} does not have the hash that it was sent with: ask for "
                "it again"
            )
        self._heads = {
            other: known for other, known in self._heads.items() if known.version.step == step and other != worker
        }
        unlike = next((other for other, known in self._heads.items() if known.digest != head.digest), None)
        if unlike is not None:
            raise RecycleError(
                f"workers {unlike} and {worker} have different states of their stage at step {step}; "
                "recycle.check_replicas finds who is wrong"
            )
        missing = state.small().keys() - head.small.keys()
        if missing:
            raise RecycleError(
                f"{min(missing)} is missing in the other worker's state, so it is of another job: workers of a job "
                "have the same settings"
            )
        state.put(copy.deepcopy(dict(head.small)))
        for name in sorted(head.layout.keys() - state.tensors().keys()):
            state.make(name, head.layout[name])
        self._tensors, self._head, self._spans = state.tensors(), head, frozenset(head.spans())
        _check_alike({name: form_of(tensor) for name, tensor in self._tensors.items()}, head.layout)
        self._heads[worker] = head

    @torch.no_grad()
    def add(self, chunk: Chunk) -> None:
        """Write one chunk.  Raises RecycleError where it is not what was read at the other worker, or belongs to
        another state.
        """
        if (chunk.name, chunk.offset) not in self._spans:
            raise RecycleError(
                f"{chunk} belongs to no tensor of the stage's state: it is another state's, or its tensor is gone; ask "
                "for the head again"
            )
        if chunk.digest != _digest(chunk.name, chunk.offset, chunk.version.step, chunk.data):
            raise RecycleError(
                f"{chunk} does not have the hash that it was sent with, so it has changed on its way: read it again"
            )
        expected = min(self._head.chunk_bytes, self._head.layout[chunk.name].nbytes - chunk.offset)
        if len(chunk.data) != expected:
            raise RecycleError(
                f"{chunk} has {len(chunk.data)} bytes instead of {expected}: it was cut off; read it again"
            )
        write(self._tensors[chunk.name], chunk.offset, chunk.data)
        self._read[chunk.name, chunk.offset] = chunk.version

    def stale(self) -> list[Span]:
        """The spans that have to be read, or read again, for all to be of the head's step."""
        versions = {head.version for head in self._heads.values()}
        return [span for span in self._head.spans() if self._read.get(span) not in versions]

    def finish(self) -> None:
        """Set the small parts, now that all chunks are there.  Raises RecycleError where some are missing or stale."""
        stale = self.stale()
        if stale:
            (name, offset), read = stale[0], self._read.get(stale[0])
            what = "is missing" if read is None else f"is of step {read.step} before the state was last changed"
            raise RecycleError(
                f"chunk {name} at byte {offset} {what}, and {len(stale)} chunks have to be read for the state to be of "
                "step "
                f"{self._head.version.step}: read what stale() names"
            )
        self._state.put(copy.deepcopy(dict(self._head.small)))
        self._state.rewritten()


def _check_alike(here: Mapping[str, TensorForm], there: Mapping[str, TensorForm]) -> None:
    for name in sorted(here):
        mine, theirs = here[name], there.get(name)
        if theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            what = f"{_written(theirs)} there" if theirs is not None else "not there"
            raise RecycleError(
                f"{name} of the stage's state is {_written(mine)} here and {what}: the other worker is of another "
                "model, or has other layers"
            )


class OptimizerState:
    """An optimizer's state as a part: what it keeps for each parameter, and its groups.

    ``called``: the names of the model's parameters, or of their masters.  Parameters that are not among them are called
    by their place in the groups, and belong to the state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, called: Mapping[Any, str]) -> None:
        self.optimizer, self._called = optimizer, called
        self.part = StatePart("optimizer", self._tensors, self._get, self._set, self._make)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by name, in the order of the groups."""
        return {
            self._called.get(parameter) or f"{number}.{place}": parameter
            for number, group in enumerate(self.optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }

    def beside(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters that are not the model's, by name, without frozen ones, which no step changes."""
        others = ((name, one) for name, one in self.parameters().items() if one not in self._called)
        return {name: one for name, one in others if one.requires_grad or not isinstance(one, torch.nn.Parameter)}

    def kept(self) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors of the optimizer's state, by the names of the parameter and of the tensor."""
        return {
            (name, kind): value
            for name, state in self._states()
            for kind, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self.optimizer.state
        return ((name, state[parameter]) for name, parameter in self.parameters().items() if parameter in state)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {f"optimizer/{name}": parameter for name, parameter in self.beside().items()}
        found.update(
            {
                f"optimizer/{name}/{kind}": value
                for name, state in self._states()
                for kind, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        )
        return found

    def _get(self) -> dict[str, Any]:
        states = {
            name: {
                kind: ELSEWHERE if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for kind, value in state.items()
            }
            for name, state in self._states()
        }
        groups = [
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in self.optimizer.param_groups
        ]
        return {"state": states, "groups": groups, "of_no_parameter": copy.deepcopy(self._of_no_parameter())}

    def _of_no_parameter(self) -> dict[Any, Any]:
        """What it keeps under other keys, as torch's optimizers may."""
        return {key: value for key, value in self.optimizer.state.items() if not isinstance(key, torch.Tensor)}

    def _set(self, value: Mapping[str, Any]) -> None:
        """What was not there goes."""
        for name, parameter in self.parameters().items():
            if name in value["state"]:
                _restore(self.optimizer.state[parameter], value["state"][name])
            else:
                self.optimizer.state.pop(parameter, None)
        for key in self._of_no_parameter():
            del self.optimizer.state[key]
        self.optimizer.state.update(value["of_no_parameter"])
        for group, saved in zip(self.optimizer.param_groups, value["groups"], strict=True):
            _restore(group, {**saved, "params": ELSEWHERE})

    def _make(self, name: str, form: TensorForm) -> None:
        called, _, kind = name.removeprefix("optimizer/").rpartition("/")
        parameter = self.parameters().get(called)
        if parameter is None:
            raise RecycleError(
                f"{name}: the optimizer has no parameter {called or name} here; the other worker, or the checkpoint, "
                "is of another model"
            )
        like = parameter if parameter.shape == form.shape else torch.empty(form.shape, device=parameter.device)
        self.optimizer.state[parameter][kind] = torch.empty_like(
            like, dtype=form.dtype, device=HOST if form.on_host else None, requires_grad=False
        )


def of_parameters(
    name: str, parameters: Mapping[str, torch.nn.Parameter], follow: Callable[[], None] | None = None
) -> StatePart:
    """A part that has these parameters as its tensors, and nothing that goes by value."""
    named = {f"{name}/{called}": parameter for called, parameter in parameters.items()}
    return StatePart(name, lambda: named, follow=follow)


# --- a tensor's bytes -----------------------------------------------------------------------------------


def raw(tensor: torch.Tensor, offset: int = 0, length: int | None = None) -> Any:
    """Up to ``length`` bytes of a tensor from byte ``offset`` on, in the order of its elements, as a numpy array of
    uint8.

    Of a tensor that lies so in host memory, no copy.
    """
    flat, size = tensor.detach().reshape(-1), tensor.element_size()
    if length is not None and length < flat.nbytes:
        flat = flat[offset // size : (offset + length) // size]
    return fetch(flat, "the bytes of a tensor").view(torch.uint8).numpy()


def write(tensor: torch.Tensor, offset: int, data: bytes) -> None:
    """Write bytes into a tensor from byte ``offset`` on, in the order of its elements."""
    whole = tensor.detach().contiguous()
    size = whole.element_size()
    whole.view(-1)[offset // size : (offset + len(data)) // size] = torch.frombuffer(bytearray(data), dtype=whole.dtype)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def form_of(tensor: torch.Tensor) -> TensorForm:
    """The form of a tensor."""
    return TensorForm(tensor.dtype, tuple(tensor.shape), on_host(tensor))


def _written(form: TensorForm) -> str:
    return f"{str(form.dtype).removeprefix('torch.')}{list(form.shape)}"


def _head_digest(step: int, small: Mapping[str, Any], layout: Mapping[str, TensorForm]) -> str:
    return hashlib.sha256(
        _text([step, small, {name: _written(form) for name, form in layout.items()}]).encode()
    ).hexdigest()


def _digest(name: str, offset: int, step: int, data: Any) -> str:
    found = hashlib.sha256(f"{name} {offset} {step} ".encode())
    found.update(data)
    return found.hexdigest()


def _text(value: Any) -> str:
    """The same for equal values, in whatever order dictionaries were filled.

    Of what is not written alike in all processes counts the class alone.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{_text(key)}:{_text(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, torch.Tensor):
        return _written(form_of(value)) + hashlib.sha256(raw(value)).hexdigest()
    return type(value).__qualname__


def _restore(present: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name in present.keys() - saved.keys():
        del present[name]
    for name, value in saved.items():
        if torch.is_tensor(value) and torch.is_tensor(present.get(name)):
            present[name].copy_(value)  # others hold this very tensor: a scheduler, a captured graph
        elif value is not ELSEWHERE:
            present[name] = value

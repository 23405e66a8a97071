"""The messages between a source and a newcomer, as bytes.

A frame is a message of ``LANGUAGE`` and its seal. An item with tensors is a :class:`Begin` that announces them,
followed by each tensor's bytes in chunks. Each chunk has a SHA-256 of its place and its bytes. So damage is found: in a
tensor it costs that item, in a frame the line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recycle_plugin.core.messages.encoding import Language
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Handed, Head, Item, Marker, Sums, Unit
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.runtime.lines.frames import Framing, Nonsense
from recycle_plugin.runtime.movers.wire import DTYPES, dtype_of
from recycle_plugin.runtime.state.stage_state import pieces
from recycle_plugin.runtime.state.units import UnitValue

CHUNK_BYTES = 1 << 20
LONGEST_HELLO = 1 << 12  # bytes of a frame from an unknown caller
# parts that are no tensors of the state, whose names never equal these
PLAIN, VALUE, UNITS = PLAIN_BYTES = "plain", "value", "units"


@dataclass(frozen=True)
class Arrival:
    """The first message on a line: the newcomer, and its job."""

    job: str
    newcomer: WorkerId


@dataclass(frozen=True)
class Part:
    """A tensor of an item."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    on_host: bool = False

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Begin:
    """Announces an item of a ``kind`` (KINDS), of the unit ``name``; its ``parts`` follow, each in chunks."""

    kind: str
    step: int
    name: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Chunk:
    """Announces ``size`` bytes of the tensor ``part``, from byte ``offset`` on. ``digest``: SHA-256 of the item's kind
    and name, part, offset, step and bytes.
    """

    part: str
    offset: int
    size: int
    digest: str


@dataclass(frozen=True)
class Mark:
    """A :class:`Marker`, with the dtype of its norm ("" if that is no tensor) and its settings as JSON. ``share``: the
    part of the replicas that has contributed.
    """

    step: int
    norm: float | None
    dtype: str
    begins: bool
    valid_from: int
    settings: str
    share: LiveShare = LiveShare()
    ends: bool = False


LANGUAGE = Language((Arrival, Asked, Begin, Chunk, Mark))
FRAMES = Framing(LANGUAGE)
KINDS = ("head", "unit", "sums", "script")


# --- items ---------------------------------------------------------------------------------------


def digest(begin: Begin, part: str, offset: int, data: Any) -> str:
    found = hashlib.sha256(f"{begin.kind} {begin.name} {part} {offset} {begin.step} ".encode(errors="surrogatepass"))
    found.update(data)
    return found.hexdigest()


def chunks(part: Part, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (offset, piece) of a part's tensor, wherever that is."""
    offset = 0
    for piece in pieces(tensor, CHUNK_BYTES):
        yield offset, piece
        offset += piece.nbytes


def mark(marker: Marker) -> Mark:
    """Return a marker as it is sent; its norm is a number or a one-number tensor."""
    norm = marker.norm
    dtype = str(norm.dtype).removeprefix("torch.") if torch.is_tensor(norm) else ""
    value = None if norm is None else float(norm)
    settings = json.dumps(marker.settings)
    return Mark(marker.step, value, dtype, marker.begins, marker.valid_from, settings, marker.share, marker.ends)


def marker(found: Mark) -> Marker:
    """Invert :func:`mark`. Raises Nonsense for an unknown dtype, and for invalid settings."""
    whole = not found.dtype or found.norm is None
    norm = found.norm if whole else torch.tensor(found.norm, dtype=dtype_of(found.dtype))
    settings = _settings(found.settings)
    return Marker(found.step, norm, found.begins, found.valid_from, settings, found.share, found.ends)


def _settings(text: str) -> list[dict[str, Any]] | None:
    """Return an optimizer's settings, group by group, from JSON, which writes tuples as lists."""
    try:
        found = json.loads(text)
        return None if found is None else [{name: _tuples(value) for name, value in group.items()} for group in found]
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Nonsense(f"invalid settings: {text[:80]!r}") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def begun(item: Head | Unit | Sums | Handed) -> Iterator[tuple[Begin, list[torch.Tensor]]]:
    """Yield the messages of an item: its announcement and its tensors. Sums are sent unit by unit."""
    if isinstance(item, Sums):
        for name, values in item.values.items():
            parts = tuple(_part(str(number), value) for number, value in enumerate(values))
            yield Begin("sums", item.step, name, parts), list(values)
        return
    if isinstance(item, Handed):
        yield _begin("script", item.step, "", {VALUE: _as_tensor(item.value)})
        return
    if isinstance(item, Head):
        tensors = {VALUE: _as_tensor(item.value), UNITS: _as_tensor(json.dumps(dict(item.units)).encode())}
        yield _begin("head", item.step, "", tensors)
        return
    value: UnitValue = item.value
    tensors = {**value.tensors, PLAIN: _as_tensor(value.plain)}
    yield _begin("unit", item.step, item.name, tensors, value.on_host)


def item(begin: Begin, tensors: list[torch.Tensor] | None) -> Item | None:
    """Return the item that has come; ``tensors`` None: it was damaged. Returns None if it is useless without them.
    Raises Nonsense for an invalid item.
    """
    if begin.kind == "unit":
        return Unit(begin.step, begin.name, None if tensors is None else _unit(begin, tensors))
    if tensors is None:
        return None
    if begin.kind == "sums":
        return Sums(begin.step, {begin.name: tuple(tensors)}, begin.nbytes)
    named = {part.name: tensor for part, tensor in zip(begin.parts, tensors, strict=True)}
    if begin.kind == "script" and named.keys() == {VALUE}:
        return Handed(begin.step, _as_bytes(named[VALUE]))
    if named.keys() != {VALUE, UNITS}:
        raise Nonsense(f"a head of {', '.join(named)[:80]!r}")
    return Head(begin.step, _as_bytes(named[VALUE]), _weights(_as_bytes(named[UNITS])))


def _weights(text: bytes) -> dict[str, int]:
    try:
        return {name: int(weight) for name, weight in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Nonsense(f"invalid units: {text[:80]!r}") from None


def check(begin: Begin) -> None:
    """Raise Nonsense for the announcement of an impossible item."""
    if begin.kind not in KINDS:
        raise Nonsense(f"an item of kind {begin.kind[:80]!r}")
    for part in begin.parts:
        dtype = dtype_of(part.dtype)
        if part.name in PLAIN_BYTES and dtype is not torch.uint8:
            raise Nonsense(f"a {part.name} of {dtype}")
        if min(part.shape, default=0) < 0:
            raise Nonsense(f"a tensor of shape {str(part.shape)[:80]}")


def _unit(begin: Begin, tensors: list[torch.Tensor]) -> UnitValue:
    named = {part.name: tensor for part, tensor in zip(begin.parts, tensors, strict=True)}
    plain = named.pop(PLAIN, torch.empty(0, dtype=torch.uint8))
    return UnitValue(named, _as_bytes(plain), frozenset(part.name for part in begin.parts if part.on_host))


def _begin(
    kind: str, step: int, name: str, tensors: Mapping[str, torch.Tensor], on_host: frozenset[str] = frozenset()
) -> tuple[Begin, list[torch.Tensor]]:
    parts = tuple(_part(each, tensor, each in on_host) for each, tensor in tensors.items())
    return Begin(kind, step, name, parts), list(tensors.values())


def _part(name: str, tensor: torch.Tensor, on_host: bool = False) -> Part:
    return Part(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), on_host)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()

"""What is left of a step after a failure: the backward closure of what is missing, over arrays.

To finish a step every live worker needs its stage's reduced gradient, and that needs every micro-batch's weight
gradient. Whatever of these survived on a live worker stays. What has to run follows from the dependencies in
``core.vocabulary.dataflow``: a weight gradient needs what its input gradient left, that needs the stash and the
gradient from one stage down, and so on, until a live worker holds the datum. Backwards depend on the stages behind
theirs and forwards on those before, so one pass up and one down over the stages find all.

In exact mode weight gradients are in the sums of blocks (core/vocabulary/blocks.py). A block that a live worker has
begun goes on there, in order; a block whose worker has died is made again, all of it, by one worker.

All arrays are by stage and *column*, the number of a micro-batch among all of a step. A worker is its replica, or -1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.dataflow import TRAVELS
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.packed_data import Group, packed_data
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import Held, Torn
from recycle_plugin.core.vocabulary.topology import Topology

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]

MADE_OF_BLOCK = ("wgrad", "inner", "stash")  # what only its worker has of a block, most of it first
AWAY = {"act": -1, "grad": 1}  # where a boundary tensor is made, seen from the stage that uses it


@dataclass(frozen=True)
class Rest:
    """What has to run of a step. ``home``: who works on each micro-batch, int64. Masks: ``forward``; ``whole``, a
    backward for its weights' sake; ``boundary``, a backward that only makes a gradient for the stage before;
    ``weight``, a weight gradient by itself, whose input gradient survived, or all if backwards are ``split``.

    ``sent``: by kind, the boundary tensors that their users lack; ``kept``: by kind, who has each of these from before,
    int64, -1 if it is made again. ``holds``: by "stash" and "inner", how many each worker has, by stage and replica.
    """

    split: bool
    home: Array
    forward: Mask
    whole: Mask
    boundary: Mask
    weight: Mask
    sent: dict[str, Mask]
    kept: dict[str, Array]
    holds: dict[str, Array]

    @property
    def backward(self) -> Mask:
        """The backwards that make a gradient for the stage before."""
        return self.whole | self.boundary

    @property
    def forward_only(self) -> Mask:
        """The forwards that only make an activation for the stage behind."""
        return self.forward & ~self.backward

    def runs(self, op: Op) -> Mask:
        """Return where F, I, W or B runs."""
        fused = self.whole & (not self.split)
        return {Op.F: self.forward, Op.I: self.backward & ~fused, Op.W: self.weight, Op.B: fused}[op]


class Holdings:
    """The data of ``step`` that live workers hold, as arrays. Costs time in proportion to the data."""

    def __init__(self, plan: Plan, step: int, held: Held) -> None:
        shape = plan.view.topology
        self._size = (shape.stages, shape.replicas * shape.micro_batches)
        self._replicas = shape.replicas
        self._rows = _rows(held, step, shape)
        column, block = np.arange(self._size[1]), plan.policy.blocks(shape).size
        self.first: Array = column - column % shape.micro_batches % block  # of the block, for each column
        self.begun = self._begun()
        route = np.frombuffer(plan.route.data, np.int32).reshape(self._size).astype(np.int64)
        self.home: Array = np.where(self.begun < 0, route, self.begun)

    def _begun(self) -> Array:
        """Return, for each begun micro-batch, the worker that has most of its block. A boundary-only forward may have
        left a stash.
        """
        best = np.full(self._size, len(MADE_OF_BLOCK) * self._replicas)
        for order, kind in enumerate(MADE_OF_BLOCK):
            at, who, stage, column = self._rows[kind]
            own = at == stage
            np.minimum.at(best, (stage[own], self.first[column[own]]), order * self._replicas + who[own])
        best = best[:, self.first]
        return np.where(best < len(MADE_OF_BLOCK) * self._replicas, best % self._replicas, -1)

    def at_home(self, kind: str) -> Mask:
        """Return whether the worker that uses each datum has it, by the user's stage."""
        found = np.zeros(self._size, bool)
        at, who, stage, column = self._rows[kind]
        mine = (stage == at + AWAY.get(kind, 0)) & (self.home[at, column] == who)
        found[at[mine], column[mine]] = True
        return found

    def made(self, kind: str) -> Array:
        """Return the first worker of the making stage that has each datum."""
        found = np.full(self._size, self._replicas)
        at, who, stage, column = self._rows[kind]
        own = at == stage
        np.minimum.at(found, (stage[own], column[own]), who[own])
        return np.where(found == self._replicas, -1, found)

    def count(self, kind: str) -> Array:
        """Return how many data each worker has, by stage and replica."""
        at, who, _, _ = self._rows[kind]
        found = np.zeros((self._size[0], self._replicas), np.int64)
        np.add.at(found, (at, who), 1)
        return found

    def sums(self, stage: int, column: int) -> list[Seat]:
        """Return the seats whose sums contain the micro-batch's weight gradient."""
        at, who, of, columns = self._rows["wgrad"]
        return [Seat(int(one), stage) for one in sorted(who[(at == stage) & (of == stage) & (columns == column)])]

    def counted(self) -> Array:
        """Return in how many sums each weight gradient is."""
        at, _, stage, column = self._rows["wgrad"]
        found, own = np.zeros(self._size, np.int64), at == stage
        np.add.at(found, (stage[own], column[own]), 1)
        return found


BLANK = str.maketrans(".:", "  ")
OWN = 1 << 40  # in place of a replica: the holder's own


class Rows:
    """Data of one kind, unpacked: for each piece its holder, and its micro-batches as text."""

    def __init__(self) -> None:
        self._of: list[tuple[int, int, int, int]] = []  # of each piece: its first holder, holders, own stage, ranges
        self._ranges: list[str] = []

    def add(self, first: int, holders: int, stage: int, ranges: str) -> None:
        """Record that ``holders`` workers, of which ``first`` is the first's place among all, have data of ``stage``
        for ``ranges`` of micro-batches.
        """
        self._of.append((first, holders, stage, ranges.count(" ") + 1))
        self._ranges.append(ranges)

    def arrays(self, seats: Array, shape: Topology) -> tuple[Array, Array, Array, Array]:
        """Return for each datum: stage and replica of its holder, its own stage, its column. What can't be in such a
        job, as a confused worker may report, is left out. ``seats``: stage and replica of all holders.
        """
        text = "".join(f" {each}" for each in self._ranges).replace(" .", f" {OWN}.").translate(BLANK)
        ranges = np.fromstring(text, np.int64, sep=" ").reshape(-1, 3)
        first, holders, stage, count = np.array(self._of, np.int64).reshape(-1, 4).T
        piece, of_piece = _each(holders * count)  # each holder's ranges, one after the other
        at, who = seats[first[piece] + of_piece // count[piece]].T
        replica, low, high = ranges[(count.cumsum() - count)[piece] + of_piece % count[piece]].T
        row, of_row = _each(high - low + 1)
        replica = np.where(replica == OWN, who, replica)
        at, who, stage, replica = np.column_stack((at, who, stage[piece], replica))[row].T
        index = low[row] + of_row
        limits = ((replica, shape.replicas), (index, shape.micro_batches), (stage, shape.stages))
        fits = np.all([(number >= 0) & (number < limit) for number, limit in limits], axis=0)
        column = replica * shape.micro_batches + index
        return at[fits], who[fits], stage[fits], column[fits]


def _each(counts: Array) -> tuple[Array, Array]:
    """Return 0, 0, ..., 1, ... with each number as often as ``counts`` says, and how often each stood before."""
    numbers = np.repeat(np.arange(len(counts)), counts)
    return numbers, np.arange(len(numbers)) - (counts.cumsum() - counts)[numbers]


def _rows(held: Held, step: int, shape: Topology) -> dict[str, tuple[Array, Array, Array, Array]]:
    """Return by kind the data of ``step``, as :meth:`Rows.arrays` does."""
    rows = {kind: Rows() for kind in (*MADE_OF_BLOCK, *TRAVELS)}
    alike: dict[int, tuple[dict[Group, str], list[Seat]]] = {}
    for seat, have in held.items():
        packed = packed_data(have)
        alike.setdefault(id(packed.alike), (packed.alike, []))[1].append(seat)
    seats: list[Seat] = []
    for shared, of_these in alike.values():
        for (kind, stage, of), ranges in shared.items():
            if of == step and ranges and kind in rows:
                rows[kind].add(len(seats), len(of_these), stage, ranges)
        seats += of_these
    places = np.array(seats, np.int64).reshape(-1, 2)[:, ::-1]
    return {kind: each.arrays(places, shape) for kind, each in rows.items()}


def closure(plan: Plan, step: int, held: Held, whose: Collection[int], stages: Collection[int]) -> Rest:
    """Return the least work that gives each of ``stages`` the weight gradients of all micro-batches of the replicas
    ``whose``, given what live workers hold of ``step``.

    What starts from its forward runs where ``plan`` routes it. Costs time in proportion to the data held, and to the
    micro-batches of all stages. Raises :class:`Torn` if the survivors' data contradicts itself.
    """
    holdings, shape = Holdings(plan, step, held), plan.view.topology
    home, counted = holdings.home, holdings.counted()
    size = home.shape
    in_batch = np.isin(np.arange(size[1]) // shape.micro_batches, list(whose))
    wanted = np.zeros(size, bool)
    wanted[list(stages)] = in_batch
    _check(holdings, step, shape.micro_batches, wanted, counted)
    missing = wanted & (counted == 0)
    inner = holdings.at_home("inner")
    whole, boundary, forward = missing & ~inner, np.zeros(size, bool), np.zeros(size, bool)
    sent = {kind: np.zeros(size, bool) for kind in TRAVELS}
    kept = {kind: holdings.made(kind) for kind in TRAVELS}
    lacks = {kind: ~holdings.at_home(kind) for kind in TRAVELS}
    for stage in range(1, size[0]):
        sent["grad"][stage] = (whole | boundary)[stage - 1] & lacks["grad"][stage - 1]
        boundary[stage] = sent["grad"][stage] & (kept["grad"][stage] < 0) & ~whole[stage]
    forward |= (whole | boundary) & ~holdings.at_home("stash")
    for stage in range(size[0] - 2, -1, -1):
        sent["act"][stage] = forward[stage + 1] & lacks["act"][stage + 1]
        forward[stage] |= sent["act"][stage] & (kept["act"][stage] < 0)
    split = plan.policy.split_backward
    holds = {kind: holdings.count(kind) for kind in ("stash", "inner")}
    return Rest(split, home, forward, whole, boundary, missing if split else missing & inner, sent, kept, holds)


def _check(holdings: Holdings, step: int, per: int, wanted: Mask, counted: Array) -> None:
    """Raise :class:`Torn` if a weight gradient is in two sums, or in one that lacks what its block adds before."""
    twice = wanted & (counted > 1)
    gaps = wanted & (counted == 0)
    gaps_before = np.cumsum(gaps, axis=1) - gaps
    before = gaps_before > gaps_before[:, holdings.first]
    alone = wanted & (counted == 1) & (before | (holdings.made("wgrad") != holdings.begun))
    for stage, place in np.argwhere(twice | alone)[:1].tolist():
        seats = holdings.sums(stage, place)
        how = (
            f"is in the sums of seats {', '.join(map(str, seats))}, and would be counted twice"
            if twice[stage, place]
            else f"is in the sum of seat {seats[0]}, but the micro-batches before it in its block are not"
        )
        raise Torn(
            f"the weight gradient of micro-batch {MicroBatch(place // per, place % per)} on stage {stage}, "
            f"step {step}, {how}: this is a mistake of the plugin; go on from the last checkpoint, and report it with "
            "the run's events.jsonl"
        )

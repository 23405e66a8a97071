"""What every link has to do (recycle_plugin/runtime/collectives/link.py), wherever its tensors are: tests that ask for
``run(scenario, members)``.

Each test is a scenario that every member runs; what they return comes in the members' order, DIED for who has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.collectives.link import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Broken,
    Gather,
    Handle,
    ReduceScatter,
)
from tests.support.members import DIED, LONG_S, Place

SHORT_S = 0.2  # what must pass
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
SIZES = (0, 1, 1000, 1 << 18)


def name_of(members: int) -> str:
    return f"ranks {', '.join(map(str, range(members)))}"


def value(position: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any dtype."""
    return (torch.arange(size) % 5 + 2 * position + 1).to(dtype)


def failure_of(handle: Handle, timeout_s: float = LONG_S) -> str:
    try:
        handle.wait(timeout_s)
    except (Broken, RecycleError) as error:
        return type(error).__name__
    return "none"


def begun(
    place: Place, size: int, dtype: torch.dtype
) -> Iterator[tuple[str, Any, list[torch.Tensor], list[torch.Tensor] | None]]:
    """Every operation but those between two, with the tensors that it changes here, and what they have to become (None:
    not defined).
    """
    here, members = place.position, place.members
    each, wide = (
        [value(one, size, dtype) for one in range(members)],
        [value(one, members * size, dtype) for one in range(members)],
    )
    own, last, zeros = each[here], members - 1, lambda: torch.zeros(size, dtype=dtype)
    total, largest = torch.stack(each).sum(0).to(dtype), each[-1]

    def part(one: torch.Tensor) -> torch.Tensor:
        return one[here * size : (here + 1) * size]

    for name, op, expected in (("sum", ReduceOp.SUM, total), ("max", ReduceOp.MAX, largest)):
        held = own.clone()
        yield name, AllReduce([held], op), [held], [expected]
    held = own.clone()
    yield "broadcast", Broadcast([held], last), [held], [each[last]]
    outputs = [zeros() for _ in each]
    yield "all-gather", AllGather(outputs, own), outputs, each
    outputs = [zeros() for _ in each] if here == last else []
    yield "gather", Gather(outputs, own, last), outputs, each if here == last else []
    held = zeros()
    yield (
        "reduce-scatter",
        ReduceScatter(held, wide[here], ReduceOp.SUM),
        [held],
        [part(torch.stack(wide).sum(0).to(dtype))],
    )
    held = torch.zeros(members * size, dtype=dtype)
    yield "all-to-all", AllToAll(held, wide[here], [], []), [held], [torch.cat([part(one) for one in wide])]
    yield "barrier", Barrier(), [], []


def all_in_turn(place: Place) -> list[str]:
    link, wrong = place.link(), []
    for dtype, size in itertools.product(DTYPES, SIZES):
        for name, operation, tensors, expected in begun(place, size, dtype):
            link.start(operation).wait(LONG_S)
            if expected is not None and not all(map(torch.equal, tensors, expected)):
                wrong.append(f"{name} of {size} {dtype}")
    return wrong


def all_at_once(place: Place) -> list[str]:
    """Of all sizes and dtypes, before the connections are there, and waited for from the last one on."""
    link, underway = place.link(), []
    for dtype, size in itertools.product(DTYPES, SIZES):
        underway += [
            (f"{name} of {size} {dtype}", link.start(operation), tensors, expected)
            for name, operation, tensors, expected in begun(place, size, dtype)
        ]
    for _, handle, _, _ in reversed(underway):
        handle.wait(LONG_S)
    return [
        name
        for name, _, tensors, expected in underway
        if expected is not None and not all(map(torch.equal, tensors, expected))
    ]


@pytest.mark.parametrize("scenario", [all_in_turn, all_at_once])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_each_operation_gives_what_it_says(run, scenario, members):
    assert run(scenario, members) == [[]] * members


def uneven(place: Place) -> list[float]:
    here, held = place.position, torch.zeros(3)
    lengths = [1, 2] if here == 0 else [2, 1]
    place.link().start(AllToAll(held, torch.arange(3.0) + 10 * here, lengths, lengths)).wait(LONG_S)
    return held.tolist()


def test_parts_of_different_lengths(run):
    assert run(uneven, 2) == [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]]


def two_in_flight(place: Place) -> tuple[list[bool], list[float], str]:
    """Both started before the other member starts either; the second is waited for first, with a deadline that passes
    first.
    """
    link, held = place.link(), [torch.ones(1), torch.full((1,), 10.0)]
    link.connect().wait(LONG_S)
    if place.position == 1:
        place.hear("started", 0)
    handles = [link.start(AllReduce([each], ReduceOp.SUM)) for each in held]
    told, said, early = [], "", [False, False]
    for handle in handles:
        handle.when_over(lambda: told.append(True))
    if place.position == 0:
        try:
            handles[1].wait(SHORT_S)
        except WaitTimeout as error:
            said = str(error)
        early = [handle.poll() for handle in handles]
        place.say("started")
    for handle in reversed(handles):
        handle.wait(LONG_S)
        assert handle.poll() and not handle.leave()
    handles[0].when_over(lambda: told.append(True))
    return early, [each.item() for each in held], said, len(told)


def test_two_in_flight_and_a_deadline_that_passes(run):
    """It names what was waited for, and the operation goes on."""
    first, second = run(two_in_flight, 2)
    assert first == ([False, False], [2.0, 20.0], f"waited {SHORT_S:g} s for AllReduce among ranks 0, 1", 3)
    assert second == ([False, False], [2.0, 20.0], "", 3)


def nobody_comes(place: Place) -> tuple[str, str, str, str] | None:
    if place.position == 2:
        place.hear("seen", 0, 1)
        return None
    link = place.link()
    underway, said = link.start(AllReduce([torch.ones(1)], ReduceOp.SUM)), []
    place.say("there")
    place.hear("there", 0, 1)
    for handle in (link.connect(), underway):
        try:
            handle.wait(1.0)
        except WaitTimeout as error:
            said.append(str(error))
    assert not link.connected
    link.abort()
    place.say("seen")
    return *said, failure_of(link.connect()), failure_of(underway), failure_of(link.start(Barrier()))


def test_a_member_that_never_comes_is_named_at_the_deadline(run):
    *two, nobody = run(nobody_comes, 3)
    assert nobody is None
    assert (
        two
        == [
            (
                "waited 1 s for the connections among ranks 0, 1, 2; missing of 3 are number 2",
                "waited 1 s for AllReduce among ranks 0, 1, 2",
                "Broken",
                "Broken",
                "Broken",
            )
        ]
        * 2
    )


DEADLY: dict[str, Callable[[], Any]] = {
    "a small sum": lambda: AllReduce([torch.ones(1)], ReduceOp.SUM),
    "a large sum": lambda: AllReduce([torch.ones(1 << 20)], ReduceOp.SUM),
    "a broadcast from the lost": lambda: Broadcast([torch.ones(1)], 2),
    "an all-to-all": lambda: AllToAll(torch.ones(3), torch.ones(3), [], []),
    "a barrier": Barrier,
}


def one_dies(place: Place, operation: Callable[[], Any]) -> tuple[str, float, str, bool]:
    """Member 2, connected and through with one sum, in mid-operation of the others; who hears of it breaks what is
    left, which frees the rest.
    """
    link, first = place.link(), torch.ones(1)
    link.start(AllReduce([first], ReduceOp.SUM)).wait(LONG_S)
    place.meet("connected")
    if place.position == 2:
        place.hear("started", 0, 1)
        place.die()
    handle = link.start(operation())
    place.say("started")
    failed = failure_of(handle)
    link.abort()
    place.say("out")
    place.hear("out", 0, 1)
    again = place.link(2)
    return failed, first.item(), failure_of(link.start(Barrier())), again.connected


def dies_in(name: str, place: Place) -> tuple[str, float, str, bool]:
    return one_dies(place, DEADLY[name])


@pytest.mark.parametrize("name", DEADLY)
def test_a_members_death_in_mid_operation(run, name):
    assert run(partial(dies_in, name), 3) == [("Broken", 3.0, "Broken", False)] * 2 + [DIED]

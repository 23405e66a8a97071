"""A script's own calls on tensors of an accelerator, over the false NCCL: they give what docs/collectives.md says of
them, and what carries them is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recycle_plugin.runtime.collectives import in_flight, nccl, transports
from recycle_plugin.runtime.collectives.asked import SCRIPT_ON_DEVICE
from recycle_plugin.runtime.collectives.confirmed import ConfirmedLink
from recycle_plugin.runtime.collectives.in_flight import Flight
from recycle_plugin.runtime.collectives.nccl import NcclLink, process_group
from tests.mistakes.nccl import IN_CALLS
from tests.support.calls import CALLS, LOST, TENSORS
from tests.support.calls_page import COLUMNS, PAGE, each, known, outcome, rows, words
from tests.support.results import DIED
from tests.support.scenario import Script, run
from tests.support.waiting import until

KINDS = {"allreduce", "broadcast", "allgather", "gather", "reduce_scatter", "alltoall"}
LARGE = 1 << 18  # numbers: as many bytes as are kept for others


def begin(script: Script, mistake: str = "") -> Any:
    """Compute on the stand-in, as a worker of a job does whose ``device_link`` is "nccl"; returns what counts."""
    from tests.support import standin
    from tests.support.standin import nccl as false

    standin.configure(late=3)
    nccl.dist.ProcessGroupNCCL = false.ProcessGroupNCCL
    over = functools.partial(transports.over_nccl, process_group)
    transports.LINKS[standin.NAME] = transports.Way(over, takes=nccl.takes)
    script.session.device_link = "nccl"
    torch.set_default_device(standin.NAME)
    if mistake:
        IN_CALLS[mistake]()
    dist.init_process_group("gloo")
    return false.counted


def column(name: str) -> dict[str, str]:
    return {call: cells[COLUMNS.index(name)] for call, cells in rows(PAGE.read_text()).items()}


def chosen() -> list[int]:
    """Of tensors, and of all members or one: nothing that goes from one to another."""
    return [place for place in known() if CALLS[place] in TENSORS]


# --- what they give ----------------------------------------------------------------------------------


def nobody_is_lost(script: Script) -> tuple[dict[int, Any], set[str]]:
    counted = begin(script)
    return each(script, chosen()), set(counted)


def somebody_is_lost(script: Script) -> tuple[dict[int, Any], set[str]]:
    counted = begin(script)
    dist.all_reduce(script.value())
    if script.rank == LOST:
        script.die()
    script.recover()
    before = counted.copy()
    return each(script, chosen()), set(counted - before)


@pytest.mark.parametrize("scenario, heading", [(nobody_is_lost, COLUMNS[0]), (somebody_is_lost, COLUMNS[1])])
def test_they_give_what_the_page_says(scenario, heading):
    found = [one for one in run(scenario, 3, loses=scenario is somebody_is_lost, first=False) if one != DIED]
    said, live = column(heading), len(found)
    measured = words({place: [one[0][place] for one in found] for place in chosen()}, live)
    assert measured == {CALLS[place].name: said[CALLS[place].name] for place in chosen()}
    assert all(one[1] == (KINDS if live == 3 else {"allreduce", "broadcast"}) for one in found)


# --- what goes through host memory -------------------------------------------------------------------


def not_of_nccl(script: Script) -> list[Any]:
    """Dtypes and operations that NCCL has not, or not alike, sparse tensors, tensors of the host, and ``exact``'s."""
    counted, found = begin(script), []
    for tensor, op in (
        (torch.tensor([script.rank + 1], dtype=torch.int16), dist.ReduceOp.SUM),
        (torch.tensor([script.rank + 1]), dist.ReduceOp.BOR),
        (torch.tensor([script.rank + 1.0], device="cpu"), dist.ReduceOp.SUM),
    ):
        kind, error = outcome(lambda _, tensor=tensor, op=op: dist.all_reduce(tensor, op), script.rank)
        found.append(tensor.item() if error is None else f"{kind}: {error}"[:40])
    dist.barrier()
    message, other = script.value(), 1 - script.rank
    sent = dist.isend(script.value(), other)
    dist.recv(message, other)
    sent.wait()
    return [*found, message.item() + script.rank, sum(counted.values())]


def test_what_nccl_has_not_goes_through_host_memory():
    first, second = run(not_of_nccl, 2, first=False)
    assert first == second and first[1:] == [3, 3.0, 2.0, 0], first


def own_sums(script: Script) -> list[Any]:
    """The plugin's own sums, of a dtype that NCCL has and of one that it has not."""
    counted, found = begin(script), []
    for dtype in (torch.float32, torch.complex64):
        total = torch.zeros(1, dtype=dtype)
        dist.group.WORLD.sum_into(total, [torch.full((1,), script.rank + 1.0, dtype=dtype)], 1.0)
        found += [total.item(), counted["allreduce"]]
    return found


def test_a_sum_of_a_dtype_that_nccl_has_not_goes_through_host_memory():
    first, second = run(own_sums, 2, first=False)
    assert first == second == [3.0, 2, 3.0 + 0j, 2]  # with the link's first


def scattered(script: Script) -> list[Any]:
    """The root gives tensors of the host, to members whose output is on the accelerator."""
    counted = begin(script)
    rows = [torch.tensor([10.0 + to], device="cpu") for to in range(2)] if script.rank == 0 else None
    output = torch.zeros(1)
    dist.scatter(output, rows, src=0)
    gathered = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([script.rank + 1.0], device="cpu"))
    return [output.item(), [one.item() for one in gathered], counted["broadcast"], counted["allgather"]]


def test_what_is_given_from_the_host_goes_where_the_results_are():
    found = run(scattered, 2, first=False)
    assert found == [[10.0 + rank, [1.0, 2.0], 1, 1] for rank in range(2)]


# --- a member that can't -----------------------------------------------------------------------------


def no_room(script: Script, where: str) -> list[Any]:
    """The second rank has no memory for its part of a sum, says so, and its script goes on to the next one."""
    begin(script)
    dist.all_reduce(script.value())
    in_flight.NEWS_TIMEOUT_S = script.session.waiting.timeout_s = 5.0  # nobody coordinates here
    of = in_flight if where == "_buffer" else NcclLink
    right, left = getattr(of, where), ["once"]

    def fails(*given: Any) -> Any:
        if script.rank == 1 and left:
            left.pop()
            raise torch.OutOfMemoryError("no memory is left on the device")
        return right(*given)

    setattr(of, where, fails)
    return [outcome(lambda _, n=n: dist.all_reduce(script.value() * n), script.rank) for n in (10, 100)]


@pytest.mark.parametrize("where", ["_buffer", "_start"])
def test_who_has_no_memory_for_a_sum_does_not_meet_the_others_in_its_next(where):
    first, second = run(functools.partial(no_room, where=where), 2, first=False)
    assert "no memory is left" in str(second[0]), second
    assert [kind for kind, _ in (*first, second[1])] == ["refused"] * 3, (first, second)


# --- a loss ------------------------------------------------------------------------------------------


def with_others_waiting(script: Script, does: Callable[[], Any]) -> None:
    """The last rank dies once the others wait in a kernel."""
    if script.rank == LOST:
        script.hear("launched", 0, 1)
        script.die()
    launch = NcclLink._launch

    def launched(link: NcclLink, begun: Any) -> None:
        launch(link, begun)
        script.say("launched")

    NcclLink._launch = launched
    does()


def in_place(script: Script, mistake: str = "") -> dict[str, Any]:
    """What the script sees in the tensor of a sum, at each look, while a loss interrupts it."""
    counted = begin(script, mistake)
    dist.all_reduce(script.value(LARGE))
    total, seen = script.value(LARGE), []
    hand_over, recover = Flight._hand_over, script.session.hooks.between_steps

    def handed(flight: Flight, call: Any) -> None:
        if call.link == SCRIPT_ON_DEVICE:
            seen.append(total[0].item())
        hand_over(flight, call)

    def recovered() -> None:
        recover()
        seen.append(total[0].item())

    Flight._hand_over, script.session.hooks.between_steps = handed, recovered
    with_others_waiting(script, lambda: dist.all_reduce(total))
    whole = bool((total == total[0]).all())
    return {"seen": sorted({*seen}), "total": total[0].item() if whole else "torn", "over": counted["allreduce"] > 1}


def test_a_loss_in_a_sum_leaves_what_it_was_to_overwrite():
    first, second, died = run(in_place, 3, loses=True, first=False)
    assert died == DIED
    assert first == {"seen": [1.0], "total": 3.0, "over": True}
    assert second == {"seen": [2.0], "total": 3.0, "over": True}


def garbage_comes(script: Script, mistake: str = "") -> list[Any]:
    """The second rank hears of the loss only when the abort of the first has ended its kernel, with garbage."""
    begin(script, mistake)
    dist.all_reduce(script.value())
    total, abort = script.value(), ConfirmedLink.abort

    def aborted(link: ConfirmedLink) -> Any:
        if script.rank == 1 and (stuck := [*link.device._launched]):
            until(lambda: all(one.over.poll() for one in stuck), "what the other one's abort does here")
            until(lambda: not link.device._launched, "a look at it")
        return abort(link)

    ConfirmedLink.abort = aborted
    with_others_waiting(script, lambda: dist.all_reduce(total))
    return [total.item(), each(script, chosen()[:1])[chosen()[0]][1]]


def test_garbage_of_another_members_abort_is_no_result():
    assert run(garbage_comes, 3, loses=True, first=False) == [[3.0, 2.0], [3.0, 2.0], DIED]


def one_is_through(script: Script, length: int) -> Any:
    """The last rank dies in a sum that the first one is through with, and the second is not: it is told by the first,
    if it is small.
    """
    begin(script)
    dist.all_reduce(script.value())
    total, confirm = script.value(length), ConfirmedLink._confirm

    def confirmed(link: ConfirmedLink, here: Any, everywhere: Any) -> None:
        """All say that they are through, and the second does not hear it."""
        confirm(link, here, everywhere if script.rank == 0 else type(everywhere)("a sum"))

    ConfirmedLink._confirm = confirmed
    if script.rank == LOST:
        dist.all_reduce(total, async_op=True)
        script.hear("over", 0)
        script.die()
    work = dist.all_reduce(total, async_op=True)
    if script.rank == 0:
        work.wait()
        script.say("over")
        script.recover()
    else:
        kind, said = outcome(lambda _: work.wait(), script.rank)
        if said is not True:
            return f"{kind}: {said}"
    return total[0].item()


def test_who_is_cut_off_from_a_result_is_told_it():
    found = run(functools.partial(one_is_through, length=LARGE), 3, loses=True, first=False)
    assert found == [6.0, 6.0, DIED]


def test_who_is_cut_off_from_a_large_result_is_told_so():
    first, second, died = run(functools.partial(one_is_through, length=LARGE + 1), 3, loses=True, first=False)
    assert (first, died) == (6.0, DIED)
    assert second.startswith("refused: all_reduce was over on rank 0 but not on rank 1 when a worker was lost"), second


# --- mistakes that would be seen ---------------------------------------------------------------------


@pytest.mark.parametrize("mistake", IN_CALLS)
def test_a_mistake_would_be_seen(mistake):
    scenario = garbage_comes if "over here" in mistake else in_place
    right = run(scenario, 3, loses=True, first=False)
    wrong = run(functools.partial(scenario, mistake=mistake), 3, loses=True, first=False)
    assert right != wrong

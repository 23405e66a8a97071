"""What torch's collectives give once a member is lost, where they are refused, and ``recycle_plugin.mean``; three real
processes over Gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import recycle_plugin
from recycle_plugin.core.messages.from_workers import Note
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.average import scale_sum
from recycle_plugin.runtime.collectives.callers import Callers
from recycle_plugin.runtime.control.script import TrainingThread
from recycle_plugin.runtime.control.session import Session
from tests.support.coordinator import generation
from tests.support.results import result_of
from tests.support.scenario import LONG_S, RANKS, Job, Script, run_stock
from tests.support.waiting import together

HERE = Path(__file__).name
DIED = "rank 2 is lost"


class Calls:
    """What a script may ask for, as rank ``rank`` of RANKS, each with 1 more than its rank; ``own``: its group of
    one.
    """

    def __init__(self, rank: int, own) -> None:
        self.rank, self.own, self.peer, self.op = rank, own, 1 - rank, dist.ReduceOp

    def value(self, length: int = 1) -> torch.Tensor:
        return torch.full((length,), self.rank + 1.0)

    def each(self) -> list[torch.Tensor]:
        return [self.value() for _ in range(RANKS)]

    def from_first(self) -> list[torch.Tensor] | None:
        return self.each() if self.rank == 0 else None

    def added(self, reduction=dist.ReduceOp.SUM, **named) -> float:
        held = self.value()
        work = dist.all_reduce(held, reduction, **named)
        if work is not None:
            work.wait()
        return held.item()

    def extreme(self, reduction) -> float:
        held = self.value()
        dist.all_reduce(held, reduction)
        return held.item()

    def reduced(self, destination: int, reduction=dist.ReduceOp.SUM) -> float:
        held = self.value()
        dist.reduce(held, destination, reduction)
        return held.item()

    def scaled(self) -> list:
        """A sum of numbers, the tokens of a batch and a share of the loss by them, as transformers counts them, what
        is no SUM, and whether the plugin's own sums are what they were.
        """
        tokens = torch.tensor([3 + self.rank])
        dist.all_reduce(tokens)
        share = self.value().item() * dist.get_world_size() / tokens.item()
        with_own = self.extreme(self.op.MAX), self.added(group=self.own), self.reduced(0)
        return [self.added(), tokens.item(), share, self.added(self.op.AVG), *with_own]

    def mean(self) -> float:
        return recycle_plugin.mean(self.value()).item()

    def told(self) -> list:
        held = ["of rank 0" if self.rank == 0 else None]
        dist.broadcast_object_list(held, 0)
        return held

    def objects(self) -> list:
        held = [None] * RANKS
        dist.all_gather_object(held, self.rank)
        return held

    def exchanged(self, peer: int) -> float:
        """More than the system's buffers hold."""
        held = torch.zeros(1 << 20)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, self.value(1 << 20), peer), dist.P2POp(dist.irecv, held, peer)]
        ):
            work.wait()
        return held.sum().item() / held.numel()

    def among_the_live(self) -> list[float]:
        held = [self.value(), self.value()]
        dist.all_gather(held, self.value(), group=dist.new_group([0, 1]))
        return torch.cat(held).tolist()

    def between_steps(self) -> dict[str, Callable[[], object]]:
        op, value = self.op, self.value
        return {
            "sum": lambda: [self.added() for _ in range(2)],
            "product": lambda: self.added(op.PRODUCT),
            "average": lambda: (
                self.added(op.AVG),
                self.added(op.AVG, async_op=True),
                self.mean(),
                dist.get_world_size(),
            ),
            "average of whole numbers": lambda: dist.all_reduce(torch.tensor([1]), op.AVG),
            "largest and smallest": lambda: (self.extreme(op.MAX), self.extreme(op.MIN)),
            "sum in a group of one": lambda: self.added(group=self.own),
            "reduce": lambda: (self.reduced(0), self.reduced(1, op.AVG)),
            "reduce to the lost": lambda: self.reduced(2),
            "barrier": dist.barrier,
            "all_gather": lambda: dist.all_gather(self.each(), value()),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(value(RANKS), value()),
            "gather": lambda: dist.gather(value(), self.from_first()),
            "scatter": lambda: dist.scatter(value(), self.from_first()),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(value(), value(RANKS)),
            "all_to_all_single": lambda: dist.all_to_all_single(value(RANKS), value(RANKS)),
            "all_gather_object": self.objects,
            "broadcast_object_list": self.told,
            "broadcast from the lost": lambda: dist.broadcast(value(), 2),
            "send to the lost": lambda: dist.send(value(), 2),
            "receive from the lost": lambda: dist.recv(value(), 2),
            "a batch of two": lambda: self.exchanged(self.peer),
            "a batch with the lost": lambda: self.exchanged(2),
            "a group of the live": self.among_the_live,
        }

    def inside(self) -> dict[str, Callable[[], object]]:
        return {
            "all_reduce": self.added,
            "all_reduce, later": lambda: self.added(async_op=True),
            "a mean": self.mean,
            "send": lambda: dist.send(self.value(), self.peer),
            "recv": lambda: dist.irecv(self.value(), self.peer),
            "barrier": dist.barrier,
            "broadcast": lambda: dist.broadcast(self.value(), 0),
            "all_gather": lambda: dist.all_gather(self.each(), self.value()),
            "in a group of one": lambda: self.added(group=self.own),
        }


def tried(call: Callable[[], object]) -> object:
    try:
        return call()
    except RecycleError as error:
        return str(error)


def in_a_thread(call: Callable[[], object]) -> object:
    return together(tried, [call])[0]


@pytest.mark.parametrize("backward", (True, False))
def test_a_hook_in_autograds_thread_is_the_trainers_while_that_runs_a_backward(backward):
    """As on an accelerator: what the other thread does outside of its backward is its own."""
    thread = TrainingThread()
    thread.work, thread.ident, thread.backward = Instruction.parse("0F0.0@1"), threading.get_ident(), backward
    callers, found = Callers(SimpleNamespace(thread=thread)), []

    def run() -> None:
        weight = torch.ones(1, requires_grad=True)
        weight.register_hook(lambda gradient: found.append(callers.in_layer))
        weight.sum().backward()
        found.append(callers.in_layer)

    in_a_thread(run)
    assert found == [backward, False]


def in_a_program(calls: Calls, session: Session) -> dict[str, dict]:
    found = {}
    for name, work in (("layer", Instruction.parse("1F0.0@1")), ("iterator", "the data of step 1")):
        with session.thread.at_work(work):
            found[name] = {called: tried(call) for called, call in calls.inside().items()}
    return found


def after_a_loss(script: Script) -> dict:
    """Rank 2 dies once all are connected; each of the others says what every collective gives, by name."""
    rank, session = script.rank, script.session
    calls = Calls(rank, [dist.new_group([one]) for one in range(RANKS)][rank])
    average = calls.op.AVG
    found = {
        "average": [calls.added(average), calls.mean(), calls.reduced(0, average)],
        "whole": in_a_program(calls, session),
    }
    if rank < 2:
        dist.barrier()  # which breaks
        assert session.view.number == 1
        found |= {name: tried(call) for name, call in calls.between_steps().items()} | {
            "lost": in_a_program(calls, session)
        }
        with session.thread.at_work(Instruction.parse("1REDUCE@1")):
            found["the plugin's own sum"] = calls.extreme(calls.op.SUM)
        found["in a thread"] = in_a_thread(dist.barrier)
        session.group_sums = "scale"
        found["scaled"] = calls.scaled()
        session.group_sums = "raise"
        found["raise"] = tried(calls.added)
    return found


@pytest.fixture(scope="module")
def said():
    """By rank what :func:`after_a_loss` has found, and the warnings."""
    job = Job()
    try:
        members = [job.start(after_a_loss, rank) for rank in range(RANKS)]
        found = {2: result_of(members[2])}
        job.started[2].join(LONG_S)
        job.coordinator.tell(generation(1, [0, 1]))
        found |= {rank: result_of(members[rank]) for rank in (0, 1)}
        return found, [note for note in job.coordinator.hear(Note) if note.kind == "warning"]
    finally:
        job.end()


GIVES = {
    "sum": [3.0, 3.0],
    "product": 2.0,
    "average": (1.5, 1.5, 1.5, RANKS),
    "largest and smallest": (2.0, 1.0),
    "barrier": None,
    "all_gather_object": [0, 1, None],
    "broadcast_object_list": ["of rank 0"],
    "a group of the live": [1.0, 2.0],
    "the plugin's own sum": 3.0,
}
NEEDS_ALL = "all_gather", "all_gather_into_tensor", "gather", "reduce_scatter_tensor", "all_to_all_single"
REFUSED = {
    "average of whole numbers": "torch.distributed.all_reduce with ReduceOp.AVG of a tensor of torch.int64: whole "
    "numbers have no average",
    "reduce to the lost": "cannot reduce to rank 2: that worker is lost",
    "broadcast from the lost": "cannot broadcast from rank 2: that worker is lost",
    "send to the lost": "cannot send to rank 2: that worker is lost",
    "receive from the lost": "cannot receive from rank 2: that worker is lost",
    "a batch with the lost": "torch.distributed.batch_isend_irecv over ranks 0, 1, 2, called at",
    "in a thread": "torch.distributed.barrier over ranks 0, 1, 2, called at",
}


@pytest.mark.parametrize("call", GIVES)
def test_what_the_live_members_get(said, call):
    found, _ = said
    assert [found[rank][call] for rank in (0, 1)] == [GIVES[call]] * 2
    assert [found[rank]["sum in a group of one"] for rank in (0, 1)] == [1.0, 2.0]
    assert [found[rank]["a batch of two"] for rank in (0, 1)] == [2.0, 1.0]


def test_sums_are_scaled_to_the_groups_size_where_the_job_says_so(said):
    """Two of three give 1 and 2, and 3 and 4 tokens: 10.5 for three, which is rounded up."""
    found, _ = said
    for rank in (0, 1):
        value = rank + 1.0
        assert found[rank]["scaled"] == [4.5, 11, value * RANKS / 11, 1.5, 2.0, value, 4.5 if rank == 0 else value]


@pytest.mark.parametrize(
    "dtype, found",
    [
        (torch.int64, [-3, 0, 1, 9, 4 * 2**60]),
        (torch.float32, [-8 / 3, 0.0, 4 / 3, 28 / 3, 4 * 2**60]),
        (torch.bool, [True, False, True, True, True]),
    ],
)
def test_a_scaled_sum_is_rounded_once(dtype, found):
    """By 4/3; whole numbers to the nearest, halves up, however large."""
    total = torch.tensor([-2, 0, 1, 7, 3 * 2**60]).to(dtype)
    scale_sum(total, 3, 4)
    assert total.dtype == dtype and total.tolist() == torch.tensor(found).to(dtype).tolist()
    halves = torch.tensor([1, 3, -1])
    scale_sum(halves, 2, 3)
    assert halves.tolist() == [2, 5, -1]


def test_a_reduction_changes_its_destination_only(said):
    found, _ = said
    assert (found[0]["reduce"], found[1]["reduce"]) == ((3.0, 1.0), (2.0, 1.5))
    assert [found[rank]["average"] for rank in (2,)] == [[2.0, 2.0, 3.0]], "while all three are alive"


@pytest.mark.parametrize("call", (*NEEDS_ALL, *REFUSED))
def test_what_can_not_be_right_is_refused(said, call):
    found, _ = said
    for rank in (0, 1):
        text = found[rank][call]
        print(text)
        if call in NEEDS_ALL:
            assert text.startswith(f"torch.distributed.{call} over ranks 0, 1, 2, called at ") and HERE in text
            assert f"needs every member, and {DIED}" in text
        else:
            assert text.startswith(REFUSED[call])
        assert len(text) < 400 and "\n" not in text


def test_each_line_that_adds_up_is_said_once(said):
    """By the lowest live member, and none of the plugin's own."""
    found, notes = said
    lines = [note.details["line"] for note in notes]
    assert len(lines) == len(set(lines)) == 2, notes  # all sums of ``added``, and that of ``reduced``
    for note in notes:
        file, line = note.details["line"].rsplit(":", 1)
        assert note.rank == 0 and Path(file).name == HERE and note.details["lost"] == [2]
        called = Path(file).read_text().splitlines()[int(line) - 1].strip()
        assert called in (
            "work = dist.all_reduce(held, reduction, **named)",
            "dist.reduce(held, destination, reduction)",
        )
        assert "adds up over 2 of 3 members (rank 2 lost)" in note.text
        assert "recycle_plugin.mean(tensor, group)" in note.text and 'set recycle.group_sums to "scale"' in note.text
    for rank in (0, 1):
        assert "adds up over 2 of 3 members" in found[rank]["raise"] and f"{HERE}:" in found[rank]["raise"]


@pytest.mark.parametrize("when", ("whole", "lost"))
@pytest.mark.parametrize("work, name", (("layer", "1F0.0@1"), ("iterator", "the data of step 1")))
def test_inside_a_program_all_of_them_are_refused_by_name(said, when, work, name):
    """Before anything is sent, on every worker; in a group of one they go on."""
    found, _ = said
    for rank in (0, 1, 2) if when == "whole" else (0, 1):
        texts = dict(found[rank][when][work])
        assert texts.pop("in a group of one") == rank + 1.0
        for called, text in texts.items():
            called = {"all_reduce, later": "all_reduce", "a mean": "all_reduce"}.get(called, called)
            assert text.startswith(f"torch.distributed.{called} over ranks 0, 1, 2, called at ")
            assert f"in {name}: " in text and HERE in text
            assert "recycle_plugin.mean(tensor, group)" in text and "\n" not in text


# --- recycle_plugin.mean without the plugin -----------------------------------------------------------


def means(script: Script) -> tuple:
    rank, alone = script.rank, [dist.new_group([one]) for one in range(2)][script.rank]
    held = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True) * (rank + 1)
    made = recycle_plugin.mean(held.t())
    large = recycle_plugin.mean(torch.tensor(60000.0, dtype=torch.float16))
    found = (
        made.tolist(),
        held.tolist()[0],
        made.requires_grad,
        large.item(),
        str(large.dtype),
        recycle_plugin.mean(torch.tensor(1.0 + rank), alone).item(),
        recycle_plugin.mean(torch.tensor([1j * rank])).tolist(),
        recycle_plugin.mean(torch.empty(0, 2)).shape,
    )
    dist.barrier()
    dist.destroy_process_group()
    return *found, recycle_plugin.mean(torch.tensor([rank, 3.0])).tolist()


def test_the_mean_in_a_job_of_torch_alone():
    """In a group of one, of a tensor that is no block of memory, in half precision, of complex numbers, of nothing; and
    where there are no groups.
    """
    for rank, found in enumerate(run_stock(means, 2)):
        size = rank + 1.0
        own = [size, 2 * size], False, 60000.0, "torch.float16", size
        assert found == ([[1.5, 4.5], [3.0, 6.0]], *own, [0.5j], (0, 2), [float(rank), 3.0])


@pytest.mark.parametrize("dtype", ("int64", "bool"))
def test_the_mean_of_whole_numbers_is_refused(dtype):
    with pytest.raises(
        TypeError,
        match=rf"recycle_plugin\.mean of a tensor of torch\.{dtype}: whole numbers have no average of their kind; "
        r"convert it",
    ):
        recycle_plugin.mean(torch.ones(2, dtype=getattr(torch, dtype)))

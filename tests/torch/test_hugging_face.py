"""How Accelerate counts and deals after a loss, and what is refused, without a job: tests/cluster has the jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import trainer

from recycle_plugin.adapters.deepspeed.entry import Plugin
from recycle_plugin.adapters.hugging_face import entry
from recycle_plugin.adapters.hugging_face.loop import Evaluations
from recycle_plugin.adapters.hugging_face.team import Team
from recycle_plugin.errors import RecycleError
from recycle_plugin.settings.schema import Settings

REPLICA = {"enabled": True, "unit": "replica", "replicas": 2}
RANKS = 4


@pytest.mark.parametrize(
    "outside, deepspeed, loads", [(True, True, None), (True, False, "there"), (False, True, "there")]
)
def test_a_newcomers_trainer_loads_no_checkpoint(monkeypatch, outside, deepspeed, loads):
    """Others may delete what its script has found, or be writing it."""
    monkeypatch.setattr(trainer.Trainer, "train", lambda of, *arguments: (of, *arguments))
    Plugin(SimpleNamespace(view=SimpleNamespace(outside=outside)))._prepare_trainer(trainer)
    of = SimpleNamespace(is_deepspeed_enabled=deepspeed)
    assert trainer.Trainer.train(of, "there", "trial") == (of, loads, "trial")
    assert trainer.Trainer.train(of, resume_from_checkpoint="there") == (of, loads)


class Group:
    """A group in which every live rank gives what this one gives; ``goes``: which rank is lost in which gather."""

    def __init__(self, goes: dict[int, int]) -> None:
        self.goes, self.live, self.gathers = goes, set(range(RANKS)), 0

    def size(self) -> int:
        return RANKS

    def gather_rows(self, called: str, rows: torch.Tensor, own: torch.Tensor) -> SimpleNamespace:
        self.gathers += 1
        self.live.discard(self.goes.get(self.gathers, -1))
        for rank in self.live:
            rows[rank] = own
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def counted(monkeypatch):
    for state in (PartialState, AcceleratorState):
        monkeypatch.setattr(
            state, "_shared_state", {"num_processes": RANKS, "process_index": 2, "local_process_index": 0}
        )
    return PartialState._shared_state


def team(goes: dict[int, int], between: bool = True, rank: int = 2, alone: Any = None) -> Team:
    """Two ranks a host; ``alone``: the beginning of this one's script, if that may run by itself."""
    roster = [SimpleNamespace(rank=each, host=f"host{each // 2}") for each in range(RANKS)]
    session = SimpleNamespace(rank=rank, view=SimpleNamespace(roster=roster), hooks=SimpleNamespace(startup=alone))
    return Team(session, Group(goes), lambda: between)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (3, 0), (5, 7)])
def test_rows_are_the_live_ranks_in_their_order(counted, dtype, shape):
    given = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = team({1: 1}).rows(given)
    assert [*found] == [0, 2, 3] and all(torch.equal(row, given) for row in found.values())
    assert counted == {"num_processes": 3, "process_index": 1, "local_process_index": 0}


def test_a_rank_that_is_lost_between_two_pieces_has_no_row(counted):
    """A result of more than 1 MiB is kept for nobody, so large rows go in pieces."""
    given = torch.arange(300_000, dtype=torch.float32)
    made = team({3: 0})
    found = made.rows(given)
    assert [*found] == [1, 2, 3] and all(torch.equal(row, given) for row in found.values())
    assert made._group.gathers > RANKS


def test_the_count_stays_in_the_middle_of_a_step(counted):
    """Losses of its micro-batches are multiplied by it."""
    made = team({1: 0}, between=False)
    assert [*made.rows(torch.zeros(1))] == [1, 2, 3]
    assert counted == {"num_processes": 4, "process_index": 2, "local_process_index": 0} and made.live == (0, 1, 2, 3)


def test_the_count_stays_while_a_script_has_what_its_predecessor_had(counted):
    """Of ranks that were alive then."""
    made = team({1: 0}, alone=SimpleNamespace(alone=True))
    assert [*made.rows(torch.zeros(1))] == [1, 2, 3]
    assert counted["num_processes"] == 4 and made.live == (0, 1, 2, 3)


def test_objects_of_the_lost_are_left_out(counted):
    assert team({1: 1}).objects(["a", None]) == {0: ["a", None], 2: ["a", None], 3: ["a", None]}


def loader(rank: int, count: int, size: int) -> DataLoader:
    sampler = BatchSampler(SequentialSampler(range(count)), size, drop_last=False)
    shard = BatchSamplerShard(sampler, num_processes=RANKS, process_index=rank)
    return DataLoader(range(count), batch_sampler=shard)


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("count", [1, 7, 24, 29])
def test_an_evaluation_is_dealt_to_the_live_ranks(counted, count, between):
    """Each sample once, in front of what fills the last batches; in the middle of a step too."""
    loaders = {rank: loader(rank, count, 3) for rank in (0, 2, 3)}
    for rank, each in loaders.items():
        team({1: 1}, between, rank).deal(each)
    rounds = zip(*(map(torch.Tensor.tolist, each) for each in loaders.values()), strict=True)
    assert [one for of_round in rounds for batch in of_round for one in batch][:count] == [*range(count)]


def test_an_evaluation_of_a_trainers_in_the_middle_of_a_step_is_not_repeated_for_ever(counted):
    """The count stays until the step's end, but a rank that is lost in the step is dealt nothing."""
    from recycle_plugin.adapters.hugging_face.trainer import Seams

    made, tries = team({1: 0}, between=False), []

    def evaluate(of: Any, dataloader: Any) -> tuple[int, ...]:
        tries.append(dataloader)
        assert len(tries) == 1
        return (*made.rows(torch.zeros(1)),)

    assert Seams(made, None).evaluation_loop(evaluate, None, loader(2, 7, 3)) == (1, 2, 3)


def test_a_broadcast_in_the_middle_of_a_step_comes_from_the_lost_ranks_successor(counted):
    from recycle_plugin.adapters.hugging_face.operations import Operations

    def send(rank: int) -> int:
        if rank == 0:
            raise RecycleError("it is lost")
        return rank

    assert Operations(team({1: 0}, between=False))._from(0, send) == 1


@pytest.mark.parametrize("loss", [1.5, 0.0, float("nan")])
def test_each_step_has_a_loss_for_who_goes_through_it_again(counted, loss):
    """A step whose loss is no number is a step: where it had none, the script of a newcomer would be one step off."""
    from recycle_plugin.adapters.hugging_face.passing import Passing

    module = torch.nn.Linear(1, 1)
    engine = SimpleNamespace(device=torch.device("cpu"), module=module, between_steps=True, open_step=lambda: None)
    made = Passing(team({}), SimpleNamespace(view=SimpleNamespace(newcomer=False), rank=2), engine)
    for _ in range(3):
        made._open()
        made.backward(lambda *_: None, engine, torch.tensor(loss))
        made.step(lambda *_: None, engine)
    made._open()
    assert made._record.steps == 3 and [str(each) for each in made._record.losses] == [str(loss)] * 3


def test_what_fills_the_last_batches_of_an_evaluation_is_left_out_whoever_is_lost_in_it(counted):
    """5 of the last 12 samples are of the data: 3 of rank 0's and 2 of rank 1's."""
    real = Evaluations(team({}), lambda: False)._real
    assert [real(rank, 3, 5) for rank in range(RANKS)] == [3, 2, 0, 0]


def test_batches_that_ranks_split_cant_always_be_dealt_to_fewer(counted):
    each = loader(2, 24, 4)
    each.batch_sampler.split_batches = True
    with pytest.raises(RecycleError, match="split_batches with batches of 4, which can't be divided among the 3"):
        team({1: 1}).deal(each)


def test_who_drives_the_engine():
    assert entry.driver(["deepspeed", "accelerate", "transformers", "__main__"]) == "Hugging Face's Trainer"
    assert entry.driver(["accelerate", "__main__"]) == "Hugging Face's Accelerate"
    assert entry.driver(["accelerated", "__main__"]) is None


@pytest.mark.parametrize(
    "driver, implied", [("Hugging Face's Trainer", ("shrink", "never")), (None, ("constant", "always"))]
)
def test_what_a_section_implies(driver, implied):
    settings = Settings.from_section(entry.section(driver, REPLICA))
    assert (settings.batch, settings.rejoin) == implied


@pytest.mark.parametrize(
    "more, newcomer, line",
    [
        ({"batch": "constant"}, False, 'recycle.batch "constant" with Accelerate, which draws a fixed number'),
        ({"group_sums": "scale"}, False, 'recycle.group_sums "scale" with Accelerate, whose num_processes'),
        ({}, True, 'recycle.rejoin "never" with Accelerate: a lost replica can\'t come back while the job'),
    ],
)
def test_what_is_refused(more, newcomer, line):
    session = SimpleNamespace(view=SimpleNamespace(newcomer=newcomer))
    with pytest.raises(RecycleError) as caught:
        entry.check("Accelerate", Settings.from_section(entry.section("Accelerate", REPLICA | more)), session)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_an_evaluation_before_training_is_refused_by_its_name():
    settings = Settings.from_section(entry.section(entry.TRAINER, REPLICA))
    with pytest.raises(RecycleError, match="evaluate\\(\\) or predict\\(\\) before train\\(\\)"):
        entry.check(entry.TRAINER, settings, SimpleNamespace(view=SimpleNamespace(newcomer=False)), trains=False)


@pytest.mark.parametrize("rejoin", ["always", 3])
def test_replicas_of_a_trainer_come_back_where_that_is_asked_for(rejoin):
    settings = Settings.from_section(entry.section(entry.TRAINER, REPLICA | {"rejoin": rejoin}))
    assert (settings.batch, settings.rejoin) == ("shrink", rejoin)
    entry.check(entry.TRAINER, settings, SimpleNamespace(view=SimpleNamespace(newcomer=True)))


@pytest.mark.parametrize("name", ["batch_eval_metrics", "torch_compile", "auto_find_batch_size", "split_batches"])
def test_what_a_trainer_is_refused(name):
    from recycle_plugin.adapters.hugging_face.trainer import check

    given = SimpleNamespace(**{name: True}, accelerator_config=SimpleNamespace(split_batches=name == "split_batches"))
    with pytest.raises(RecycleError, match=f"{name}.* with recycle.replicas"):
        check(given)
    check(SimpleNamespace(accelerator_config=SimpleNamespace(split_batches=False)))


def test_the_bar_of_a_first_process_that_comes_back_begins_where_the_job_is(counted):
    """Else its rate would be of steps that others have made."""
    from transformers.trainer_callback import ProgressCallback

    from recycle_plugin.adapters.hugging_face.returns import Returns

    session = SimpleNamespace(view=SimpleNamespace(newcomer=True))
    returns = Returns(team({}), session, SimpleNamespace(device=torch.device("cpu")))
    callback, state = ProgressCallback(), SimpleNamespace(is_world_process_zero=True, max_steps=9, global_step=7)
    callback.on_train_begin(None, state, None)
    returns.began(SimpleNamespace(callbacks=[callback]), state)
    state.global_step = 8
    callback.on_step_end(None, state, None)
    assert (callback.training_bar.initial, callback.training_bar.n, callback.current_step) == (7, 8, 8)
    callback.training_bar.close()

"""Gathers of objects, and checkpoints of torch's, where a member is lost in the middle of them or before; three real
processes over Gloo.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.group import MemberGroup
from tests.support.results import DIED
from tests.support.scenario import Script, run


def lost_between(script: Script) -> Any:
    """Rank 2 has said how large its object is, and dies before it gives that."""
    dist.barrier()
    rows = MemberGroup.gather_rows

    def dies(group: MemberGroup, called: str, filled: torch.Tensor, own: torch.Tensor, *check: Any) -> Any:
        if filled.dtype == torch.uint8:
            script.die()
        return rows(group, called, filled, own, *check)

    if script.rank == 2:
        MemberGroup.gather_rows = dies
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, f"of {script.rank}" * (1 + script.rank))
    total = script.value()
    dist.all_reduce(total)
    return found, total.item()


def test_who_dies_in_the_middle_of_a_gather_has_given_nothing():
    expected = ["of 0", "of 1of 1", None], 3.0
    assert run(lost_between, 3, loses=True) == [expected, expected, DIED]


def refused_before_or_in_it(script: Script) -> Any:
    """Rank 0 hears of the root's death before its call, rank 1 in it."""
    dist.barrier()
    if script.rank == 2:
        script.die()
    if script.rank == 0:
        script.recover()
    try:
        dist.gather_object(script.rank, dst=2)
        said = ""
    except RecycleError as error:
        said = str(error).partition(": ")[2]
    total = script.value()
    dist.all_reduce(total)
    return said, total.item()


def test_who_is_refused_before_a_gather_to_the_lost_counts_it_as_who_is_in_it():
    """Else the next sum of one would meet the gather of the other."""
    expected = "it goes to rank 2, and that worker is lost", 3.0
    assert run(refused_before_or_in_it, 3, loses=True) == [expected, expected, DIED]


def wrong_places(script: Script) -> list[str]:
    """What members that do not fit together say, before anybody waits for anybody."""
    said = []
    for call in (
        lambda: dist.all_gather_object([None], script.rank),
        lambda: dist.gather_object(script.rank, [None] * 2 if script.rank else None, dst=0),
    ):
        try:
            call()
        except RecycleError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_places_that_are_too_few_are_said():
    for said in run(wrong_places, 2):
        few, whose = said
        assert few.startswith("torch.distributed.all_gather_object over ranks 0, 1, called at ")
        assert few.endswith("object_list has 1 places for 2 members (counting lost ones)")
        assert whose.endswith("rank 0, which gathers, must give object_gather_list, and no other rank")


def saved_by_the_live(script: Script) -> list[Any]:
    dist.barrier()
    if script.rank == 2:
        script.die()
    script.recover()
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    live = dist.new_group([0, 1], use_local_synchronization=True)
    checkpoint.save({"weight": torch.arange(4.0)}, checkpoint_id=folder[0], process_group=live)
    found = {"weight": torch.zeros(4)}
    checkpoint.load(found, checkpoint_id=folder[0], process_group=live)
    return found["weight"].tolist()


def test_a_checkpoint_of_torchs_by_a_group_of_the_live():
    assert run(saved_by_the_live, 3, loses=True) == [[0.0, 1.0, 2.0, 3.0]] * 2 + [DIED]


def saved_under_one_name(script: Script) -> list[str]:
    """What is said of a pipeline's optimizer, of flat groups in a list, and of what all have or one has."""
    own, all_have = script.value(4), torch.arange(4.0)
    said, folder = [], tempfile.mkdtemp()
    for state in (
        {"weight": all_have, "optimizer": {"state": {0: {"exp_avg": own}}}},
        {"groups": [all_have, own[: 1 + script.rank]]},
        {"weight": all_have, f"of {script.rank}": own, "step": 3},
    ):
        try:
            checkpoint.save(state, checkpoint_id=folder)
            said.append("")
        except RecycleError as error:
            said.append(str(error))
    return said


def test_two_ranks_values_under_one_name_are_refused_before_either_is_written():
    for pipeline, flat, fine in run(saved_under_one_name, 2):
        assert pipeline.startswith("torch.distributed.checkpoint.save, called at ")
        assert 'under the name "optimizer.state.0.exp_avg" for all, but ranks 0 and 1 have different' in pipeline
        assert 'under the name "groups.1" for all' in flat and not fine


def saved_at_once(script: Script) -> Any:
    """What is there when async_save returns, and what is said to who brings a stager."""
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    weight = torch.arange(4.0)
    future = checkpoint.async_save({"weight": weight}, checkpoint_id=folder[0])
    weight.zero_()
    found = {"weight": weight}
    checkpoint.load(found, checkpoint_id=folder[0], no_dist=True)
    try:
        checkpoint.async_save(found, checkpoint_id=folder[0], async_stager=object())
        said = ""
    except RecycleError as error:
        said = str(error).partition(": ")[2]
    return future.done(), found["weight"].tolist(), said


def test_an_asynchronous_save_is_over_when_it_returns():
    said = "leave async_stager out, since this saves before it returns"
    assert run(saved_at_once, 2) == [(True, [0.0, 1.0, 2.0, 3.0], said)] * 2

"""What a run is, as its workers ask for it and as the user sees it at the start."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import End
from recycle_plugin.core.messages.from_workers import Ready
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.typed import read
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.observability.run_history import RunHistory
from tests.support.membership import RICH, job, member, said


def over_json(record: dict) -> dict:
    return json.loads(json.dumps(record))


@pytest.mark.parametrize("given", (job(), RICH), ids=("plain", "rich"))
def test_it_survives_the_wire_and_the_log(given):
    assert read(JobSpec, over_json(asdict(given)), "job") == given
    assert decode(encode(Ready(member(1), 4, given))) == Ready(member(1), 4, given)
    run = RunHistory(({"event": "start", "job": over_json(asdict(given))},))
    assert run.shape == given.shape


@pytest.mark.parametrize(
    "change, said",
    [
        ({"stages": "2"}, "job.stages is '2', and it has to be int"),
        ({"replicas": True}, "job.replicas is True, and it has to be int"),
        ({"keep_bytes": "much"}, "job.keep_bytes is 'much', and it has to be int | None"),
        ({"ties": 3}, "job.ties is 3, and it has to be a list"),
        ({"ties": [[0], [1, "2"]]}, "job.ties[1][1] is '2', and it has to be int"),
        ({"costs": {"forward": [1]}}, "job.costs.input is missing"),
        ({"costs": {"forward": 1}}, "job.costs.forward is 1, and it has to be a list"),
        ({"policy": {"unheard_of": 1}}, "job.policy.unheard_of is unknown"),
        ({"policy": {"block": 0}}, "job.policy can't be: block is 0: it has at least 1 micro-batch"),
        ({"colour": "red"}, "job.colour is unknown"),
    ],
)
def test_what_is_wrong_is_named(change, said):
    assert str(read(JobSpec, over_json(asdict(job())) | change, "job")) == said


def test_of_an_older_file_what_has_a_default_may_be_missing():
    record = over_json(asdict(job()))
    del record["clip"], record["costs"]["tie"]
    assert read(JobSpec, record, "job") == job()
    del record["replicas"]
    assert str(read(JobSpec, record, "job")) == "job.replicas is missing"


def test_the_start_says_which_host_has_each_seat():
    membership = Membership(2)
    for rank, host in enumerate(("b", "a")):
        out = membership.receive(Ready(member(rank, host), 0, job(stages=1, costs=CostModel.uniform(1))), 0.0)
    (start,) = (event for event in out.events if event.kind == "start")
    assert start.details["seat_hosts"] == {"0.0": "b", "1.0": "a"} and start.details["hosts"] == ["a", "b"]


def test_workers_that_want_different_things_are_told_which_and_who():
    membership = Membership(3)
    wants = job(), job(clip="validate", policy=Policy(block=2)), job()
    for rank, each in enumerate(wants):
        out = membership.receive(Ready(member(rank), 4 * (rank == 2), each), 0.0)
    (end,) = said(out, End)
    assert end.reason == (
        "workers were started with different recycle settings or from different checkpoints: policy.block is 1 (ranks "
        "0, 2), 2 (rank 1); "
        "clip is sync (ranks 0, 2), validate (rank 1); the checkpoint's step is 0 (ranks 0, 1), 4 (rank 2)"
    )
    assert not membership.started and replace(wants[1], clip="sync", policy=Policy()) == wants[0]

"""Checkpoints that somebody has removed: none of them is named, and no stage waits for one."""

from __future__ import annotations

from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.messages.from_workers import Durable, Note
from tests.support.membership import said, started
from tests.support.replaying import decisions, logging, lose


def saved(*paths: str, log: bool = False):
    membership = logging() if log else started()
    for path in paths:
        membership.receive(Note(0, "checkpoint", "saved", {"path": path}), 1.0)
    return membership


def ends(membership) -> str:
    """The line with which the job ends where a stage has nobody."""
    return next(event.text for event in lose(membership, 2, 3).events if event.kind == "end")


def test_the_last_one_that_is_there_is_named():
    membership = saved("one", "two", "three")
    assert membership.checkpoints == ("one", "two", "three")
    assert membership.removed("two").events == []  # the job removes old ones itself
    (event,) = membership.removed("three").events
    assert (event.kind, event.text) == ("warning", "the checkpoint three was removed. Last checkpoint: one")
    assert ends(membership).endswith("stage 1 has no live worker left. Last checkpoint: one")


def test_where_none_is_left_it_says_so():
    membership = saved("one")
    membership.removed("one")
    assert ends(membership).endswith("No checkpoint was saved")


def test_one_that_is_saved_again_is_the_last_one():
    assert saved("one", "two", "one").checkpoints == ("two", "one")


def test_a_stage_that_is_replayed_from_a_checkpoint_that_was_removed_ends_the_job_at_once():
    membership = saved("an older one", "a folder", log=True)
    (event,) = membership.removed("a folder").events
    assert event.text == (
        "the checkpoint a folder was removed; no stage can be replayed before the next one. Last checkpoint: an older "
        "one"
    )
    out = lose(membership, 2, 3)
    (decision,) = decisions(out)
    assert decision.details["way"] == "end" and "its checkpoint a folder was removed" in decision.text
    (end,) = (event.text for event in out.events if event.kind == "end")
    assert end.endswith("stage 1 has no live worker left. Last checkpoint: an older one")


def test_the_next_one_is_one_to_replay_from():
    membership = saved("a folder", log=True)
    membership.removed("a folder")
    membership.receive(Durable(0, 2, "another"), 1.0)
    out = lose(membership, 2, 3)
    assert decisions(out)[0].details["way"] == "replay" and said(out, Generation)

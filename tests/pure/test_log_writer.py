"""A log's writer never keeps the worker waiting: where ring or disk is full it stops, says so, and begins again."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.log.disk import Disk, GrowingFile
from recycle_plugin.runtime.log.records import Gap
from recycle_plugin.runtime.log.segment import called, load
from recycle_plugin.runtime.log.writer import OVERHEAD, LogWriter, Resumed, Stopped
from tests.support.logs import (
    PATIENCE_S,
    RUN,
    News,
    RecordingDisk,
    RefusingDisk,
    StuckDisk,
    WholeReader,
    act,
    content,
    of_step,
    put,
    put_step,
    stream,
)

ME = WorkerId(1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def begun(folder: Path, disk: Disk, room: int = 1 << 20) -> tuple[Any, News, LogWriter]:
    news = News()
    return disk, news, LogWriter(folder, stream(), room, news, disk=disk)


def fill(disk: RefusingDisk, writer: LogWriter, step: int) -> None:
    disk.room = 0
    put_step(writer, step)
    assert not kept(writer)


def kept(writer: LogWriter) -> bool:
    """Whether nothing is refused, once all that was kept so far is written or refused."""
    writer.flush(PATIENCE_S)
    return not writer.refusal


def read(folder: Path, writer: LogWriter | None = None) -> WholeReader:
    if writer is not None:
        writer.close()
    reader = WholeReader(folder, RUN)
    assert not reader.verify()
    return reader


def test_who_writes_stands_back_behind_who_trains(tmp_path) -> None:
    priorities = []

    class AskingDisk(Disk):
        def create(self, path: Path) -> GrowingFile:
            priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().create(path)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    writer = LogWriter(tmp_path, stream(), 1 << 20, News(), disk=AskingDisk())
    put_step(writer, 1)
    writer.close()
    assert priorities and all(each > own for each in priorities)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


# --- the ring --------------------------------------------------------------------------------------------------


def test_a_full_ring_stops_the_log_and_nobody_waits(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, StuckDisk(), 8 * (24 + OVERHEAD))
    assert put_step(writer, 1) and put_step(writer, 2)  # five of the eight places, and commits take none
    assert put(writer, act(3))
    assert not put_step(writer, 4, micro_batches=3)
    why = f"more than {8 * (24 + OVERHEAD)} bytes wait for the disk"
    assert news == [Stopped(4, why)]
    assert not put(writer, act(4)) and not writer.commit(5, 0), "what is after the gap's beginning is not tried"
    assert news == [Stopped(4, why)]
    disk.go.set()
    reader = read(tmp_path, writer)
    assert reader.whole == (1, 2)
    assert reader.gaps == {ME: (Gap(4, None, why),)}


def test_a_step_before_the_gap_is_still_kept(tmp_path) -> None:
    """Stages are staggered: the end of step 1 comes when step 2 has begun."""
    disk, news, writer = begun(tmp_path, StuckDisk(), 3 * (24 + OVERHEAD))
    assert put(writer, act(1))
    assert not put(writer, act(2), size=3 * OVERHEAD)
    assert put_step(writer, 1, micro_batches=1)
    disk.go.set()
    reader = read(tmp_path, writer)
    assert reader.whole == (1,)
    assert [each.step for each in news] == [2]


def test_a_gap_moves_back_where_an_earlier_step_has_no_room_either(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, StuckDisk(), 2 * (24 + OVERHEAD))
    assert put(writer, act(1, 0))
    assert not put(writer, act(2), size=3 * OVERHEAD)
    assert not put(writer, act(1, 1), size=3 * OVERHEAD)
    assert not writer.commit(1, 0)
    assert [each.step for each in news] == [2, 1]
    disk.go.set()
    reader = read(tmp_path, writer)
    assert not reader.committed
    assert [gap.first for gap in reader.gaps[ME]] == [2, 1]


def test_the_ring_is_emptied_as_it_is_written(tmp_path) -> None:
    news = News()
    writer = LogWriter(tmp_path, stream(), 8 * (24 + OVERHEAD), news)
    for step in range(1, 20):
        assert put_step(writer, step)
        assert kept(writer)
    assert read(tmp_path, writer).whole == tuple(range(1, 20)) and not news


def test_a_checkpoint_begins_again_after_what_was_refused(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, StuckDisk(), 4 * (24 + OVERHEAD))
    assert put_step(writer, 1)
    assert not put_step(writer, 2)
    assert not put(writer, act(4))
    disk.go.set()
    writer.checkpointed(1)
    stopped, resumed = news.wait(2)
    assert stopped.step == 2 and resumed == Resumed(5)
    assert not put(writer, act(4, 1)), "a step of which something is lost is lost"
    assert put_step(writer, 5)
    reader = read(tmp_path, writer)
    assert reader.whole == (1, 5)
    assert reader.gaps == {ME: (Gap(2, 4, stopped.why),)}
    assert 3 not in reader.committed


def test_a_log_may_be_told_to_stop(tmp_path) -> None:
    news = News()
    writer = LogWriter(tmp_path, stream(), 1 << 20, news)
    assert put_step(writer, 1) and put(writer, act(2))
    writer.interrupted(2, "another number of micro-batches")
    writer.interrupted(3, "and so on")
    assert news == [Stopped(2, "another number of micro-batches")]
    assert not put_step(writer, 3)
    writer.checkpointed(1)
    assert news.wait(2)[1] == Resumed(4)
    assert put_step(writer, 4)
    reader = read(tmp_path, writer)
    assert reader.whole == (1, 4)
    assert reader.gaps == {ME: (Gap(2, 3, "another number of micro-batches"),)}


def test_what_is_refused_of_steps_that_are_taken_back_is_not_in_the_gap(tmp_path) -> None:
    """Step 9 was refused, and comes again behind the checkpoint of step 4 that was loaded."""
    news = News()
    writer = LogWriter(tmp_path, stream(), 1 << 20, news)
    assert put_step(writer, 4)
    writer.interrupted(5, "a checkpoint was loaded")
    assert not put_step(writer, 9)
    writer.void(4, 2)
    assert not put_step(writer, 5, valid_from=2)
    writer.checkpointed(5)
    assert news.wait(2)[1] == Resumed(6)
    assert put_step(writer, 6, valid_from=2)
    assert read(tmp_path, writer).whole == (6,)


# --- the disk --------------------------------------------------------------------------------------------------

WORDS = {errno.ENOSPC: "disk full", errno.EDQUOT: "disk quota used up", errno.EIO: "disk broken (input/output error)"}


@pytest.mark.parametrize("number", WORDS)
@pytest.mark.parametrize("room", [0, 30, 300, 700, 1_000])
def test_a_disk_that_refuses_stops_the_log(tmp_path, number, room) -> None:
    """... wherever in a record, or in the beginning of the file."""
    disk, news, writer = begun(tmp_path, RefusingDisk(room, number))
    for step in range(1, 9):
        put_step(writer, step)
    (stopped,) = news.wait(1)
    assert isinstance(stopped, Stopped) and stopped.why.startswith(f"{WORDS[number]}: {tmp_path} can't be written")
    assert not kept(writer)
    reader = WholeReader(tmp_path, RUN)
    assert reader.whole == tuple(range(1, stopped.step)) and not reader.verify()
    disk.room = 1 << 20
    writer.checkpointed(4)
    _, resumed = news.wait(2)
    assert resumed == Resumed(9)
    assert not put_step(writer, 8) and put_step(writer, 9)
    writer.flush(PATIENCE_S)
    reader = read(tmp_path)
    assert reader.gaps == {ME: (Gap(stopped.step, 8, stopped.why),)}
    assert reader.whole == tuple(step for step in (*range(1, stopped.step), 9) if step > 4 or stopped.step > 5)
    writer.checkpointed(8)
    assert kept(writer)
    writer.close()


def test_a_disk_that_is_still_full_at_the_checkpoint_stays_off(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, RefusingDisk(700))
    for step in range(1, 5):
        put_step(writer, step)
    news.wait(1)
    assert not kept(writer)
    disk.room = 0
    writer.checkpointed(0)
    assert not kept(writer)
    assert not put_step(writer, 5)
    disk.room = 1 << 20
    writer.checkpointed(2)
    assert news.wait(2)[1] == Resumed(6)
    writer.close()
    read(tmp_path)


def test_all_that_waits_behind_a_refusal_is_lost(tmp_path, monkeypatch) -> None:
    """... also what would have had room: a log has no holes.  Nothing of it stays in the ring."""
    monkeypatch.setattr("recycle_plugin.runtime.log.writer.BATCH_RECORDS", 1)
    disk, news = RefusingDisk(2_000), News()
    disk.go.clear()
    writer = LogWriter(tmp_path, stream(), 3_000 + 4 * (24 + OVERHEAD), news, disk=disk)
    assert put(writer, act(2), size=1_900)
    assert put_step(writer, 1) and put(writer, act(3))
    disk.go.set()
    assert news.wait(1)[0].step == 1
    assert not kept(writer)
    disk.room = 1 << 20
    writer.checkpointed(0)
    assert news.wait(2)[1] == Resumed(4)
    disk.go.clear()
    assert put(writer, act(4), size=1_900) and put_step(writer, 4)
    disk.go.set()
    reader = read(tmp_path, writer)
    assert reader.whole == (4,) and [(gap.first, gap.last) for gap in reader.gaps[ME]] == [(1, 3)]
    assert len(news) == 2


def test_what_is_taken_back_while_the_log_is_off_is_in_the_gap_and_said_afterwards(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, RefusingDisk())
    assert put_step(writer, 1) and put_step(writer, 2) and put_step(writer, 3) and kept(writer)
    fill(disk, writer, 4)
    writer.void(1, 6)
    assert [each.step for each in news] == [4, 2]
    assert WholeReader(tmp_path, RUN).whole == (1, 2, 3), "the disk can't be told"
    disk.room = 1 << 20
    writer.checkpointed(0)
    assert news.wait(3)[2] == Resumed(3)
    assert put_step(writer, 3, valid_from=6)
    reader = read(tmp_path, writer)
    assert reader.whole == (1, 3)
    assert [(gap.first, gap.last) for gap in reader.gaps[ME]] == [(2, 2)]


def test_a_log_that_can_not_begin_again_keeps_its_gap(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, RefusingDisk())
    assert put_step(writer, 1) and kept(writer)
    fill(disk, writer, 2)
    disk.room, disk.refuses_files = 1 << 20, True
    writer.checkpointed(0)
    assert not kept(writer)
    assert not put_step(writer, 3)
    disk.refuses_files = False
    writer.checkpointed(0)
    assert news.wait(2)[1] == Resumed(4)
    assert put_step(writer, 4)
    reader = read(tmp_path, writer)
    assert reader.whole == (1, 4) and [(gap.first, gap.last) for gap in reader.gaps[ME]] == [(2, 3)]
    assert [each.step for each in news] == [2, 4]


def test_a_checkpoint_makes_room_first(tmp_path) -> None:
    """... for the index of the segment that was full."""
    disk, news, writer = begun(tmp_path, RefusingDisk())
    assert put_step(writer, 1)
    writer.checkpointed(0)
    assert put_step(writer, 2) and kept(writer)
    disk.room = 0
    put_step(writer, 3)
    assert news.wait(1)[0].step == 3
    writer.checkpointed(1)
    assert news.wait(2)[1] == Resumed(4)
    assert read(tmp_path, writer).whole == (2,)


def test_what_waits_is_lost_where_the_disk_refuses(tmp_path) -> None:
    """The gap begins with the earliest step that waits."""
    disk, news, writer = begun(tmp_path, RefusingDisk())
    assert put_step(writer, 1) and kept(writer)
    disk.room = 0
    put_step(writer, 2)
    put_step(writer, 3)
    assert not kept(writer)
    assert news[0].step == 2
    writer.close()
    assert WholeReader(tmp_path, RUN).whole == (1,)


def test_an_index_that_finds_no_room_costs_the_next_steps_only(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, RefusingDisk())
    assert put_step(writer, 1) and kept(writer)
    disk.room = 10
    writer.checkpointed(0)
    assert kept(writer)
    assert not news, "nothing is lost yet"
    assert not put_step(writer, 2)
    assert [each.step for each in news] == [2]
    writer.close()
    reader = WholeReader(tmp_path, RUN)
    assert reader.whole == (1,) and not reader.verify()


def test_a_commit_alone_that_is_refused_is_a_gap_too(tmp_path) -> None:
    disk, news, writer = begun(tmp_path, RefusingDisk())
    assert put(writer, act(1)) and kept(writer)
    disk.room = 10
    writer.checkpointed(0)
    writer.flush(PATIENCE_S)
    assert not writer.commit(1, 0)
    assert [each.step for each in news] == [1]
    writer.close()


def test_what_a_file_refuses_as_it_is_closed_may_be_lost(tmp_path) -> None:
    """As a network's file system does, which says then what it could not write."""
    disk, news, writer = begun(tmp_path, RefusingDisk())
    assert put_step(writer, 1)
    writer.checkpointed(0)
    assert put_step(writer, 2) and kept(writer)
    disk.refuses_closing = True
    writer.checkpointed(0)
    assert not kept(writer)
    assert news[0].step == 2 and news[0].why.startswith("disk broken")
    disk.refuses_closing = False
    writer.checkpointed(0)
    assert news.wait(2)[1] == Resumed(3)
    assert put_step(writer, 3) and kept(writer)
    assert read(tmp_path).whole == (1, 3)
    fill(disk, writer, 4)
    assert news[2].step == 4, "what was doubted once is not doubted for ever"
    writer.close()


def test_what_another_run_has_left_stays_and_is_no_fault(tmp_path) -> None:
    """A run folder is used once more: this run's segments come behind the other's."""
    for run in ("run-0", RUN):
        news = News()
        writer = LogWriter(tmp_path, stream(run=run), 1 << 20, news)
        assert put_step(writer, 1) and kept(writer)
        writer.close()
        assert not news
    assert names(tmp_path) == [called(ME, 0), called(ME, 1)]
    for run in ("run-0", RUN):
        reader = WholeReader(tmp_path, run)
        assert not reader.verify() and reader.whole == (1,)


# --- segments --------------------------------------------------------------------------------------------------


def test_what_was_kept_can_be_read_once_it_is_flushed(tmp_path) -> None:
    disk, heard = RefusingDisk(), News()
    disk.go.clear()
    writer = LogWriter(tmp_path, stream(), 1 << 20, News(), disk=disk)
    assert put_step(writer, 1)
    writer.reached(lambda: heard(WholeReader(tmp_path, RUN).whole))
    assert not heard
    disk.go.set()
    writer.flush(PATIENCE_S)
    assert heard == [(1,)]
    disk.room = 0
    put_step(writer, 2)
    writer.reached(lambda: heard("never: the disk has refused"))
    writer.flush(PATIENCE_S)
    assert heard == [(1,)]
    writer.close()
    writer.reached(lambda: heard("never: it is closed"))
    assert heard == [(1,)]


def test_a_wait_has_a_deadline_and_says_for_what(tmp_path) -> None:
    disk = StuckDisk()
    writer = LogWriter(tmp_path, stream(), 1 << 20, News(), disk=disk)
    assert put(writer, act(3))
    with pytest.raises(WaitTimeout, match=f"waited 0 s for the log to be written to {tmp_path}"):
        writer.flush(0)
    with pytest.raises(WaitTimeout, match="waited 0 s for the end of the log"):
        writer.close(0)
    disk.go.set()
    writer.close(PATIENCE_S)


def test_segments_go_only_when_a_checkpoint_of_all_their_steps_is_durable(tmp_path) -> None:
    writer = LogWriter(tmp_path, stream(), 1 << 20, News(), segment_bytes=900)
    for step in range(1, 7):
        assert put_step(writer, step) and kept(writer)
    last = {each: load(tmp_path / each).last_step for each in names(tmp_path)}
    assert len(last) > 3
    writer.checkpointed(3)
    assert kept(writer)
    assert names(tmp_path) == [each for each, step in last.items() if step > 3]
    reader = read(tmp_path)
    assert reader.whole[-3:] == (4, 5, 6)
    assert put_step(writer, 7)
    writer.checkpointed(7)
    assert kept(writer)
    assert not names(tmp_path)
    writer.close()


def test_the_oldest_goes_first(tmp_path) -> None:
    """A later segment that has only steps of before stays as long as one before it: it may have what voids that."""
    writer = LogWriter(tmp_path, stream(), 1 << 20, News(), segment_bytes=1)
    assert put(writer, act(5))
    writer.void(2, 7)
    assert put(writer, act(3), valid_from=7)
    writer.checkpointed(3)
    assert kept(writer)
    assert len(names(tmp_path)) == 3
    writer.close()


def test_each_checkpoint_begins_a_segment(tmp_path) -> None:
    writer = LogWriter(tmp_path, stream(), 1 << 20, News())
    assert put_step(writer, 1)
    assert put(writer, act(2))
    writer.checkpointed(1)
    assert put(writer, act(2, 1))
    writer.close()
    assert names(tmp_path) == [called(ME, 0), called(ME, 1)]


def test_a_segment_that_is_large_enough_is_the_last_of_its_records(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("recycle_plugin.runtime.log.writer.SEGMENT_RECORDS", 3)
    writer = LogWriter(tmp_path, stream(), 1 << 20, News())
    for index in range(7):
        assert put(writer, act(1, index))
    writer.close()
    assert [len(load(tmp_path / each).entries) for each in names(tmp_path)] == [3, 3, 1]


def test_what_an_earlier_process_of_the_rank_has_left_goes_too(tmp_path) -> None:
    for each in (stream(), stream(rank=2), stream(run="run-2", incarnation=1), stream(incarnation=2)):
        writer = LogWriter(tmp_path, each, 1 << 20, News())
        assert put_step(writer, 3)
        writer.close()
    writer = LogWriter(tmp_path, stream(incarnation=4), 1 << 20, News())
    writer.checkpointed(2)
    assert kept(writer)
    assert len(names(tmp_path)) == 4
    writer.checkpointed(3)
    assert kept(writer)
    assert names(tmp_path) == [called(WorkerId(1, 1), 0), called(WorkerId(2), 0)]
    writer.close()


def test_voids_are_said_again_in_each_segment_while_they_matter(tmp_path) -> None:
    writer = LogWriter(tmp_path, stream(), 1 << 20, News())
    assert put_step(writer, 1) and kept(writer)
    writer.void(1, 2)
    writer.void(4, 3)
    writer.checkpointed(2)
    assert put_step(writer, 5, valid_from=3) and kept(writer)
    writer.void(3, 6)
    writer.checkpointed(3)
    assert put_step(writer, 6, valid_from=6)
    writer.close()
    said = [
        [(each.step, each.valid_from) for each in load(tmp_path / name).entries if each.what == "Void"]
        for name in names(tmp_path)
    ]
    assert said == [[(1, 2), (4, 3)], [(1, 2), (4, 3), (3, 6)], [(3, 6)]]


def test_a_writer_may_be_killed_at_any_byte(tmp_path) -> None:
    """... in a record, in a rotation, while segments go.  Nothing wrong is read, whole steps stay, and what is torn is
    the last file's end.
    """
    disk = RecordingDisk()
    writer = LogWriter(tmp_path / "none", stream(), 1 << 20, News(), segment_bytes=800, disk=disk)
    for step in (1, 2, 3):
        assert put_step(writer, step, micro_batches=1) and kept(writer)
    writer.void(2, 4)
    assert put_step(writer, 3, valid_from=4, micro_batches=1) and kept(writer)
    writer.checkpointed(2)
    writer.close()
    seen = set()
    for moment in sorted({*disk.moments, *range(0, disk.moments[-1], 5)}):
        folder = tmp_path / str(moment)
        disk.after(moment, folder)
        reader = WholeReader(folder, RUN)
        for step in reader.whole:
            since = reader.get(act(step)).record.valid_from
            assert reader.get(act(step)).tensors == (content(act(step), since),)
            assert {each.record for each in reader.step_records(step)} == {of_step(step, since)}
        faults = reader.verify()
        assert {fault.file.name for fault in faults} <= set(names(folder)[-1:]) and len(faults) <= 1
        seen.add((reader.whole, reader.get(act(3)).record.valid_from if 3 in reader.whole else None))
    assert [*sorted(seen, key=str)] == sorted(
        [((), None), ((1,), None), ((1, 2), None), ((1, 2, 3), 0), ((1, 2, 3), 4), ((3,), 4)], key=str
    )

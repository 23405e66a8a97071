"""What a log's reader gives is of attempts that count, and it names what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.log.reader import NotKept
from recycle_plugin.runtime.log.segment import Damaged, Segment, called, load
from recycle_plugin.runtime.log.writer import LogWriter
from tests.support.logs import RUN, News, WholeReader, act, content, of_step, put, put_step, record, stream


class Logs:
    """Writers of one folder, which are closed before it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers: list[LogWriter] = []

    def writer(self, rank: int = 1, incarnation: int = 0, **options: int) -> LogWriter:
        made = LogWriter(self.folder, stream(rank, incarnation), 1 << 20, News(), **options)
        self.writers.append(made)
        return made

    def read(self) -> WholeReader:
        for writer in self.writers:
            writer.close()
        return WholeReader(self.folder, RUN)


@pytest.fixture
def logs(tmp_path) -> Logs:
    return Logs(tmp_path)


# --- what counts -----------------------------------------------------------------------------------------------


def test_a_step_that_is_not_committed_is_not_given(logs) -> None:
    writer = logs.writer()
    assert put(writer, act(1)) and writer.keep(of_step(1))
    reader = logs.read()
    assert reader.committed == reader.whole == ()
    assert reader.step_records(1) == []
    with pytest.raises(NotKept, match="^step 1 is not committed$"):
        reader.get(act(1))


def test_a_rejected_attempt_is_not_given(logs) -> None:
    """Step 2 was computed with weights that were rejected, and again with others."""
    writer = logs.writer()
    assert put_step(writer, 1)
    assert put(writer, act(2, 0)) and put(writer, act(2, 1)) and put(writer, act(2, 2))
    assert writer.keep(of_step(2, 0, 9.0))
    writer.void(1, 4)
    assert put(writer, act(2, 0), 4) and put(writer, act(2, 1), 4) and writer.keep(of_step(2, 4))
    assert writer.commit(2, 4)
    reader = logs.read()
    assert reader.whole == (1, 2)
    assert reader.get(act(2, 1)).tensors == (content(act(2, 1), 4),)
    assert [each.record.valid_from for each in reader.step_records(2)] == [4]
    with pytest.raises(NotKept, match=r"^nobody has kept the act of stage 1, micro-batch 0\.2, step 2$"):
        reader.get(act(2, 2))


def test_of_a_rejected_step_that_is_only_applied_anew_the_data_stays(logs) -> None:
    """What was sent in step 1 was computed with good weights; what was applied is said again."""
    writer = logs.writer()
    assert put(writer, act(1)) and writer.keep(of_step(1, 0, 9.0))
    writer.void(1, 4)
    assert writer.keep(of_step(1, 4, 0.5)) and writer.commit(1, 0)
    reader = logs.read()
    assert reader.whole == (1,) and reader.get(act(1)).record.valid_from == 0
    assert [each.record.norm for each in reader.step_records(1)] == [1.5]


def test_what_was_committed_before_the_job_went_back_is_not_given(logs) -> None:
    """Steps 2 and 3 were committed, then the job went back to a checkpoint of step 1, and has committed 2 again."""
    writer = logs.writer()
    for step in (1, 2, 3):
        assert put_step(writer, step)
    writer.void(1, 5)
    assert put_step(writer, 2, 5)
    reader = logs.read()
    assert reader.whole == (1, 2)
    assert reader.get(act(2)).tensors == (content(act(2), 5),)
    assert reader.missing([act(3)]) == {act(3): "the commit of step 3 was taken back"}


def test_another_stream_may_say_what_counts(logs) -> None:
    """The worker that wrote steps 2 and 3 has died, and did not hear that the job went back."""
    gone, alive = logs.writer(1), logs.writer(2)
    for step in (1, 2, 3):
        assert put_step(gone, step)
    assert put(alive, act(2, stage=2))
    alive.void(1, 5)
    assert put(alive, act(2, stage=2), 5) and alive.keep(of_step(2, 5)) and alive.commit(2, 5)
    reader = logs.read()
    assert reader.committed == (1, 2)
    with pytest.raises(NotKept):
        reader.get(act(2))


def test_a_commit_alone_says_from_when_its_step_and_later_ones_count(logs) -> None:
    """Whoever wrote the void is gone, and so is its log."""
    gone, alive = logs.writer(1), logs.writer(2)
    for step in (1, 2, 3):
        assert put_step(gone, step)
    assert put_step(alive, 2, valid_from=5)
    reader = logs.read()
    assert reader.committed == (1, 2) and reader.counts_from(1) == 0 and reader.counts_from(3) == 5
    assert reader.get(act(2)).tensors == (content(act(2), 5),)


def test_what_a_worker_has_sent_before_it_died_counts(logs) -> None:
    """It did not live to hear of the commit, which others have."""
    gone, alive = logs.writer(1), logs.writer(2)
    assert put(gone, act(1))
    assert put_step(alive, 1, micro_batches=0)
    reader = logs.read()
    assert reader.whole == (1,) and reader.get(act(1)).tensors == (content(act(1)),)


def test_a_damaged_void_still_voids(logs) -> None:
    """... since the index says what it says."""
    writer = logs.writer()
    assert put_step(writer, 1) and put_step(writer, 2)
    writer.flush()  # else the new segment repeats the void before it
    writer.void(1, 5)
    logs.read()
    path = logs.folder / called(WorkerId(1), 0)
    (void,) = (each for each in load(path).entries if each.what == "Void")
    data = bytearray(path.read_bytes())
    data[void.offset + void.size - 1] ^= 1
    path.write_bytes(data)
    reader = logs.read()
    assert reader.committed == (1,)
    assert len(reader.verify()) == 1


@given(st.data())
def test_only_the_attempt_that_counts_is_given(tmp_path_factory, data) -> None:
    """Steps are kept, committed and taken back as they come; a model says which attempt of each step counts."""
    logs = Logs(tmp_path_factory.mktemp("log"))
    writers = [logs.writer(rank) for rank in (1, 2)]
    committed: dict[int, int] = {}
    generation, since, done = 0, {}, 0
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 3)):
            done += 1
            for writer in writers:
                assert put_step(writer, done, since.get("all", 0), 1)
            committed[done] = since.get("all", 0)
        else:
            generation += data.draw(st.integers(1, 2))
            done = data.draw(st.integers(0, done))
            since["all"] = generation
            committed = {step: of for step, of in committed.items() if step <= done}
            for writer in data.draw(st.sampled_from((writers[:1], writers[1:], writers))):
                writer.void(done, generation)
    reader = logs.read()
    assert reader.committed == reader.whole == tuple(sorted(committed))
    for step, of in committed.items():
        assert reader.get(act(step)).tensors == (content(act(step), of),)
        assert {each.record.valid_from for each in reader.step_records(step)} == {of}


# --- what is missing -------------------------------------------------------------------------------------------


def test_a_step_without_one_of_its_data_is_not_whole(logs) -> None:
    writer = logs.writer(segment_bytes=1)
    assert put_step(writer, 1) and put_step(writer, 2)
    logs.read()
    victim = next(path for path in sorted(logs.folder.iterdir()) if load(path).entries[0].datum == act(2, 1))
    victim.unlink()
    reader = logs.read()
    assert reader.committed == (1, 2) and reader.whole == (1,)
    assert reader.lacks(2) == [f"{WorkerId(1)}: 1 of 2 data"]
    assert reader.missing([act(2, 0), act(2, 1)]) == {
        act(2, 1): "nobody has kept the act of stage 1, micro-batch 0.1, step 2"
    }
    with pytest.raises(NotKept):
        reader.get(act(2, 1))


def test_a_step_without_its_record_is_not_whole(logs) -> None:
    writer = logs.writer()
    assert put(writer, act(1)) and writer.commit(1, 0)
    assert logs.read().lacks(1) == [f"{WorkerId(1)}: no record of the step"]


def test_a_datum_that_is_kept_twice_counts_once(logs) -> None:
    writer = logs.writer()
    assert put(writer, act(1)) and put_step(writer, 1, 0)
    assert logs.read().whole == (1,)


def test_a_gap_of_one_stream_is_one_of_the_step(logs) -> None:
    full, fine = logs.writer(1), logs.writer(2)
    assert put_step(fine, 1) and put_step(fine, 2)
    assert put_step(full, 1)
    assert not put(full, act(2), size=2 << 20)
    reader = logs.read()
    assert reader.committed == (1, 2) and reader.whole == (1,)
    assert reader.lacks(2) == [f"{WorkerId(1)}: steps 2 and later: more than 1048576 bytes wait for the disk"]
    (why,) = reader.missing([act(2, stage=3)]).values()
    assert why.endswith("step 2; steps 2 and later: more than 1048576 bytes wait for the disk")


def test_a_damaged_copy_is_passed_over_for_a_whole_one(logs) -> None:
    """Two workers have made the same datum; which is damaged does not matter."""
    for rank in (1, 2):
        writer = logs.writer(rank)
        assert writer.keep(record(act(1)), [content(act(1))]) and writer.keep(of_step(1)) and writer.commit(1, 0)
    logs.read()
    for rank in (2, 1):
        path = logs.folder / called(WorkerId(rank), 0)
        place = load(path).entries[0]
        data = bytearray(path.read_bytes())
        data[place.offset + place.size - 1] ^= 1
        path.write_bytes(data)
        if rank == 2:
            assert logs.read().get(act(1)).tensors == (content(act(1)),)
    with pytest.raises(Damaged, match=r"0-000000\.log, byte \d+: is damaged: CRC"):
        logs.read().get(act(1))


def test_a_damaged_record_of_a_step_is_left_out_and_named(logs) -> None:
    for rank in (1, 2):
        assert put_step(logs.writer(rank), 1)
    logs.read()
    path = logs.folder / called(WorkerId(1), 0)
    (place,) = (each for each in load(path).entries if each.what == "StepRecord")
    data = bytearray(path.read_bytes())
    data[place.offset + place.size - 1] ^= 1
    path.write_bytes(data)
    reader = logs.read()
    assert [each.stream for each in reader.step_records(1)] == [stream(2)]
    assert [(fault.file, fault.offset) for fault in reader.faults] == [(path, place.offset)]


def test_a_segment_that_goes_while_it_is_read_is_damage(logs) -> None:
    assert put_step(logs.writer(), 1)
    reader = logs.read()
    (logs.folder / called(WorkerId(1), 0)).unlink()
    with pytest.raises(Damaged, match="is missing"):
        reader.get(act(1))


def test_an_empty_folder_has_nothing(logs) -> None:
    reader = logs.read()
    assert reader.whole == () and not reader.verify()


# --- read again, while it grows --------------------------------------------------------------------------------


def shown(reader: WholeReader) -> tuple:
    steps = range(1, 20)
    return (
        reader.committed,
        reader.whole,
        reader.gaps,
        reader.faults,
        {step: reader.lacks(step) for step in steps},
        {step: {datum: reader.get(datum).record for datum in reader.data(step)} for step in steps},
        {step: reader.step_records(step) for step in steps},
        [reader.counts_from(step) for step in steps],
    )


def test_what_is_read_again_while_it_grows_is_what_one_who_comes_later_reads(logs, tmp_path) -> None:
    one, other = logs.writer(1, segment_bytes=2000), logs.writer(2, segment_bytes=2000)
    acts = (
        lambda: put_step(one, 1) and put_step(other, 1),
        lambda: put_step(one, 2),
        lambda: put(other, act(2, 0)),
        lambda: [each.void(1, 4) for each in (one, other)],
        lambda: [put(each, act(2, 0), 4) and each.keep(of_step(2, 4)) and each.commit(2, 4) for each in (one, other)],
        lambda: one.interrupted(3, "the disk is slow"),
        lambda: put_step(other, 3, 4),
        lambda: [put_step(one, 4, 4), put_step(other, 4, 4)],
        lambda: [each.checkpointed(2) for each in (one, other)],
        lambda: [put_step(one, 5, 4), put_step(other, 5, 4)],
        lambda: [put_step(one, 6, 4), put_step(other, 6, 4)],
        lambda: [each.checkpointed(6) for each in (one, other)],
        lambda: put_step(logs.writer(1, 1), 7, 4),
    )
    reader = WholeReader(tmp_path, RUN)
    for do in acts:
        do()
        for writer in logs.writers:
            writer.flush()
        reader = WholeReader(tmp_path, RUN, before=reader)
        assert shown(reader) == shown(WholeReader(tmp_path, RUN))
    assert reader.whole


def test_reading_again_costs_what_has_come_since(logs, tmp_path, monkeypatch) -> None:
    """Who replays looks once for each datum that another stage makes meanwhile."""
    writer, read, each = logs.writer(), [], Segment.each
    monkeypatch.setattr(Segment, "each", lambda self, places: each(self, [read.append(one) or one for one in places]))
    reader = None
    for step in range(1, 30):
        assert put_step(writer, step)
        writer.flush()
        reader = WholeReader(tmp_path, RUN, before=reader)
    assert reader is not None and len(reader.whole) == 29 and len(read) == 29

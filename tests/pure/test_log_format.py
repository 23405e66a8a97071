"""A log's segments: what is written is read, and whatever happens to a file is found, and is never a wrong payload."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.log.records import DatumRecord, Part, StepRecord
from recycle_plugin.runtime.log.segment import Damaged, Segment, called, ended, framed, load, payload
from recycle_plugin.runtime.log.writer import LogWriter
from tests.support.logs import RUN, News, WholeReader, act, content, of_step, put, put_step, stream

STEPS = (1, 2, 3)


def written(folder: Path, closed: bool = True, **options: int) -> LogWriter:
    writer = LogWriter(folder, stream(), 1 << 20, News(), **options)
    for step in STEPS:
        assert put_step(writer, step)
    if closed:
        writer.close()
    else:
        writer.flush()
    return writer


@pytest.fixture(scope="module")
def sealed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    written(folder)
    return folder / called(WorkerId(1), 0)


@pytest.fixture(scope="module")
def unsealed(tmp_path_factory) -> Path:
    """The segment that a killed writer leaves."""
    folder = tmp_path_factory.mktemp("unsealed")
    made = tmp_path_factory.mktemp("written")
    writer = written(made, closed=False)
    shutil.copy(made / called(WorkerId(1), 0), folder)
    writer.close()
    return folder / called(WorkerId(1), 0)


# --- what is written is read -----------------------------------------------------------------------------------


def test_all_that_was_kept_is_read(tmp_path) -> None:
    writer = LogWriter(tmp_path, stream(), 1 << 20, News())
    numbers = {
        "float32": numpy.arange(6, dtype="float32").reshape(2, 3),
        "int64": numpy.array(7),
        "uint8": numpy.zeros((0, 4), "uint8"),
    }
    parts = tuple(Part(f"part {name}", name, each.shape) for name, each in numbers.items())
    kept = DatumRecord(act(1), parts, 3)
    assert writer.keep(kept, list(numbers.values()))
    step = StepRecord(1, 3, 0.25, "float32")
    assert writer.keep(step)
    assert writer.commit(1, 0)
    writer.close()
    reader = WholeReader(tmp_path, RUN)
    assert not reader.verify() and reader.whole == (1,)
    record, tensors = reader.get(act(1))
    assert record == kept
    for part, tensor, number in zip(kept.parts, tensors, numbers.values(), strict=True):
        assert numpy.array_equal(numpy.frombuffer(tensor, part.dtype).reshape(part.shape), number)
    assert reader.step_records(1) == [(stream(), step)]


@given(
    st.floats(allow_nan=False) | st.none(),
    st.sampled_from(["", "float32", "float64"]),
    st.lists(st.binary(max_size=40), min_size=1, max_size=3),
)
def test_any_step_is_read_as_it_was_written(tmp_path_factory, norm, dtype, tensors) -> None:
    folder = tmp_path_factory.mktemp("log")
    parts = tuple(Part(str(place), "uint8", (len(each),)) for place, each in enumerate(tensors))
    made, kept = StepRecord(4, 0, norm, dtype), DatumRecord(act(4), parts, 0)
    writer = LogWriter(folder, stream(), 1 << 20, News())
    assert writer.keep(made) and writer.keep(kept, tensors) and writer.commit(4, 0)
    writer.close()
    reader = WholeReader(folder, RUN)
    assert [each.record for each in reader.step_records(4)] == [made]
    assert reader.get(act(4)) == (kept, tuple(tensors))


def test_payloads_are_not_copied() -> None:
    tensor = bytearray(64)
    (view,) = payload((Part("", "float32", (4, 4)),), [tensor])
    assert framed(of_step(1), [view], 0, 0)[1] is view
    tensor[0] = 255
    assert view[0] == 255


@pytest.mark.parametrize(
    "parts, tensors",
    [
        ((Part("", "float32", (2,)),), [b"1234567"]),
        ((Part("", "float32", (2,)),), []),
        ((), [b"1"]),
    ],
)
def test_a_payload_that_is_another_one_is_refused(parts, tensors) -> None:
    with pytest.raises(ValueError, match="are no payload of"):
        payload(parts, tensors)


def test_memory_with_gaps_is_refused() -> None:
    with pytest.raises(TypeError):
        payload((Part("", "uint8", (4,)),), [memoryview(bytearray(8))[::2]])


@pytest.mark.parametrize("dtype, shape", [("float12", (2,)), ("float32", (2, -1))])
def test_a_tensor_that_can_not_be_is_refused(dtype, shape) -> None:
    with pytest.raises(ValueError, match="is no"):
        Part("", dtype, shape)


# --- what happens to files -------------------------------------------------------------------------------------


def judge(folder: Path) -> WholeReader:
    """Reads a log of three steps to which something has happened: what it gives is right, or it gives nothing."""
    reader = WholeReader(folder, RUN)
    for step in STEPS:
        for index in (0, 1):
            datum = act(step, index)
            try:
                if datum not in reader.missing([datum]):
                    assert reader.get(datum).tensors == (content(datum),)
            except Damaged as error:
                assert error.fault in reader.verify()
        for found in reader.step_records(step):
            assert found.record == of_step(step)
    return reader


def found_out(folder: Path) -> bool:
    reader = judge(folder)
    unsealed = [each for segments in reader.segments.values() for each in segments if not each.sealed]
    return bool(reader.verify() or unsealed)


def test_a_sealed_segment_is_fine(sealed) -> None:
    assert not found_out(sealed.parent)
    assert judge(sealed.parent).whole == STEPS


def damaged(path: Path, change: Callable[[bytearray], bytearray], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / path.name).write_bytes(change(bytearray(path.read_bytes())))
    return folder


def test_every_truncation_is_found(sealed, tmp_path) -> None:
    for size in range(sealed.stat().st_size):
        assert found_out(damaged(sealed, lambda data: data[:size], tmp_path)), f"cut to {size} bytes"


def flipped(at: int, mask: int) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[at] ^= mask
        return data

    return change


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_every_flipped_byte_is_found(sealed, tmp_path, mask) -> None:
    for at in range(sealed.stat().st_size):
        folder = damaged(sealed, flipped(at, mask), tmp_path)
        assert judge(folder).verify(), f"byte {at}"


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_every_flipped_byte_of_a_segment_without_index_is_found(unsealed, tmp_path, mask) -> None:
    for at in range(unsealed.stat().st_size):
        assert judge(damaged(unsealed, flipped(at, mask), tmp_path)).verify(), f"byte {at}"


@given(st.data())
def test_whatever_happens_no_payload_is_wrong(sealed, tmp_path_factory, data) -> None:
    """Several bytes change, pieces go, come twice, or change places."""
    whole = sealed.read_bytes()
    places = st.integers(0, len(whole))
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        begin, end, to = (data.draw(places) for _ in range(3))
        match data.draw(st.sampled_from(("cut", "copy", "zero", "end"))):
            case "cut":
                del changed[begin:end]
            case "copy":
                changed[to:to] = whole[begin:end]
            case "zero":
                changed[begin:end] = bytes(max(0, min(end, len(changed)) - begin))
            case "end":
                changed += whole[begin:end]
    folder = damaged(sealed, lambda _: changed, tmp_path_factory.mktemp("log"))
    assert changed == whole or found_out(folder)


def test_what_a_killed_writer_leaves_is_read_by_scanning(unsealed, tmp_path) -> None:
    segment = load(unsealed)
    assert not segment.sealed and not segment.faults
    assert judge(unsealed.parent).whole == STEPS
    last = segment.entries[-1]
    folder = damaged(unsealed, lambda data: data[:-1], tmp_path)
    (fault,) = judge(folder).faults
    assert fault.offset == last.offset
    assert str(fault).endswith(f"truncated at byte {segment.size - 1}: expected a record up to byte {segment.size}")
    assert judge(folder).whole == STEPS[:-1]


def test_what_was_read_before_is_not_read_again(tmp_path) -> None:
    """... while the segment grows; what is asked for is checked all the same."""
    writer = written(tmp_path, closed=False)
    before = WholeReader(tmp_path, RUN)
    assert put_step(writer, 4)
    writer.flush()
    path = tmp_path / called(WorkerId(1), 0)
    place = load(path).entries[0]
    damaged(path, flipped(place.offset + place.size - 1, 1), tmp_path)
    assert WholeReader(tmp_path, RUN).faults
    again = WholeReader(tmp_path, RUN, before=before)
    assert not again.faults and again.whole == (*STEPS, 4)
    with pytest.raises(Damaged):
        again.get(act(1))
    assert put_step(writer, 5)
    writer.close()
    last = WholeReader(tmp_path, RUN, before=again)
    assert not last.faults and last.whole == (*STEPS, 4, 5)
    (sealed,) = last.segments[WorkerId(1)]
    assert WholeReader(tmp_path, RUN, before=last).segments[WorkerId(1)][0] is sealed


def test_a_torn_tail_costs_what_is_in_it(unsealed, tmp_path) -> None:
    """... at whatever byte it is torn: whole steps before it stay."""
    segment = load(unsealed)
    ends = {each.step: each.offset + each.size for each in segment.entries if each.what == "Commit"}
    for size in range(segment.entries[0].offset, segment.size):
        reader = judge(damaged(unsealed, lambda data: data[:size], tmp_path))
        assert reader.whole == tuple(step for step in STEPS if ends[step] <= size)


def test_a_record_at_another_place_or_of_another_segment_is_damaged(sealed, tmp_path) -> None:
    """Each would be whole by itself."""
    segment = load(sealed)
    one, other = segment.entries[0], segment.entries[1]
    assert one.size == other.size
    whole = sealed.read_bytes()
    piece = whole[one.offset : one.offset + one.size]

    def moved(data: bytearray) -> bytearray:
        data[other.offset : other.offset + other.size] = piece
        return data

    (fault,) = judge(damaged(sealed, moved, tmp_path)).verify()
    assert fault.offset == other.offset and "is damaged: CRC" in fault.what
    foreign = LogWriter(tmp_path / "foreign", stream(run="run-2"), 1 << 20, News())
    assert put_step(foreign, 1)
    foreign.close()
    theirs = load(tmp_path / "foreign" / sealed.name).entries[0]
    assert theirs.size == one.size
    taken = (tmp_path / "foreign" / sealed.name).read_bytes()[theirs.offset : theirs.offset + theirs.size]

    def replaced(data: bytearray) -> bytearray:
        data[one.offset : one.offset + one.size] = taken
        return data

    assert taken[-24:] == piece[-24:], "the payloads are the same, so only the seed differs"
    assert judge(damaged(sealed, replaced, tmp_path / "again")).verify()


def only(path: Path) -> str:
    (fault,) = WholeReader(path.parent, RUN).verify()
    assert fault.file == path
    return str(fault).removeprefix(f"{path}, ")


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda data: b"", "byte 0: truncated at byte 0: expected a head of a segment"),
        (lambda data: data[:20], "byte 12: truncated at byte 20: expected a record of at least 14 bytes more"),
        (lambda data: b"PK" + data[2:], "byte 0: is no segment: begins with b'PKYLOG\\r\\n', expected b'RCYLOG\\r\\n'"),
        (lambda data: data[:11] + b"\x09" + data[12:], "byte 8: is of format version 9, expected 1"),
        (
            lambda data: data[:-1],
            "the end is damaged or truncated: expected 20 bytes that name byte ",
        ),
    ],
    ids=["empty", "in its head", "another file", "a later version", "in its end"],
)
def test_each_fault_says_what_was_expected(sealed, tmp_path, change, said) -> None:
    assert said in only(damaged(sealed, change, tmp_path) / sealed.name)


def test_records_of_another_version_are_named(sealed, tmp_path) -> None:
    def later(data: bytearray) -> bytearray:
        at = data.index(b"RP") + 2
        data[at] ^= 1
        return data

    said = only(damaged(sealed, later, tmp_path) / sealed.name)
    assert "is of version" in said and "all need the same version of the plugin" in said


def test_another_runs_segment_is_named_and_not_read(sealed) -> None:
    reader = WholeReader(sealed.parent, "run-2")
    assert [fault.what for fault in reader.verify()] == ["is of run 'run-1', expected 'run-2'"]
    assert not reader.committed and not reader.segments


def test_a_segment_by_another_name_is_refused(sealed, tmp_path) -> None:
    renamed = tmp_path / called(WorkerId(2), 0)
    shutil.copy(sealed, renamed)
    assert only(renamed) == f"byte 12: is of {sealed.name} by its head, expected {renamed.name}"


def test_missing_segments_are_named(tmp_path) -> None:
    written(tmp_path, segment_bytes=200)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) >= 5
    (tmp_path / names[2]).unlink()
    assert only(tmp_path / names[2]) == f"byte 0: is missing, expected behind {names[1]}"
    assert judge(tmp_path).whole != STEPS
    (tmp_path / names[1]).unlink()
    missing = f"byte 0: is missing (and so are all up to {names[2]}), expected behind {names[0]}"
    assert only(tmp_path / names[1]) == missing


@pytest.mark.timeout(10)  # what it costs must not go with the number
@pytest.mark.parametrize("number", ("999999999", "9" * 18, "9" * 30))
def test_a_file_whose_number_is_far_from_the_others_costs_no_more(tmp_path, number) -> None:
    written(tmp_path, segment_bytes=200)
    following = tmp_path / called(WorkerId(1), len([*tmp_path.iterdir()]))
    stray = tmp_path / f"1.0-{number}.log"
    stray.write_bytes(b"something else")
    reader = judge(tmp_path)
    assert reader.whole == STEPS
    assert {fault.file for fault in reader.faults} <= {stray, following}


@pytest.mark.timeout(10)
def test_a_pipe_in_the_place_of_a_segment_keeps_nobody_waiting(tmp_path) -> None:
    pipe = tmp_path / called(WorkerId(1), 0)
    os.mkfifo(pipe)
    assert only(pipe) == "byte 0: is no file"


def test_a_segment_without_index_before_others_is_named(tmp_path) -> None:
    written(tmp_path, segment_bytes=200)
    first = tmp_path / called(WorkerId(1), 0)
    segment: Segment = load(first)
    end = segment.entries[-1].offset + segment.entries[-1].size
    first.write_bytes(first.read_bytes()[:end])
    assert only(first) == f"byte {end}: has no index, expected one, since a later segment is there"


def test_an_index_with_a_hole_is_none(sealed, tmp_path) -> None:
    """... though its CRC is right."""
    segment = load(sealed)
    end = segment.entries[-1].offset + segment.entries[-1].size
    (tmp_path / sealed.name).write_bytes(
        sealed.read_bytes()[:end] + b"".join(ended(segment.entries[:3] + segment.entries[4:], end, segment.seed))
    )
    reader = judge(tmp_path)
    assert "the end is damaged" in str(reader.verify()[0])
    assert reader.whole == STEPS


def test_an_index_that_names_something_else_is_found(tmp_path) -> None:
    """What the index says is compared with what is there."""
    written(tmp_path)
    segment = load(tmp_path / called(WorkerId(1), 0))
    place = segment.entries[0]
    with pytest.raises(Damaged, match="is not what the index says: DatumRecord of step 9"):
        segment.read(place._replace(step=9))


def test_a_writer_that_is_closed_takes_nothing(tmp_path) -> None:
    writer = written(tmp_path)
    with pytest.raises(RuntimeError, match="closed"):
        put(writer, act(4))

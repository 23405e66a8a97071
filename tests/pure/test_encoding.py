"""Messages as bytes: what is read is what was written, and whatever else comes is a value that says what is wrong with
it.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, replace
from enum import Enum
from math import inf, nan
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recycle_plugin.core.messages import encoding
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.encoding import (
    CONTROL,
    HEAD,
    LARGE,
    LARGEST,
    LIMIT,
    LONG,
    MAGIC,
    MOST,
    Frames,
    decode,
    encode,
)
from recycle_plugin.core.messages.from_coordinator import Committed, Generation, Lease, Over, Pace, Resume
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Heartbeat,
    Note,
    Ready,
    Stepped,
    SupervisorHeartbeat,
    SurvivorReport,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.protocol import MESSAGES
from recycle_plugin.core.messages.typed import DEEPEST, Finite, Unreadable, form_of, names_of, read, values
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.roster import FailureDomain, Member
from recycle_plugin.core.vocabulary.topology import Topology
from tests.support.membership import RICH, job, member

VERSION = CONTROL.version
texts = st.text(st.characters(codec=None), max_size=8)  # lone surrogates too, which paths and errors may have in them
numbers = st.one_of(st.floats(), st.integers())
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)
SIMPLE = {
    int: st.integers(),
    float: numbers,
    Finite: st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers()),
    str: texts,
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    Any: plain,
    JobSpec: st.sampled_from((job(), RICH)),
    # its constructor refuses most others: only some have a micro-batch, and only some a peer
    Instruction: st.sampled_from([*map(Instruction.parse, ("1F0.2@7", "2REDUCE@3", "0SA1.1>1.1", "1W0.0@-1"))]),
}


def of(hint: Any) -> st.SearchStrategy:
    """Values of an annotation, in another way than core.messages.typed reads them."""
    if hint in SIMPLE:
        return SIMPLE[hint]
    if get_origin(hint) is dict:
        return st.dictionaries(texts, of(get_args(hint)[1]), max_size=3)
    if get_origin(hint) is tuple:
        first, *others = get_args(hint)
        return st.lists(of(first), max_size=3).map(tuple) if others == [...] else st.tuples(*map(of, (first, *others)))
    if get_args(hint):
        return st.one_of(*map(of, get_args(hint)))
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    return st.builds(
        hint,
        **{
            name: of(each) for name, each in get_type_hints(hint, include_extras=True).items() if name in names_of(hint)
        },
    )


messages = st.sampled_from(MESSAGES).flatmap(of)


def framed(body: bytes) -> bytes:
    return HEAD.pack(MAGIC, VERSION, len(body)) + body


def check(frame: bytes) -> None:
    found = decode(frame)
    if not isinstance(found, Unreadable):
        assert type(found) in MESSAGES
        assert encode(decode(encode(found))) == encode(found)
    else:
        assert str(found).startswith(f"{found.what} ") and found.why


# --- there and back --------------------------------------------------------------------------------


@given(messages)
@example(Ready(member(1), 4, RICH))
@example(Generation(3, (member(0), member(3)), 7, "loss of 1.0", 1.5, ((Seat(1, 0), 150),)))
@example(Resume(1, 0, {"0.0": {"act 0@1": "0.0:1", "params 0@1": ""}}, inf, True))
def test_what_is_read_is_what_was_written(message):
    found = decode(encode(message))
    # a repr tells tuples from lists, and one NaN is like another
    assert type(found) is type(message) and repr(found) == repr(message)


def test_every_kind_of_message_has_a_number_and_a_form():
    assert len(set(MESSAGES)) == len(MESSAGES)
    assert all(form_of(kind).text.startswith(f"{kind.__name__}(") for kind in MESSAGES)


@pytest.mark.parametrize(
    "thing",
    [
        Datum("act", 1, MicroBatch(0, 2), 17),
        Datum("params", 1, None, 3),
        Seat(1, 2),
        Instruction.parse("1SA0.2>0.2@7"),
        FailureDomain.REPLICA,
        Topology(2, 3, 4, ((0, 2),)),
    ],
    ids=str,
)
def test_what_messages_may_be_made_of(thing):
    """Named tuples, dataclasses with slots and without, enumerations."""
    found = read(type(thing), msgpack.unpackb(msgpack.packb(thing, default=encoding._other)), "it")
    assert found == thing and type(found) is type(thing)


@pytest.mark.parametrize(
    "value, said",
    [("X", "it.op is 'X', and it has to be Op('LOAD', 'RA', 'F'"), (3, "it.op is 3"), ([], "it.op is []")],
)
def test_what_is_no_member_of_an_enumeration_is_refused(value, said):
    assert str(read(Instruction, [value, 1, None, 0, None], "it")).startswith(said)


def test_the_version_says_what_messages_have_in_them():
    """... in whatever is in them too: a field more, or another type, is another version."""
    assert "job: JobSpec(replicas: int" in form_of(Ready).text
    assert "costs: CostModel(forward: tuple[int, ...]" in form_of(Ready).text
    assert (
        "members: tuple[Member(rank: int, seat: Seat(replica: int, stage: int), address: str"
        in form_of(Generation).text
    )


def test_what_cannot_be_said_is_named_where_it_is_said():
    with pytest.raises(TypeError, match="a object can't be written down"):
        encode(Note(0, "x", "y", {"z": object()}))
    with pytest.raises(ValueError, match="a Note of .* bytes is too long to be sent"):
        encode(Note(0, "x", "y" * Note.MOST))
    with pytest.raises(TypeError, match="a number of 1016 bits can't be written down"):
        encode(Note(1 << 1015, "x", "y"))


# --- what is no message -------------------------------------------------------------------------------


@given(st.binary(max_size=60))
def test_any_bytes(data):
    check(data)
    check(framed(data))


@given(messages, st.data())
def test_any_mutation_of_a_frame(message, data):
    """Of the whole frame, and of a body in a head that fits it."""
    frame = encode(message)
    for skip in (0, HEAD.size):
        part = bytearray(frame[skip:])
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(part)))
            match data.draw(st.sampled_from(("change", "cut", "insert", "end"))):
                case "change" if place < len(part):
                    part[place] = data.draw(st.integers(0, 255))
                case "cut":
                    del part[place : place + data.draw(st.integers(1, 5))]
                case "insert":
                    part[place:place] = data.draw(st.binary(max_size=5))
                case "end":
                    del part[place:]
        check(framed(bytes(part)) if skip else bytes(part))


@given(messages, st.data())
def test_a_field_of_another_type_is_named(message, data):
    """An object of msgpack's own is no value of any field."""
    record = list(values(message))
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] = msgpack.Timestamp(1)
    body = msgpack.packb(
        [MESSAGES.index(type(message)), *record], default=encoding._other, unicode_errors="surrogatepass"
    )
    found = decode(framed(body))
    assert isinstance(found, Unreadable) and found.what == f"{type(message).__name__}.{names_of(type(message))[place]}"
    assert "Timestamp" in found.why


@pytest.mark.parametrize(
    "message, said",
    [
        (Stepped("3", 0, 1), "Stepped.rank is '3', and it has to be int"),
        (Stepped(3, 0, True), "Stepped.step is True, and it has to be int"),
        (Stepped(3, 0, 1.0), "Stepped.step is 1.0, and it has to be int"),
        (SurvivorReport(0, 0, 0, "plan", {"params": 1}), "SurvivorReport.held['params'] is 1, and it has to be str"),
        (
            SurvivorReport(0, 0, 0, "plan", {b"params": "x"}),
            "SurvivorReport.held is {b'params': 'x'}, and it has to be a dict with texts for keys",
        ),
        (Lease(1, True), "Lease.for_s is True, and it has to be float"),
        (Pace(inf, inf), "Pace.every_s is inf, and it has to be a finite float"),
        (Exited(0, -9, nan), "Exited.at is nan, and it has to be a finite float"),
        (SupervisorHeartbeat(0, False, nan), "SupervisorHeartbeat.cpu_s is nan, and it has to be a finite float"),
        (
            SurvivorReport(0, 0, 0, "plan", {}, {"plan_s": -inf}),
            "SurvivorReport.timings['plan_s'] is -inf, and it has to be a finite float",
        ),
        (
            Ready(member(1), 0, replace(job(), clipping=nan)),
            "Ready.job.clipping is nan, and it has to be a finite float",
        ),
        (Committed(1, {"workers": "4"}), "Committed.figures['workers'] is '4', and it has to be float"),
        (
            Generation(1, (member(0), replace(member(1), seat=(1,))), 0, "x", 0.0),
            "Generation.members[1].seat is [1], and it has to be a list of 2",
        ),
        (
            Generation(1, (member(0), replace(member(1), seat=(1, None))), 0, "x", 0.0),
            "Generation.members[1].seat.stage is None, and it has to be int",
        ),
        (
            Generation(1, (), 0, "x", 0.0, ((Seat(0, 0), "x"),)),
            "Generation.slowness[0][1] is 'x', and it has to be int",
        ),
        (
            Ready(member(1), 0, replace(job(), keep_bytes="much")),
            "Ready.job.keep_bytes is 'much', and it has to be int | None",
        ),
        (Ready(member(1), 0, replace(job(), costs=None)), "Ready.job.costs is None, and it has to be a list of 13"),
        (Resume(1, 0, {"0.0": {"act": []}}), "Resume.held['0.0']['act'] is [], and it has to be str"),
        (
            Note(0, "x", "y", {"z": [b"x"]}),
            "Note.details['z'] is b'x', and it has to be made of numbers, texts, lists, and dicts with texts for keys",
        ),
    ],
    ids=lambda given: "" if isinstance(given, str) else type(given).__name__,
)
def test_what_is_wrong_with_a_field_is_said(message, said):
    assert str(decode(encode(message))) == said


def test_what_a_class_refuses_is_said_with_its_place():
    record = json.loads(json.dumps(asdict(Ready(member(1), 0, job()))))
    record["job"]["policy"]["block"] = 0
    assert str(read(Ready, record, "Ready")) == "Ready.job.policy can't be: block is 0: it has at least 1 micro-batch"
    body = msgpack.packb(
        [MESSAGES.index(Ready), *values(Ready(member(1), 0, job()))],
        default=lambda one: (1,) if type(one) is Member else values(one),
    )
    assert str(decode(framed(body))) == "Ready.member is [1], and it has to be a list of 6"


def test_what_is_nested_too_deeply_is_refused():
    """Also where msgpack reads it, and Python can't write it any more."""
    for depth, fine in ((DEEPEST, True), (DEEPEST + 1, False), (400, False), (1000, False), (5000, False)):
        details = b"\x81\xa1z" + b"\x91" * depth + b"\x01"  # {"z": [[…[1]…]]}
        found = decode(framed(bytes([0x96, MESSAGES.index(Note), 0]) + b"\xa1x\xa1y" + details + b"\x00"))
        assert isinstance(found, Note if fine else Unreadable), found
        for begin in (b"\x92" + bytes([MESSAGES.index(Over)]), b""):
            assert isinstance(decode(framed(begin + b"\x91" * depth + b"\x01")), Unreadable)


class Odd(NamedTuple):
    one: set


def test_an_annotation_without_a_rule_is_refused_when_it_is_looked_at():
    with pytest.raises(TypeError, match="nothing says how to read"):
        form_of(Odd)
    with pytest.raises(TypeError, match="nothing says which of"):
        form_of(tuple[int, ...] | dict[str, int])


# --- frames --------------------------------------------------------------------------------------


@given(st.lists(messages, max_size=4), st.data())
def test_frames_may_come_in_any_pieces(given_, data):
    stream, frames, found = b"".join(map(encode, given_)), Frames(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        frames.feed(stream[:size])
        stream = stream[size:]
        while (message := frames.take()) is not None:
            found.append(message)
    assert list(map(repr, found)) == list(map(repr, given_)) and not frames.broken_off


@pytest.mark.parametrize(
    "frame, said",
    [
        (b'{"type":"Over","code":0}\n', 'a frame begins with b\'{"type":"O\', and no message does'),
        (
            HEAD.pack(MAGIC, VERSION ^ 1, 3),
            f"a frame is of version {VERSION ^ 1:08x}, and this is {VERSION:08x}: all need the same version of the "
            "plugin",
        ),
        (
            HEAD.pack(MAGIC, VERSION, LIMIT + 1),
            f"a frame has a body of {LIMIT + 1} bytes, and at most {LIMIT} are read",
        ),
        (encode(Over(0))[:-1], "a frame ends before its message does"),
        (b"", "a frame ends before its message does"),
        (encode(Over(0)) * 2, "a frame has more bytes after its message"),
        (framed(b"\xc1"), "a body of 1 bytes is no msgpack: FormatError"),
        (framed(b"\x90"), "a body does not begin with the number of a message: None"),
        (framed(b"\x91\xcc\xff"), "a body does not begin with the number of a message: 255"),
        (framed(b"\x91" + bytes([MESSAGES.index(Over)])), "Over is [], and it has to be a list of 1"),
    ],
    ids=range(10),
)
def test_what_is_no_frame_is_said(frame, said):
    assert str(decode(frame)) == said


def test_a_head_is_enough_to_refuse_a_frame():
    """... before anything of its body is kept."""
    frames = Frames(limit=100)
    frames.feed(HEAD.pack(MAGIC, VERSION, 101))
    assert isinstance(frames.take(), Unreadable) and frames.broken_off


def test_a_list_that_says_it_is_long_makes_no_room():
    assert "no msgpack" in str(decode(framed(bytes([0xDD, 0xFF, 0xFF, 0xFF, 0xFF]) + b"\x01" * 40)))
    assert isinstance(decode(framed((bytes([0xDD, 0, 0x10, 0, 0])) * 30)), Unreadable)
    size = (MOST + 1).to_bytes(4, "big")
    for body in (b"\xdd" + size + b"\xc0" * (MOST + 1), b"\xdf" + size + b"\xa0\xc0" * (MOST + 1)):
        assert "no msgpack" in str(decode(framed(body)))


@pytest.mark.parametrize(
    "number",
    (0, -1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63) - 1, 1 << 300, -(1 << 300), (1 << 1015) - 1, -(1 << 1015) + 1),
)
def test_whole_numbers_of_any_size(number):
    assert decode(encode(Heartbeat(number, 1, 2, Activity(WAITS, "what")))).rank == number


def test_a_number_that_no_float_can_hold_and_nobody_could_print_is_refused():
    for size in (LARGEST + 1, 3000):
        number = msgpack.packb(msgpack.ExtType(LARGE, b"\x7f" * size))
        for body in (b"\x91" + number, bytes([0x92, MESSAGES.index(Over)]) + number):
            assert str(decode(framed(body))).endswith(
                f"is no msgpack: a number of {size} bytes, and at most 127 are read"
            )


def resume(members: int) -> Resume:
    """What the members of a large job hold, as their reports have it."""
    work = dict.fromkeys(("act 1@17", "grad 1@17"), " ".join(f"3.{one}" for one in range(24)))
    return Resume(4, 16, {f"{number // 48}.{number % 48}": work for number in range(members)})


@pytest.mark.parametrize("members", (1, 2000, 60_000))
def test_what_all_members_hold_is_short_on_the_wire(members):
    frame = encode(resume(members))
    assert decode(frame) == resume(members)
    assert len(frame) < HEAD.size + LONG + 40 * members < LIMIT
    assert (frame[HEAD.size : HEAD.size + 1] == encoding.PACKED) == (members > 1)


@pytest.mark.parametrize(
    "body",
    (b"x", b"x\x9c", zlib.compress(encode(Lease(1, 2.0))[HEAD.size :])[:-1], zlib.compress(b"\x91\x00") + b"more"),
    ids=("begun", "empty", "cut off", "followed by more"),
)
def test_a_packed_body_that_is_none_is_a_value(body):
    assert isinstance(decode(HEAD.pack(MAGIC, VERSION, len(body)) + body), Unreadable)


def test_a_packed_body_is_read_only_as_far_as_its_line_allows():
    """Who has not shown the secret yet can't have others unpack what is much longer than what was sent."""
    body = zlib.compress(b"\xdd" + bytes(1 << 20))
    frames = Frames(limit=1 << 12)
    frames.feed(HEAD.pack(MAGIC, VERSION, len(body)) + body)
    assert "longer than 4096 bytes" in str(frames.take())

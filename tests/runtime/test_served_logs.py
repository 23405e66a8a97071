"""A supervisor serves its host's segments, and nothing else; a worker has copies, and says which it can't have."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import SecretFile
from recycle_plugin.core.messages.from_coordinator import LogsAt
from recycle_plugin.core.messages.from_workers import LogFolder, LogsServed
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.lines.frames import Nonsense, end, exactly
from recycle_plugin.runtime.log import served
from recycle_plugin.runtime.log.served import (
    PIECE_BYTES,
    Ask,
    Listed,
    Listing,
    LogLine,
    Piece,
    Refusal,
    Want,
    token_of,
)
from recycle_plugin.runtime.processes.log_server import LogServer
from recycle_plugin.runtime.processes.served_logs import ServedLogs
from recycle_plugin.runtime.worker import log_mirror
from recycle_plugin.runtime.worker.log_mirror import Mirror
from tests.support.logs import HERE, LOOK_S, PATIENCE_S, RUN, WholeReader, act, content, put, put_step, stream, written
from tests.support.secret import SECRET, answered, called
from tests.support.secret import written as written_secret
from tests.support.waiting import together, until


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "theirs"
    made.mkdir()
    return made


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def strangers() -> list[tuple[str, str, int]]:
    return []


@pytest.fixture
def server(folder, complaints, strangers) -> Iterator[LogServer]:
    made = LogServer(
        folder, RUN, token_of(folder, RUN), HERE, SECRET, complaints.append, lambda *said: strangers.append(said)
    )
    yield made
    made.close()


@contextmanager
def line(server: LogServer) -> Iterator[LogLine]:
    made, seals = called(server.address, Port.LOGS)
    with made:
        yield LogLine(made, seals)


def asked(connection: LogLine, server: LogServer) -> dict[str, int]:
    connection.say(Ask(RUN, server.token))
    return {each.name: each.size for each in connection.hear(Listing).segments}


def assert_over(connection: LogLine) -> None:
    with pytest.raises((EOFError, ConnectionError)):
        exactly(connection.connection, 1)


# --- who serves ----------------------------------------------------------------------------------------


def test_what_is_there_of_this_run_is_listed_and_given(server, folder) -> None:
    """Also what a live worker is still writing, as far as that is on its disk."""
    writer, ended = written(folder, 1, 2), written(folder, 2, 300, segment_bytes=1 << 14)
    ended.close()
    files = {path.name: path.read_bytes() for path in folder.glob("*.log")}
    assert len(files) > 3
    with line(server) as connection:
        assert asked(connection, server) == {name: len(data) for name, data in files.items()}
        for name, data in files.items():
            connection.say(Want(name, 3, len(data)))
            assert connection.hear(Piece).size == len(data) - 3
            assert exactly(connection.connection, len(data) - 3) == data[3:]
        (name, *_), size = files, len(files["1.0-000000.log"])
        assert put_step(writer, 3)
        writer.flush(PATIENCE_S)
        assert asked(connection, server)["1.0-000000.log"] > size, "it has grown"
        connection.say(Want(name, 1 << 40, 7))
        assert connection.hear(Piece).size == 0, "it is not so long"
    writer.close()


def test_nothing_else_of_the_host_is_given(server, folder, tmp_path) -> None:
    """Neither another run's segment, nor what only has a segment's name, nor what has none."""
    for writer in (written(folder, 1, 1), written(folder, 2, 1, run="another")):
        writer.close()
    (tmp_path / "secret.log").write_text("a secret")
    (folder / "7.0-000000.log").symlink_to(tmp_path / "secret.log")
    (folder / "config.json").write_text("{}")
    names = ("2.0-000000.log", "7.0-000000.log", "config.json", "../secret.log", str(tmp_path / "secret.log"), "")
    with line(server) as connection:
        assert list(asked(connection, server)) == ["1.0-000000.log"]
    for name in names:
        with line(server) as connection:
            asked(connection, server)
            connection.say(Want(name, 0, 10))
            with pytest.raises(Nonsense, match="^it is refused: .* asks for a log that is not here$"):
                connection.hear(Piece)
            assert_over(connection)


@pytest.mark.parametrize("offset, size", [(0, PIECE_BYTES + 1), (0, 1 << 62), (0, 0), (0, -1), (-1, 10)])
def test_who_wants_too_much_gets_nothing(server, folder, offset, size) -> None:
    written(folder, 1, 1).close()
    with line(server) as connection:
        asked(connection, server)
        connection.say(Want("1.0-000000.log", offset, size))
        with pytest.raises(Nonsense, match="^it is refused: .* asks for a log that is not here$"):
            connection.hear(Piece)
        assert_over(connection)


STRANGE = {
    "another protocol's": b"GET / HTTP/1.1\r\n\r\n",
    "too long": served.LANGUAGE.encode(Ask("x" * served.LONGEST_QUESTION, "")),
    "no question": served.LANGUAGE.encode(Piece(7)),
    "another run's": served.LANGUAGE.encode(Ask("another", "")),
    "wanted before asked": served.LANGUAGE.encode(Want("1.0-000000.log", 0, 10)),
    "of other types": served.LANGUAGE.encode(Ask(RUN, "")).replace(RUN.encode(), b"\xff" * len(RUN)),
}


@pytest.mark.parametrize("said", STRANGE.values(), ids=STRANGE)
def test_the_line_of_who_asks_otherwise_ends_and_is_said_once(server, folder, complaints, said) -> None:
    written(folder, 1, 1).close()
    for _ in range(2):
        with line(server) as connection:
            connection.connection.sendall(said + connection.seals.out.of(said))
            answer = bytearray()
            with pytest.raises((EOFError, ConnectionError)):
                while True:
                    answer += exactly(connection.connection, 1)
            assert b"RCYLOG" not in answer
    until(lambda: complaints, "complaint")
    assert len(complaints) == 1 and "has sent an unreadable message: " in complaints[0]
    with line(server) as connection:
        assert asked(connection, server), "others are served all the same"


def test_who_does_not_know_the_secret_is_not_answered(server, folder, complaints, strangers) -> None:
    written(folder, 1, 1).close()
    asks = served.LANGUAGE.encode(Ask(RUN, server.token))
    for _ in range(2):
        with socket.create_connection((HERE, int(server.address.rpartition(":")[2])), PATIENCE_S) as connection:
            connection.sendall(asks)
            with pytest.raises((EOFError, ConnectionError)):
                exactly(connection, 1)
    until(lambda: strangers, "word of it")
    ((text, address),) = strangers
    assert text.startswith(f"at the logs in {folder} a caller at 127.0.0.1:") and not complaints
    assert f"it begins with {asks[:4]!r}" in text and address == HERE


def test_a_folder_that_is_not_this_hosts_is_served_by_nobody(folder, tmp_path) -> None:
    """A supervisor on another host finds another folder under the same path."""
    for place in (folder, tmp_path / "missing"):
        with pytest.raises(RecycleError, match="is not the folder here"):
            LogServer(place, RUN, "a token of another folder", HERE, SECRET, print, print)


async def test_a_folder_that_can_not_be_served_keeps_no_later_one_from_it(folder, tmp_path, capsys) -> None:
    """The next worker of the rank may have its logs elsewhere."""
    told: asyncio.Queue[object] = asyncio.Queue()
    secret = SecretFile(Path(written_secret(tmp_path / "secret")), given=True)
    logs = ServedLogs(1, RUN, secret, told.put_nowait)
    running = asyncio.create_task(logs.run())
    logs.serve(LogFolder(str(tmp_path / "nowhere"), "another", HERE))
    logs.serve(LogFolder(str(folder), token_of(folder, RUN), HERE))
    served_now = await asyncio.wait_for(told.get(), PATIENCE_S)
    assert isinstance(served_now, LogsServed) and served_now.token == token_of(folder, RUN)
    running.cancel()
    await asyncio.wait({running})
    assert f"other workers can't fetch the logs of rank 1 in {tmp_path / 'nowhere'}: " in capsys.readouterr().err


def test_all_who_see_a_folder_find_the_same_token(folder, tmp_path) -> None:
    """However many come at once; and other folders have others, and so has the same folder in another run."""
    found = together(lambda _: token_of(folder, RUN), range(16))
    assert len({*found}) == 1 and len({*found, token_of(tmp_path, RUN), token_of(folder, "2")}) == 3
    assert sorted(path.name for path in folder.iterdir()) == ["2.token", f"{RUN}.token"]


def test_it_ends_while_somebody_is_served(folder) -> None:
    written(folder, 1, 1).close()
    server = LogServer(folder, RUN, token_of(folder, RUN), HERE, SECRET, print, print)
    with line(server) as connection:
        asked(connection, server)
        server.close()
        assert_over(connection)
    assert not [
        thread for thread in threading.enumerate() if thread.name in ("recycle: logs", "recycle: a log's reader")
    ]


# --- who reads -----------------------------------------------------------------------------------------


@pytest.fixture
def mirrored(tmp_path) -> Iterator[Callable[..., Mirror]]:
    made: list[Mirror] = []

    def mirror(*at: LogsAt) -> Mirror:
        made.append(Mirror(tmp_path / "mine" / "3.mirror", RUN, at, SECRET, LOOK_S))
        return made[-1]

    yield mirror
    for each in made:
        each.close()
    assert not (tmp_path / "mine" / "3.mirror").exists(), "copies go with who has read them"


def at(server: LogServer, *ranks: int, others: tuple[str, ...] = ()) -> LogsAt:
    return LogsAt(server.token, (*others, server.address), ranks)


def copied(mirror: Mirror) -> WholeReader:
    return WholeReader(mirror.folder.parent, RUN, also=(mirror.folder,))


def test_a_mirror_has_what_is_wanted_and_what_that_grows_by(server, folder, mirrored) -> None:
    """And nothing of what a process before has left in its place."""
    writer = written(folder, 1, 2)
    written(folder, 2, 2).close()
    mirror = mirrored(at(server, 1))
    (mirror.folder / "left.log").touch()
    mirror.close()
    mirror = mirrored(at(server, 1))
    until(lambda: copied(mirror).whole == (1, 2), "copy")
    for step in (3, 4):
        assert put_step(writer, step)
        writer.flush(PATIENCE_S)
        until(lambda last=step: copied(mirror).whole == tuple(range(1, last + 1)), "growth")
    writer.close()
    until(lambda: copied(mirror).segments[stream(1).worker][0].sealed, "end")
    assert [path.name for path in mirror.folder.iterdir()] == ["1.0-000000.log"] and not mirror.faults()
    assert (mirror.folder / "1.0-000000.log").read_bytes() == (folder / "1.0-000000.log").read_bytes()


def test_a_segment_of_many_pieces_is_copied_and_one_that_was_cut_is_copied_anew(server, folder, mirrored) -> None:
    writer = written(folder, 1, 1)
    assert put(writer, act(2), size=3 * PIECE_BYTES + 17)
    writer.close()
    mirror, path = mirrored(at(server, 1)), folder / "1.0-000000.log"
    copy = mirror.folder / path.name
    until(lambda: copy.exists() and copy.read_bytes() == path.read_bytes(), "copy")
    os.truncate(path, PIECE_BYTES + 1)
    until(lambda: copy.read_bytes() == path.read_bytes(), "shorter copy")


def test_the_next_one_is_asked_where_a_supervisor_is_gone(server, folder, mirrored) -> None:
    written(folder, 1, 2).close()
    with socket.create_server((HERE, 0)) as gone:
        nobody = f"tcp://{HERE}:{gone.getsockname()[1]}"
    mirror = mirrored(at(server, 1, others=(nobody,)))
    until(lambda: copied(mirror).whole == (1, 2), "copy")
    until(lambda: not mirror.faults(), "peace")


class Odd(threading.Thread):
    """Somebody who answers each line by ``answer(connection)``, and ends it."""

    def __init__(self, answer: Callable[[LogLine], None]) -> None:
        super().__init__(daemon=True)
        self._answer, self._listener = answer, socket.create_server((HERE, 0))
        self.address = f"tcp://{HERE}:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        while True:
            try:
                with self._listener.accept()[0] as connection:
                    self._answer(LogLine(*answered(connection, Port.LOGS)))
            except (EOFError, ConnectionError):
                pass
            except OSError:
                return

    def __enter__(self) -> Odd:
        return self

    def __exit__(self, *error: object) -> None:
        end(self._listener)
        self._listener.close()
        self.join(PATIENCE_S)


def lists(connection: LogLine, *segments: Listed) -> None:
    assert connection.hear(Ask).run == RUN
    connection.say(Listing(segments))


def breaks_off(connection: LogLine) -> None:
    lists(connection, Listed("1.0-000000.log", 1000))
    wanted = connection.hear(Want)
    connection.say(Piece(wanted.size))
    connection.connection.sendall(b"x" * (wanted.size // 2))


def says_nothing(connection: LogLine) -> None:
    connection.hear(Ask)
    exactly(connection.connection, 1)


def lists_a_path(connection: LogLine) -> None:
    lists(connection, Listed("../1.0-000000.log", 10))


def says_more_than_a_piece(connection: LogLine) -> None:
    lists(connection, Listed("1.0-000000.log", 1 << 40))
    connection.hear(Want)
    connection.say(Piece(1 << 40))
    exactly(connection.connection, 1)


ODD = {
    breaks_off: "the other end is gone",
    says_nothing: "timed out",
    lists_a_path: "is no segment's name",
    lambda connection: connection.connection.sendall(b"HTTP/1.1 400 Bad Request"): "begins with b'HTTP",
    lambda connection: connection.say(Refusal("go away")): "it is refused: go away",
}


@pytest.mark.parametrize("answer, why", ODD.items(), ids=lambda each: getattr(each, "__name__", "_"))
def test_what_is_wrong_with_who_serves_is_named(mirrored, monkeypatch, answer, why) -> None:
    monkeypatch.setattr(log_mirror, "ANSWER_S", 0.2)
    with Odd(answer) as odd:
        mirror = mirrored(LogsAt("a token", (odd.address,), (1, 2)))
        until(mirror.faults, "fault")
        assert mirror.faults()[0].startswith(f"the logs of ranks 1, 2 can't be fetched from {odd.address}: ")
        assert why in mirror.faults()[0]
        assert not list(mirror.folder.parent.glob("*.log"))
        mirror.close()


def test_who_says_more_than_a_piece_is_not_believed(mirrored) -> None:
    with Odd(says_more_than_a_piece) as odd:
        mirror = mirrored(LogsAt("a token", (odd.address,), (1,)))
        until(mirror.faults, "fault")
        assert f"a piece of {1 << 40} bytes" in mirror.faults()[0]
        mirror.close()


def test_a_byte_that_changes_on_its_way_is_found(folder, mirrored) -> None:
    """By the CRC of its record: so a log on another host is what it was, or is not there."""
    written(folder, 1, 2).close()
    path = folder / "1.0-000000.log"
    data = bytearray(path.read_bytes())
    data[data.index(content(act(2)))] ^= 4

    def flipped(connection: LogLine) -> None:
        lists(connection, Listed(path.name, len(data)))
        wanted = connection.hear(Want)
        connection.say(Piece(wanted.size))
        connection.connection.sendall(data[wanted.offset : wanted.offset + wanted.size])
        exactly(connection.connection, 1)

    with Odd(flipped) as odd:
        mirror = mirrored(LogsAt("a token", (odd.address,), (1,)))
        copy = mirror.folder / path.name
        until(lambda: copy.exists() and copy.stat().st_size == len(data), "copy")
        assert [fault.what[:14] for fault in copied(mirror).verify()] == ["is damaged: CR"]
        mirror.close()

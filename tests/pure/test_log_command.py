"""``recycle log``: what is there, and whether it can be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.log.segment import called, load
from recycle_plugin.runtime.log.writer import LogWriter
from tests.support.logs import RUN, News, act, put, put_step, stream


def written(folder: Path, steps: int = 3, rank: int = 1, run: str = RUN, budget: int = 1 << 20) -> LogWriter:
    writer = LogWriter(folder, stream(rank, run=run), budget, News())
    for step in range(1, steps + 1):
        assert put_step(writer, step)
    return writer


def said(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["log", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# --- inspect ---------------------------------------------------------------------------------------------------


def test_inspect_shows_segments_gaps_and_whole_steps(tmp_path, capsys) -> None:
    writer = written(tmp_path)
    assert not put(writer, act(4), size=2 << 20)
    writer.close()
    written(tmp_path, 4, rank=2).close()
    code, out, err = said(capsys, "inspect", tmp_path)
    assert code == 0 and not err
    assert out.splitlines() == [
        "run run-1, 0.0 MB",
        "seat 0.1 (rank 1)",
        "  1.0-000000.log: steps 1 to 4, 13 records, 0.0 MB",
        "  not kept: steps 4 and later: more than 1048576 bytes wait for the disk",
        "seat 0.2 (rank 2)",
        "  2.0-000000.log: steps 1 to 4, 16 records, 0.0 MB",
        "whole: steps 1-3",
        "not whole: step 4: seat 0.1 (rank 1) has not kept steps 4 and later: "
        "more than 1048576 bytes wait for the disk",
    ]


def test_inspect_names_what_can_not_be_read(tmp_path, capsys) -> None:
    written(tmp_path).close()
    path = tmp_path / called(WorkerId(1), 0)
    flip(path, 0)
    code, out, _ = said(
        capsys,
        "inspect",
        tmp_path,
    )
    assert code == 1
    assert out.splitlines()[-2:] == [
        "whole: no step",
        f"{path}, byte 0: is no segment: begins with b'SCYLOG\\r\\n', expected b'RCYLOG\\r\\n'",
    ]


# --- verify ----------------------------------------------------------------------------------------------------


def test_verify_says_that_all_is_well(tmp_path, capsys) -> None:
    written(tmp_path).close()
    assert said(capsys, "verify", tmp_path) == (0, "12 records in 1 segments are as they were written\n", "")


def test_verify_has_a_line_for_each_fault(tmp_path, capsys) -> None:
    written(tmp_path).close()
    written(tmp_path, rank=2).close()
    one, other = (tmp_path / called(WorkerId(rank), 0) for rank in (1, 2))
    places = load(one).entries[2:4]
    for place in places:
        flip(one, place.offset + place.size - 1)
    other.write_bytes(other.read_bytes()[:-3])
    code, out, _ = said(capsys, "verify", tmp_path)
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 3
    for place in places:
        assert any(line.startswith(f"{one}, byte {place.offset}: is damaged: CRC ") for line in lines)
    assert any(line.startswith(f"{other}, byte ") and "the end is damaged or truncated" in line for line in lines)


def test_what_a_killed_writer_leaves_is_said_and_is_no_fault(tmp_path, capsys) -> None:
    writer = written(tmp_path)
    writer.flush()
    code, out, _ = said(capsys, "verify", tmp_path)
    path = tmp_path / called(WorkerId(1), 0)
    assert code == 0
    assert out.splitlines() == [
        "12 records in 1 segments are as they were written",
        f"{path} has no index: its writer was killed, or is still writing",
    ]
    writer.close()


# --- mistakes --------------------------------------------------------------------------------------------------


def test_mistakes_are_one_line(tmp_path, capsys) -> None:
    written(tmp_path / "log").close()
    log = tmp_path / "log"
    for arguments, text in (
        (("inspect", tmp_path / "no"), f"there is no folder {tmp_path / 'no'}"),
        (("verify", log, "--run", "x"), f"{log} has no log of run x: there are run-1"),
    ):
        assert said(capsys, *arguments) == (2, "", f"recycle: {text}\n")


def test_of_several_runs_one_has_to_be_named(tmp_path, capsys) -> None:
    written(tmp_path).close()
    written(tmp_path, rank=2, run="run-2").close()
    code, _, err = said(capsys, "inspect", tmp_path)
    assert (code, err) == (2, f"recycle: {tmp_path} has logs of several runs, run-1, run-2: say which one with --run\n")
    code, out, _ = said(capsys, "inspect", tmp_path, "--run", "run-2")
    assert code == 1 and "run run-2, " in out and "is of run 'run-1', expected 'run-2'" in out


@pytest.mark.parametrize("part", ["inspect", "verify"])
def test_each_part_has_help(part, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["log", part, "--help"])
    assert ended.value.code == 0
    assert f"recycle log {part} runs/train/log" in capsys.readouterr().out


def test_it_needs_no_torch() -> None:
    script = "import recycle_plugin.commands.log, sys; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_without_a_log_is_none(tmp_path, capsys, command) -> None:
    (tmp_path / "passwd").write_text("root")
    code, out, err = said(capsys, command, tmp_path)
    assert (code, out) == (2, "")
    assert err == f"recycle: {tmp_path} has no segment of a log: name the folder of recycle.log, such as RUN/log\n"

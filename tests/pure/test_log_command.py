"""``recycle log``: what is there, whether it can be read, and a step's tensors as files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from recycle_plugin.cli import main
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.log.records import DatumRecord, Part, StepRecord
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
    assert writer.durable(3)
    code, out, _ = said(capsys, "verify", tmp_path)
    path = tmp_path / called(WorkerId(1), 0)
    assert code == 0
    assert out.splitlines() == [
        "12 records in 1 segments are as they were written",
        f"{path} has no index: its writer was killed, or is still writing",
    ]
    writer.close()


# --- export ----------------------------------------------------------------------------------------------------


def test_export_writes_numpy_files_and_says_what_they_are(tmp_path, capsys) -> None:
    writer = LogWriter(tmp_path / "log", stream(), 1 << 20, News())
    numbers = numpy.arange(6, dtype="float32").reshape(2, 3)
    halves = numpy.array([1, 2, 65535], dtype="uint16")  # the bits of three bfloat16
    parts = (Part("hidden", "float32", (2, 3)), Part("", "bfloat16", (3,)))
    assert writer.keep(DatumRecord(act(7, 1), parts, 2), [numbers, halves])
    tied = numpy.array([0.5, -0.5])
    assert writer.keep(DatumRecord(Datum("tied", 1, None, 7), (Part("0", "float64", (2,)),), 2), [tied])
    assert writer.keep(StepRecord(7, 2, 1.25, "float32")) and writer.commit(7, 0)
    writer.close()
    out = tmp_path / "out"
    code, text, _ = said(capsys, "export", tmp_path / "log", 7, "--out", out)
    assert (code, text) == (0, f"2 data and 1 records of step 7 in {out}\n")
    manifest = json.loads((out / "manifest.json").read_text())
    tensors = [
        {"file": "act-1-0.1-0.npy", "name": "hidden", "dtype": "float32", "shape": [2, 3]},
        {"file": "act-1-0.1-1.npy", "name": "", "dtype": "bfloat16", "shape": [3]},
    ]
    whose = {"stage": 1, "micro_batch": "0.1", "valid_from": 2}
    assert manifest == {
        "run": RUN,
        "step": 7,
        "not_whole": [],
        "data": [
            {"kind": "act", **whose, "tensors": tensors},
            {
                "kind": "tied",
                **whose,
                "micro_batch": None,
                "tensors": [{"file": "tied-1-0.npy", "name": "0", "dtype": "float64", "shape": [2]}],
            },
        ],
        "records": [
            {
                "step": 7,
                "valid_from": 2,
                "norm": 1.25,
                "dtype": "float32",
                "rank": 1,
                "incarnation": 0,
                "seat": "0.1",
                "shard": 0,
            }
        ],
        "faults": [],
    }
    for file, expected in zip(("act-1-0.1-0", "act-1-0.1-1", "tied-1-0"), (numbers, halves, tied), strict=True):
        found = numpy.load(out / f"{file}.npy")
        assert found.dtype == expected.dtype and numpy.array_equal(found, expected)


def test_export_writes_what_can_be_read_and_names_the_rest(tmp_path, capsys) -> None:
    written(tmp_path).close()
    path = tmp_path / called(WorkerId(1), 0)
    place = load(path).entries[0]
    flip(path, place.offset + place.size - 1)
    code, text, _ = said(capsys, "export", tmp_path, 1, "--out", tmp_path / "out")
    assert code == 1
    assert text.splitlines()[1].startswith(f"{path}, byte {place.offset}: is damaged")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [each["micro_batch"] for each in manifest["data"]] == ["0.1"] and len(manifest["faults"]) == 1
    assert not (tmp_path / "out" / "act-1-0.0-0.npy").exists()


# --- mistakes --------------------------------------------------------------------------------------------------


def test_mistakes_are_one_line(tmp_path, capsys) -> None:
    written(tmp_path / "log").close()
    log, out = tmp_path / "log", tmp_path / "out"
    for arguments, text in (
        (("inspect", tmp_path / "no"), f"there is no folder {tmp_path / 'no'}"),
        (("verify", log, "--run", "x"), f"{log} has no log of run x: there are run-1"),
        (("export", log, 9, "--out", out), f"{log}: step 9 is not committed"),
        (("export", log, 1, "--out", tmp_path), f"--out {tmp_path} exists already"),
    ):
        assert said(capsys, *arguments) == (2, "", f"recycle: {text}\n")
    assert not out.exists()


def test_of_several_runs_one_has_to_be_named(tmp_path, capsys) -> None:
    written(tmp_path).close()
    written(tmp_path, rank=2, run="run-2").close()
    code, _, err = said(capsys, "inspect", tmp_path)
    assert (code, err) == (2, f"recycle: {tmp_path} has logs of several runs, run-1, run-2: say which one with --run\n")
    code, out, _ = said(capsys, "inspect", tmp_path, "--run", "run-2")
    assert code == 1 and "run run-2, " in out and "is of run 'run-1', expected 'run-2'" in out


@pytest.mark.parametrize("part", ["inspect", "verify", "export"])
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

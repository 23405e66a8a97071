"""``scripts/on_gpu``: its stages one after the other, what a call leaves for the next one, and its report."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from importlib.metadata import version

import pytest

from recycle_plugin.lab.checks.rows import Row, judged, table
from recycle_plugin.lab.gpu import on_gpu, wheels
from recycle_plugin.lab.gpu.stages import STAGES
from recycle_plugin.lab.gpu.watched import ALLOWED, Watched

PASSED, FAILED = Row("tried", True, "it went"), Row("tried", False, "it did not", "mend it")
Call = Callable[..., int]


@pytest.fixture
def tried(monkeypatch) -> dict[str, list[Row] | None]:
    """What each stage is to give, or None where it takes too long; and behind that, in ``ran``, which have run."""
    given: dict[str, list[Row] | None] = {}
    ran: list[str] = []

    def rows(self, name: str, deadline_s: float):
        ran.append(name)
        return given.get(name, [PASSED])

    monkeypatch.setattr(on_gpu.OnGpuCall, "_rows", rows)
    given["ran"] = ran
    return given


@pytest.fixture
def call(tmp_path) -> Call:
    return lambda *more: on_gpu.main(["--out", str(tmp_path), "--device", "cpu", *more])


@pytest.mark.parametrize("options", ((), ("--device", "cuda")))
def test_without_a_gpu_it_says_so_and_runs_nothing(tried, tmp_path, capsys, monkeypatch, options):
    monkeypatch.setattr(on_gpu, "kinds", lambda: ("cpu",))
    assert on_gpu.main(["--out", str(tmp_path / "out"), *options]) == on_gpu.NO_GPU == 69
    said = capsys.readouterr()
    assert "NO GPU" in said.err and "NOTHING WAS RUN" in said.err and not said.out
    assert not tried["ran"] and not (tmp_path / "out").exists()


def test_what_has_a_result_is_not_run_again(tried, call, tmp_path):
    assert call("--minutes", "1000") == 0 and tried["ran"] == list(STAGES)
    tried["ran"].clear()
    (tmp_path / "undo.json").unlink()
    assert call("--minutes", "1000") == 0 and tried["ran"] == ["undo"]


def test_a_result_of_other_sources_is_run_again(tried, call, tmp_path, monkeypatch):
    assert call("--stage", "rng", "--stage", "undo") == 0
    monkeypatch.setattr(on_gpu, "sources", lambda: "others")
    assert call("--stage", "rng") == 0 and tried["ran"] == ["rng", "undo", "rng"]
    (left,) = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert left["stage"] == "rng" and left["sources"] == "others"


def test_what_does_not_fit_is_left_for_the_next_call(tried, call, tmp_path, capsys):
    assert call("--stage", "rng", "--stage", "kills", "--minutes", "1") == on_gpu.LEFT
    assert tried["ran"] == ["rng"] and "left for the next call: kills" in capsys.readouterr().out
    assert "Left for the next call: kills." in (tmp_path / "report.md").read_text()
    assert call("--stage", "rng", "--stage", "kills") == 0 and tried["ran"] == ["rng", "kills"]


def test_correctness_comes_first_and_fits_into_four_minutes():
    first = [*STAGES][:4]
    assert {*first} == {"smoke", "precision", "kills", "sanitizer"}
    assert sum(STAGES[name].estimate_s for name in first) + on_gpu.END_S <= 240


def test_a_stage_that_is_ended_by_the_calls_end_is_begun_anew(tried, call):
    tried["kills"] = None
    assert call("--stage", "kills", "--minutes", "3") == on_gpu.LEFT
    assert call("--stage", "kills", "--minutes", "700") == 1  # its own deadline: that is a result
    assert tried["ran"] == ["kills"] * 2


def test_a_failure_is_said_and_stays(tried, call, tmp_path, capsys):
    tried["rng"] = [PASSED, FAILED]
    assert call("--stage", "rng", "--stage", "copies") == 1
    assert "FAILED: rng" in capsys.readouterr().out and tried["ran"] == ["rng", "copies"]
    report = (tmp_path / "report.md").read_text()
    assert "| FAIL | tried | it did not; mend it |" in report and "A rehearsal on a CPU" in report
    data = json.loads((tmp_path / "report.json").read_text())
    assert [each["passed"] for each in data["stages"]] == [True, False] and data["device"] == "cpu"
    assert data["sources"] == on_gpu.sources() and data["torch"] and data["date"]


@pytest.mark.parametrize(
    "options, said",
    [
        (("--minutes", "0"), "--minutes 0: write a number above 0"),
        (("--minutes", "-1"), "--minutes -1: write"),
        (("--minutes", "nan"), "--minutes nan: write"),
    ],
)
def test_bad_input_is_one_line(call, capsys, options, said):
    assert call(*options) == on_gpu.BAD
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert on_gpu.main(["--out", str(tmp_path / "file" / "out"), "--device", "cpu"]) == on_gpu.BAD
    (line,) = capsys.readouterr().err.splitlines()
    assert "Not a directory" in line


def test_a_call_that_is_interrupted_is_one_line(call, monkeypatch, capsys):
    def interrupted(self, name: str, deadline_s: float):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(on_gpu.OnGpuCall, "_rows", interrupted)
    assert call("--stage", "rng") == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("on_gpu: interrupted")


def test_a_stage_runs_in_a_process_of_its_own(call, tmp_path):
    assert call("--stage", "rng") == 0
    (result,) = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert result["rows"][0]["name"] == "keyed forwards" and result["rows"][0]["figures"]["us"] > 0


def test_a_stages_process_that_dies_is_a_row(call, tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "on_device", lambda device: {"PATH": "/usr/bin", "PYTHONHOME": "/nowhere"})
    assert call("--stage", "rng") == 1
    (row,) = json.loads((tmp_path / "rng.json").read_text())["rows"]
    assert row["passed"] is False and "its process has ended with 1" in row["text"]


def test_rows_say_what_to_do_only_where_something_is_wrong():
    good, bad = judged("a", "", "fine", "mend it", x=1), judged("b", "it | broke", "fine", "mend it")
    assert (good.passed, good.said, good.figures) == (True, "fine", {"x": 1})
    assert (bad.passed, bad.said) == (False, "it | broke; mend it")
    assert table([good, bad]) == ["pass  a  fine", "FAIL  b  it | broke; mend it"]
    assert on_gpu.markdown([bad])[-1] == "| FAIL | b | it \\| broke; mend it |"


def test_what_waits_for_the_device_is_counted_by_its_place():
    with pytest.warns(UserWarning, match="another") as others, Watched() as watched:
        waits()
        waits()
        warnings.warn("another", stacklevel=1)
    assert len(others) == 1
    assert dict(watched.found) == {f"{__file__}:waits": 2}


@pytest.mark.parametrize(
    "file, cut", (("recycle_plugin/runtime/x.py", 3), ("recycle_plugin/lab/gpu/watched_job.py", 0))
)
def test_the_watched_jobs_own_waits_are_no_waits_of_the_plugin(file, cut):
    path = f"/a/{file}"
    with Watched() as watched:
        exec(
            compile("waits = lambda: warn('called a synchronizing CUDA operation')\nwaits()", path, "exec"),
            {"warn": warnings.warn},
        )
    assert [*watched.found] == [f"{path[cut:]}:<lambda>"]


def test_places_that_may_wait_are_there():
    for place in ALLOWED:
        file, _, function = place.partition(":")
        assert f"def {function}(" in (on_gpu.CHECKOUT / file).read_text()


def waits() -> None:
    """As torch warns where a call waits for the device."""
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


# --- wheels ------------------------------------------------------------------------------------------


def test_the_wheels_are_what_torch_does_not_bring():
    names = set(wheels.needed("3.12", {}))
    assert {"deepspeed", "megatron-core", "hydra-core", "pydantic-core", "numba", "llvmlite", "setuptools"} <= names
    assert not names & {"torch", "sympy", "networkx", "recycle-plugin", "pytest"}
    assert not any(name.startswith(("nvidia", "cuda")) for name in names)


@pytest.mark.parametrize("form", ("{0:<12} {1}", "{0}=={1}"))
def test_wheels_that_the_machine_has_are_left_out(form):
    """llvmlite, numba and matplotlib are most of all bytes; with what is replaced goes all that needs it."""
    has = {"llvmlite": "0.43.0", "numba": version("numba"), "Matplotlib": "3.9.2", "pydantic": "2.1", "numpy": "1.0"}
    has |= {"pydantic_core": "2.4.0", "hydra-core": "1.0"}
    lines = ["Package      Version", "------------ -------", *(form.format(*each) for each in has.items())]
    left = set(wheels.needed("3.12", {})) - set(wheels.needed("3.12", wheels.listed("\n".join(lines))))
    assert left == {"pydantic", "pydantic-core"}
    lines = [line for line in lines if "numpy" not in line]
    left = set(wheels.needed("3.12", {})) - set(wheels.needed("3.12", wheels.listed("\n".join(lines))))
    assert left == {"llvmlite", "numba", "matplotlib", "pydantic", "pydantic-core"}


def test_what_is_no_list_of_packages_is_one_line(tmp_path, capsys):
    (tmp_path / "list").write_text("nothing\n")
    for file in ("list", "missing"):
        assert wheels.main([str(tmp_path / "out"), "--beside", str(tmp_path / file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"on_gpu --pack: --beside {tmp_path / file}: ")


def test_parts_are_small_enough_to_be_carried(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "PART", 100)
    made = {name: tmp_path / "all" / f"{name}.whl" for name in "abcd"}
    (tmp_path / "all").mkdir()
    for path, size in zip(made.values(), (90, 30, 60, 20), strict=True):
        path.write_bytes(b"x" * size)
    assert wheels.divide(list(made.values()), tmp_path / "out") == {"part-1": 90, "part-2": 90, "part-3": 20}
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.whl")}
    assert there == {"part-1/a.whl", "part-2/c.whl", "part-2/b.whl", "part-3/d.whl"}


def test_a_folder_with_parts_is_not_filled_again(tmp_path, capsys):
    (tmp_path / "part-1").mkdir()
    assert wheels.main([str(tmp_path)]) == 2 and "name an empty folder" in capsys.readouterr().err

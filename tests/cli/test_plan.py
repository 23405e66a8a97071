"""``recycle plan``: figures of the running example, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle_plugin.cli import main

EXAMPLE = "plan --pp 4 --dp 3 --micro-batches 6 --costs F=1,I=1,W=1,comm=0,step=3"
UNSPLIT = "--no-split --no-stagger"


def figures(capsys, more: str) -> dict:
    assert main([*EXAMPLE.split(), *more.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "more, span",
    [
        pytest.param(UNSPLIT, 27, id="fault-free 1F1B"),
        pytest.param(f"{UNSPLIT} --lost 1.2 --cap 1f1b", 36, id="adaptive in 1F1B's memory"),
        pytest.param(f"{UNSPLIT} --lost 1.2 --cap 2.0", 33, id="adaptive"),
        pytest.param("--no-stagger --lost 1.2 --cap 2.0", 29, id="split"),
        pytest.param("--lost 1.2 --cap 2.0", 27, id="split and staggered"),
    ],
)
def test_running_example(capsys, more: str, span: int) -> None:
    found = figures(capsys, more)
    assert (found["span"], found["period"], found["unit"]) == (span, span + 3, "ticks")
    assert found["lower_bound"] <= found["period"]
    assert found["gap"] == pytest.approx(found["period"] / found["lower_bound"] - 1, abs=1e-6)
    cap = [4, 3, 2, 1] if "1f1b" in more else [8] * 4
    assert all(held <= allowed for held, allowed in zip(found["peak_micro_batches"], cap))
    assert found["plan_ms"] > 0 and len(found["digest"]) == 16


FLAGS = "--no-gradient-accumulation-fusion --pipeline-model-parallel-size 4 --micro-batch-size 2"


@pytest.mark.parametrize(
    "more, same",
    [
        ("--megatron --workers 12 pretrain_gpt.py --global-batch-size 36", "--micro-batches 6 --tied 0+3"),
        ("--dp 3 --megatron --global-batch-size=36", "--micro-batches 6 --tied 0+3"),
        ("--dp 3 --megatron --untie-embeddings-and-output-weights", "--micro-batches 1"),
    ],
)
def test_the_flags_of_megatron_lm_are_a_shape(capsys, more: str, same: str) -> None:
    digests = []
    for words in (f"plan --lost 1.2 --json {more} {FLAGS}", f"plan --lost 1.2 --json --pp 4 --dp 3 {same}"):
        assert main(words.split()) == 0
        digests.append(json.loads(capsys.readouterr().out)["digest"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "words, why",
    [
        ("--pp 4", "--dp, --micro-batches missing: write --pp P --dp D --micro-batches M, or --megatron FLAGS"),
        (f"--megatron {FLAGS}", "--workers is missing among Megatron-LM's flags: write --workers N, or write --dp D"),
        (f"--megatron --workers 10 {FLAGS}", "--workers 10 is no multiple of --pipeline-model-parallel-size 4"),
        (f"--dp 0 --megatron {FLAGS}", "--dp 0: write at least 1"),
        (f"--pp 4 --dp 3 --megatron {FLAGS}", "--pp follows from Megatron-LM's flags: leave it out"),
        (f"--dp 3 --megatron --global-batch-size 8 {FLAGS}", "is no multiple of --micro-batch-size 2 times 3 replicas"),
        (f"--dp 3 --megatron --global-batch-size {FLAGS}", "--global-batch-size: write a whole number of at least 1"),
        (f"--dp 3 --megatron --context-parallel-size 2 {FLAGS}", "--context-parallel-size 2 is not supported"),
        ("--dp 3 --megatron --no-gradient-accumulation-fusion", "--micro-batch-size is missing among"),
    ],
)
def test_flags_of_megatron_lm_that_make_no_plan_end_in_one_line(capsys, words: str, why: str) -> None:
    assert main(["plan", *words.split()]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


def test_costs_in_parts_of_a_tick_and_by_stage(capsys) -> None:
    arguments = "plan --pp 2 --dp 1 --micro-batches 1 --costs F=0.5/1.5,I=1,W=1,comm=0.25 --json"
    assert main(arguments.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["period"] == 0.5 + 0.25 + 1.5 + 1 + 0.25 + 1 + 1


def test_stages_that_share_weights(capsys) -> None:
    """The first and the last stage do, as where a GPT's head is its embedding."""
    free, tied = figures(capsys, "--cap 2.0"), figures(capsys, "--cap 2.0 --tied 3+0")
    assert (free["period"], tied["period"], tied["lower_bound"]) == (22, 24, 24)


def test_the_grid_is_drawn(capsys) -> None:
    assert (
        main(["plan", "--pp", "2", "--dp", "2", "--micro-batches", "2", "--lost", "0.1", "--costs", "F=1,I=1,W=1"]) == 0
    )
    grid = capsys.readouterr().out.splitlines()
    assert [line.split(" |")[0].strip() for line in grid[:4]] == ["", "0.0", "1.0", "1.1"]
    assert "F0.0" in grid[3] and grid[4].startswith("period ")


def test_a_step_that_takes_far_longer_than_all_else_is_too_long_to_draw(capsys) -> None:
    assert main(["plan", "--pp", "1", "--dp", "1", "--micro-batches", "1", "--costs", "F=1,I=1,W=1,step=9999"]) == 0
    assert capsys.readouterr().out.endswith("too large to draw here: --png FILE draws it\n")


def test_the_picture_is_written(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    figures(capsys, f"--lost 1.2 --png {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "more, says",
    [
        ("--lost 1.9", "stages 0 to 3"),
        ("--lost 12", "--lost 12: '12' is no seat: write replica.stage"),
        ("--tied 3", "for instance 0+3"),
        ("--tied 0+0", "--tied 0+0: write the numbers of stages that share weights"),
        ("--tied 0+9", "--tied 0+9: there is no stage 9; --pp 4 has 0 to 3"),
        ("--lost 1.2,1.2", "twice"),
        ("--lost 0.2,1.2,2.2", "stage 2"),
        ("--lost 1.2 --no-reroute", "reroute"),
        ("--cap 0.1", "less than one micro-batch"),
        ("--cap two", "1f1b"),
        ("--cap 12GiB", "--cap 12GiB: write a multiple of --pp such as 1.5"),
        ("--cap -1", "--cap -1"),
        ("--costs F=1,I=1", "W missing"),
        ("--costs F=1,I=1,W=1,X=2", "names F, I, W"),
        ("--costs F=1,I=1,W=-1", "none negative"),
        ("--costs F=1e999999,I=1,W=1", "at most 1000000000"),
        ("--costs F=1/2/3,I=1,W=1", "3 values for 4 stages"),
        ("--costs F=0.00001,I=1,W=1", "three decimals"),
        ("--dp 0", "--dp 0: write a whole number of at least 1"),
        ("--png /no/such/folder/x.png", "No such file"),
        ("--profile /no/such/file", "No such file"),
        ("--profile two.json", "costs of 2 stages, and --pp is 4"),
    ],
)
def test_errors_are_one_line(capsys, tmp_path, monkeypatch, more: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.json").write_text(json.dumps({name: [1000, 1000] for name in ("forward", "input", "weight")}))
    arguments = ["plan", "--pp", "4", "--dp", "3", "--micro-batches", "6"] + more.split()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("recycle: ") and said.count("\n") == 1

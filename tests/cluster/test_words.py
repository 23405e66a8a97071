"""What people read of a job that ends otherwise than they meant: what was wrong, whose it was, who sent which signal."""

from __future__ import annotations

import pytest

from tests.support.jobs import PLAIN, assert_one_line

SCRIPT = PLAIN.script


@pytest.fixture
def vehicle():
    return PLAIN


def line_of(text: str) -> int:
    (number,) = (number for number, line in enumerate(open(SCRIPT), 1) if text in line)
    return number


def test_an_error_in_all_scripts_is_shown_once_and_is_the_jobs_cause(launch):
    """A layer that does not fit those before it."""
    result = launch("layer=shape").finish()
    error = f"RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x16 and 17x64) at {SCRIPT}:{line_of('.append(pipeline.step())')}"
    assert result.code == 1 and result.output.count("Traceback") == 1 and "its connection broke" not in result.output, result.output[-6000:]
    (told,) = result.of("error")
    assert told["text"] == f"the script of {named(result, told['rank'])} ended with {error}" and told["traceback"].strip() in result.output
    assert result.of("end")[0]["text"] == (
        f"the job ends: the scripts of seat 0.1 (rank 2) and seat 1.1 (rank 3) ended with {error}, and so stage 1 has no live worker left. No checkpoint was saved"
    )  # fmt: skip


def named(result, rank: int) -> str:
    return f"seat {result.seat_of(rank)} (rank {rank})"


@pytest.mark.parametrize(
    "wrong, error", (("raise", f"ValueError: two … at {SCRIPT}:{line_of('raise ValueError')}"), ("exit", "exit code 5")), ids=("an exception", "an exit code")
)
def test_an_error_in_one_script_is_the_loss_of_its_worker(launch, wrong, error):
    result = launch(f"wrong={wrong} 1.0 after 4").finish()
    (told,), (lost,) = result.of("error"), result.of("lost")
    assert told["text"] == f"the script of seat 1.0 (rank 1) ended with {error}" and ("two\nlines" in result.output) == (wrong == "raise")
    assert lost["text"] == f"seat 1.0 (rank 1): its script ended with {error}. Stage 0 has one live worker left"
    assert len(result.losses) == 20


def test_an_error_before_training_is_the_jobs_cause(launch):
    result = launch("wrong=optimizer", "optimizer=adamw").finish()
    assert result.output.count("Traceback") == 1 and result.code == 1
    (line,) = (line for line in result.output.splitlines() if "the job ends" in line)
    assert "the job ends: the script of rank " in line and line.endswith(f"{SCRIPT}:{line_of('optimizer = OPTIMIZERS')} before training started"), line

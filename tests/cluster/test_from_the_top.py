"""A worker that comes back runs its script from the top, alone, and is at the present with what its predecessor saw.

First whole jobs, in which a worker is killed and comes back.  Then newcomers under a coordinator that the test plays:
the job is a real one that waits at its end, and the newcomer a worker process that is told what that job has on record,
so that it trains nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recycle_plugin.authentication.secret import AT
from recycle_plugin.core.messages.from_coordinator import Recorded
from recycle_plugin.core.messages.from_workers import ALWAYS, Crashed, Fatal, Left, Note, Post, Ready
from recycle_plugin.runtime.collectives.startup import BOARD
from tests.support.cluster import ForkServer, Result, Run, WarmLauncher
from tests.support.coordinator import FakeCoordinator
from tests.support.from_the_top import BF16, HELD, NOTHING_ELSE, SCRIPT, STEPS
from tests.support.jobs import DEEPSPEED, PLAIN, Shape
from tests.support.launching import Launch, launching
from tests.support.secret import written

OWN = ("pid", "environment", "read", "joined", "weights", "averages")  # the last three: of members
END_S = 120.0


class Top:
    """A job of the script ``pattern`` that has come to its end, and waits there."""

    def __init__(self, launch: Callable[..., Run], folder: Path, pattern: str, **more: Any) -> None:
        self._folder, self.out = folder, folder / "first"
        job = {"pattern": pattern, "folder": str(folder), "out": str(self.out), "waits": True}
        self._job = job | NOTHING_ELSE | more
        self.run = launch(shape=Shape(), script=SCRIPT, RECYCLE_TEST_TOP=json.dumps(self._job))
        self.run.wait_for(lambda: len([*self.out.glob("rank*.json")]) == 4, "end of all scripts")

    def saw(self, rank: int, out: Path | None = None) -> dict[str, Any]:
        return json.loads(((out or self.out) / f"rank{rank}.json").read_text())

    def posted(self, rank: int) -> bytes:
        return (self._folder / f"posted{rank}").read_bytes()

    def end(self) -> None:
        (self._folder / "go").touch()
        result = self.run.finish()
        assert result.code == 0 and not result.of("lost") and not result.of("warning"), result.output[-4000:]


PATTERNS = ("readme", "epochs", "seeds", "global_steps")


def trained(launch: Launch, folder: Path, pattern: str, kill: str = "", **more: Any) -> tuple[Result, dict[int, dict]]:
    """A job of ``pattern`` from its beginning to its end, and what each rank saw; whoever was killed comes back."""
    config = {"recycle": {"faults": [kill], "check_replicas": 1} if kill else {}}
    job = {"pattern": pattern, "folder": str(folder), "out": str(folder / "out"), "waits": False}
    job |= (
        NOTHING_ELSE
        | {"steps": STEPS, "held": HELD if kill else 0, "drawn": 1234, "source": True, "config": config}
        | more
    )
    run = launch(script=SCRIPT, RECYCLE_TEST_TOP=json.dumps(job))
    if kill:
        run.hear("newcomer")
        (folder / "go").touch()
    result = run.ended_well()
    seats = [kill.split()[1]] if kill else []
    assert seats == [event["seat"] for event in result.of("lost")] == [event["seat"] for event in result.of("rejoined")]
    return result, {rank: json.loads((folder / "out" / f"rank{rank}.json").read_text()) for rank in range(4)}


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, dict]]:
    """``calm(pattern, epochs)``: what each rank sees where nobody dies."""

    @cache
    def run(pattern: str, epochs: int = 4) -> dict[int, dict]:
        folder = tmp_path_factory.mktemp(pattern)
        with launching(server, folder) as launch:
            return trained(launch, folder / "run0", pattern, epochs=epochs)[1]

    return run


def numbers(saw: dict[str, Any], what: str) -> list[float]:
    found = saw[what]
    return [each for name in sorted(found) for each in found[name]] if isinstance(found, dict) else found


@pytest.mark.some_of(3)
@pytest.mark.parametrize("kill", ("kill 1.1 before 1F1.0@5", "kill 0.0 before 0REDUCE@5"))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_script_that_comes_back_trains_on_as_if_nothing_had_been(launch, calm, tmp_path, pattern, kill):
    """The README's loop; one over epochs, with evaluations, checkpoints and an average of weights; a seed that rank 0
    has drawn, also where that one is killed; one that goes by the engine's counts.
    """
    result, saw = trained(launch, tmp_path / "run0", pattern, kill)
    (back,) = [rank for rank, each in saw.items() if each["environment"].get("RECYCLE_INCARNATION", "0") != "0"]
    assert result.seat_of(back) == kill.split()[1]
    for rank, each in calm(pattern).items():
        for what in ("losses", "evaluated", "weights", "averages"):
            assert (what in saw[rank]) == (what in each)
            assert what not in each or numbers(saw[rank], what) == pytest.approx(numbers(each, what), abs=5e-6), what
        for what in ("seed", "drawn", "counts", "names", "saved"):
            assert saw[rank].get(what) == each.get(what), what
    assert not result.of("warning"), result.of("warning")
    if pattern == "epochs":
        step, names, behind = saw[back]["joined"]
        assert HELD < step < STEPS and names == saw[back]["names"] and not behind
        assert [rank for rank, each in saw.items() if "joined" in each] == [back]
        saved = sorted(path.name for path in (tmp_path / "run0" / "out").iterdir() if path.is_dir())
        assert saved == ["begin ", *(f"epoch{number}" for number in range(4))]


@pytest.mark.parametrize("kill", ("kill 1.1 before 1F1.0@5", "kill 0.0 before 0REDUCE@5"))
def test_evaluations_and_checkpoints_after_each_step(launch, calm, tmp_path, kill):
    """So also while the newcomer follows, and while it is a member that has no work yet."""
    result, saw = trained(launch, tmp_path / "run0", "epochs", kill, epochs=STEPS)
    for rank, each in calm("epochs", STEPS).items():
        for what in ("losses", "evaluated", "weights", "averages"):
            assert numbers(saw[rank], what) == pytest.approx(numbers(each, what), abs=5e-6), (rank, what)
    saved = {path.name for path in (tmp_path / "run0" / "out").iterdir() if path.is_dir()}
    assert saved == {"begin ", *(f"epoch{number}" for number in range(STEPS))}
    assert len(result.of("checkpoint")) == STEPS + 1


@pytest.mark.parametrize("kill", ("kill 1.1 before 1F1.0@5", "kill 0.0 before 0REDUCE@5"))
def test_a_loop_that_goes_by_the_steps_number_leaves_out_those_that_are_over(launch, calm, tmp_path, kill):
    """It has the rates and numbers that it would have come to, and the others' weights."""
    _, saw = trained(launch, tmp_path / "run0", "skips", kill)
    for rank, each in calm("skips").items():
        steps = [row[0] for row in saw[rank]["counts"]]
        assert (len(steps) < STEPS) == (saw[rank]["environment"].get("RECYCLE_INCARNATION", "0") != "0")
        assert saw[rank]["losses"] == pytest.approx([each["losses"][step - 1] for step in steps], abs=5e-6)
        assert saw[rank]["counts"] == [each["counts"][step - 1] for step in steps] and steps[-1] == STEPS
        assert numbers(saw[rank], "weights") == pytest.approx(numbers(each, "weights"), abs=5e-6)


def test_who_was_to_hand_over_dies(launch, tmp_path):
    """Another peer does it, or the newcomer has entered, has nothing to go on with, says so, and comes once more; the
    others train on, and all of a stage have the same averages in the end.
    """
    folder, first_of_its_stage = tmp_path / "run0", 3
    job = {"pattern": "epochs", "folder": str(folder), "out": str(folder / "out"), "waits": False}
    job |= NOTHING_ELSE | {"steps": 4 * STEPS, "held": HELD, "drawn": 1234, "source": True}
    job |= {"dies_giving": first_of_its_stage, "config": {"recycle": {"faults": ["kill 2.1 before 1F2.0@5"]}}}
    run = launch(shape=Shape(3), script=SCRIPT, RECYCLE_TEST_TOP=json.dumps(job))
    run.hear("newcomer")
    (folder / "go").touch()
    result = run.ended_well()
    for event in result.of("warning"):
        assert "which has come back, can't take part: on_join: a peer's state= has failed" in event["text"]
    assert {event["seat"] for event in result.of("lost")} == {"2.1", "0.1"}
    saw = [json.loads(path.read_text()) for path in (folder / "out").glob("rank*.json")]
    averages = {tuple(numbers(each, "averages")) for each in saw if "averages" in each}
    assert len(averages) == 2, "one for each stage"


class Alone:
    """The newcomer of ``rank`` in the job ``top``, under a coordinator that the test plays."""

    def __init__(self, server: Any, top: Top, rank: int, folder: Path) -> None:
        self._folder, self._rank = folder, rank
        folder.mkdir()
        self.coordinator = FakeCoordinator(incarnation=1)
        self.coordinator.keep(Post(rank, ALWAYS, BOARD, top.posted(rank)))
        environment = top.saw(rank)["environment"]
        job = json.loads(environment["RECYCLE_TEST_TOP"]) | {"out": str(folder), "waits": False}
        host, port = self.coordinator.address
        more = {"RECYCLE_TEST_TOP": json.dumps(job), "RECYCLE_COORDINATOR": f"{host}:{port}"}
        more[AT] = written(folder / "secret")
        with (folder / "output.txt").open("w") as output:
            self.process = WarmLauncher(server, "recycle_plugin.worker_process", [SCRIPT], environment | more, output)
        self.coordinator.accept()

    def tell(self, recorded: Recorded) -> None:
        """Answer its question with what is over; once it is told, it need not ask again."""
        self.coordinator.hear(Ready)
        self.coordinator.tell(recorded)

    def end(self) -> int:
        """Its exit code, once all that it has said is heard."""
        code = self.process.wait(END_S)
        self.coordinator.heard_all()
        return code

    def saw(self) -> dict[str, Any]:
        code = self.end()
        output = (self._folder / "output.txt").read_text()
        assert code == 0 and "Traceback" not in output, (code, output[-4000:], self.said(Note))
        return json.loads((self._folder / f"rank{self._rank}.json").read_text())

    def said(self, kind: type) -> list[Any]:
        with self.coordinator.news:
            return [one for one in self.coordinator.heard if isinstance(one, kind)]

    def close(self) -> None:
        self.coordinator.close()
        self.process.wait(END_S)


@pytest.fixture
def closing() -> Iterator[list[Alone]]:
    started: list[Alone] = []
    yield started
    for one in started:
        one.close()


def recorded(saw: dict[str, Any], first: int = 0) -> Recorded:
    """What a coordinator would tell; one more step is committed, since behind the last one the state has to be here."""
    losses, means = saw["losses"], saw.get("evaluated", [])
    return Recorded(first + 1, tuple(losses), 1, tuple(means), first + len(losses) + 1)


def assert_as_before(newcomer: dict[str, Any], predecessor: dict[str, Any]) -> None:
    assert {name: value for name, value in newcomer.items() if name not in OWN} == {
        name: value for name, value in predecessor.items() if name not in OWN
    }
    assert newcomer["pid"] != predecessor["pid"] and len(set(newcomer["losses"])) > 3


@pytest.mark.some_of(4)
@pytest.mark.parametrize("rank", (0, 3))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_script_comes_to_the_present_with_what_its_predecessor_saw(launch, starts, tmp_path, closing, pattern, rank):
    """The README's loop; one over epochs, with evaluations and checkpoints; a seed from rank 0; the engine's counts."""
    top = Top(launch, tmp_path / "run0", pattern)
    closing.append(newcomer := Alone(starts[0], top, rank, tmp_path / "newcomer"))
    newcomer.tell(recorded(top.saw(rank)))
    found = newcomer.saw()
    assert_as_before(found, top.saw(rank))
    assert "read" not in found, "data was read for steps that are over"
    saved = sorted(path.name for path in Path(top.out).iterdir() if path.is_dir())
    assert pattern != "epochs" or saved == ["begin ", *(f"epoch{number}" for number in range(4))]
    assert [path.name for path in (tmp_path / "newcomer").iterdir() if path.is_dir()] == []
    newcomer.coordinator.hear(Left)
    assert [one.stepped for one in newcomer.said(Ready)] == [0] and len(newcomer.said(Left)) == 1
    assert not newcomer.said(Fatal) and [one.kind for one in newcomer.said(Note) if one.kind == "warning"] == []
    output = (tmp_path / "newcomer" / "output.txt").read_text()
    assert "steps: " not in output, "it reports others' steps"
    top.end()


@pytest.mark.parametrize(
    "pattern, vehicle", (("global_steps", DEEPSPEED), ("plain", PLAIN)), indirect=["vehicle"], ids=str
)
def test_a_job_that_goes_on_from_a_checkpoint_needs_its_files_no_more(launch, starts, tmp_path, closing, pattern):
    """The newcomer has the path and the client state, the counts and the rates; its state comes from its peers."""
    first = Top(launch, tmp_path / "run0", pattern)
    first.end()
    top = Top(launch, tmp_path / "run1", pattern, load=str(tmp_path / "run0" / "checkpoint"))
    shutil.rmtree(tmp_path / "run0" / "checkpoint")
    closing.append(newcomer := Alone(starts[0], top, 2, tmp_path / "newcomer"))
    predecessor = top.saw(2)
    began = predecessor["began"] if pattern == "plain" else predecessor["loaded"][2]
    assert began == {"plain": 6, "global_steps": 4}[pattern]
    newcomer.tell(recorded(predecessor, began))
    assert_as_before(newcomer.saw(), predecessor)
    assert [one.stepped for one in newcomer.said(Ready)] == [began]
    top.end()


@pytest.mark.parametrize("config, tied", ((BF16, False), ({"recycle": {"exact": True}}, True)), ids=("bf16", "tied"))
def test_a_model_is_built_alone(launch, starts, tmp_path, closing, config, tied):
    """In bf16, with masters; with a weight that two stages share; what DeepSpeed sends at its start is not awaited."""
    top = Top(launch, tmp_path / "run0", "readme", config=config, tied=tied)
    closing.append(newcomer := Alone(starts[0], top, 2, tmp_path / "newcomer"))
    newcomer.tell(recorded(top.saw(2)))
    assert_as_before(newcomer.saw(), top.saw(2))
    top.end()


@pytest.mark.parametrize("vehicle", (PLAIN,), indirect=True, ids=str)
def test_a_loop_of_the_scripts_own_computes_nothing(launch, starts, tmp_path, closing):
    top = Top(launch, tmp_path / "run0", "replicas")
    closing.append(newcomer := Alone(starts[0], top, 1, tmp_path / "newcomer"))
    newcomer.tell(recorded(top.saw(1)))
    found = newcomer.saw()
    assert_as_before(found, top.saw(1))
    assert "read" not in found and not (tmp_path / "newcomer" / "checkpoint").exists()
    top.end()


def test_a_rate_that_is_not_known_is_refused(launch, starts, tmp_path, closing):
    """Where steps may have been skipped, a scheduler may be behind the steps; the script asks before it knows."""
    top = Top(launch, tmp_path / "run0", "global_steps", config={"recycle": {"nonfinite": "skip"}})
    closing.append(newcomer := Alone(starts[0], top, 2, tmp_path / "newcomer"))
    newcomer.tell(recorded(top.saw(2)))
    assert newcomer.end() == 1
    (said,) = [one.text for one in newcomer.said(Note) if one.kind == "warning"]
    assert "engine.get_lr() in a worker that has come back" in said and "only when engine.behind is false" in said
    top.end()


@pytest.mark.parametrize("pattern", ("logs_a_mean", "catches_errors"))
def test_a_collective_between_steps_is_refused_by_its_line_and_the_job_goes_on(
    launch, starts, tmp_path, closing, pattern
):
    """The newcomer says why it can't come back, and that is nobody else's business, even if its script goes on."""
    top = Top(launch, tmp_path / "run0", pattern)
    closing.append(newcomer := Alone(starts[0], top, 1, tmp_path / "newcomer"))
    newcomer.tell(recorded(top.saw(1)))
    assert newcomer.end() == 1
    (said,) = [one.text for one in newcomer.said(Note) if one.kind == "warning"]
    assert said.startswith("rank 1, which has come back, can't take part: torch.distributed.all_reduce over ranks 0, 1")
    assert f"called at {SCRIPT}:" in said
    assert "between steps that were over before this worker came back: its result is not kept" in said
    assert said.endswith("; the script has caught this error") == (pattern == "catches_errors")
    assert not newcomer.said(Fatal) and not newcomer.said(Crashed)
    top.end()

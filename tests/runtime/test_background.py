"""Checkpoints that are written while training goes on end where everybody has written."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from recycle_plugin.core.messages.from_coordinator import BarrierPassed, Committed
from recycle_plugin.core.messages.from_workers import BarrierReached, Durable
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.log_figures import LogFigures, StageFigures
from recycle_plugin.core.worker.checkpoint_interval import CheckpointInterval
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.worker.background import Background
from recycle_plugin.runtime.worker.checkpoint_files import Checkpoint
from recycle_plugin.runtime.worker.checkpoints import JobCheckpoints
from tests.support.coordinator import generation


class Folders:
    """Makes checkpoints as runtime.worker.checkpoint_files.Checkpoint, without files."""

    folder = Path("checkpoints")

    def __init__(self) -> None:
        self.published: list[str] = []
        self.written: list[Path] = []

    def __call__(self, tag: str) -> Folders:
        made = copy.copy(self)
        made.tag = tag
        return made

    def path(self, number: int) -> Path:
        return self.folder / f".incomplete-{number}-{self.tag}"

    def gather(self, path: Path, copies: bool) -> SimpleNamespace:
        assert copies, "training goes on while it is written"
        return SimpleNamespace(write=lambda: self.written.append(path))

    def named(self, made: Path, said: str, **details: object) -> str:
        self.published.append(self.tag)
        return ""

    def remove(self, made: Path) -> None:
        pass


def loop_by(settle: Callable[[], None], met: Callable[[str], object]) -> SimpleNamespace:
    def barrier(place: str, values: dict) -> Iterator[None]:
        met(place)
        return iter(())

    return SimpleNamespace(settle=settle, training=SimpleNamespace(barrier=barrier))


LOOP = loop_by(lambda: None, lambda place: None)


@pytest.fixture
def interval() -> CheckpointInterval:
    return CheckpointInterval(0.1, 0)


@pytest.fixture
def session(coordinator) -> Session:
    made = coordinator.session(0)
    made.waiting.for_lease = lambda what: None
    made.view.adopt(generation(1, [0]))
    return made


@pytest.fixture
def begun(session, interval):
    """A checkpoint that the worker has begun before the step that is due, and what that says of it."""
    folders = Folders()
    background = Background(session, LOOP, folders, interval, 1, lambda: pytest.fail("nobody is lost"))
    step = interval.due
    background.before(step)
    return background, session, folders, folders.written, step


def test_where_somebody_comes_while_the_steps_before_it_settle_all_begin_anew(session, interval):
    """Who has come does not know when it was due: nobody waits for it at one that only the others find due."""
    session.view.adopt(generation(1, [0, 1]))
    barriers, step = [], interval.due

    def settle() -> None:
        session.view.changed_behind = step - 2
        session.view.generation = generation(2, [0, 2])

    loop = loop_by(settle, barriers.append)
    background = Background(session, loop, Folders(), interval, 1, lambda: None, lambda: 0)
    background.before(step)
    assert not barriers and interval.due == unstarted(step - 2) == step + 1
    background.before(step + 1)
    assert list(map(str, barriers)) == [f"checkpoint automatic_step{step}"]


def test_where_somebody_has_come_nobody_counts_from_one_that_is_under_way(begun, interval, coordinator):
    background, session, folders, _, step = begun
    session.view.changed_behind, session.view.generation = step, generation(2, [0, 2])
    background.before(step + 1)
    due = interval.due
    assert due == unstarted(step)
    all_have_written(coordinator, step)
    session.waiting.for_commit(step)
    background.before(step + 2)
    assert interval.due == due and not folders.published


def end_of(step: int) -> Barrier:
    return Barrier(Meets.WRITTEN, f"automatic_step{step}")


def share(found: StageFigures | None = None, error: str = "") -> list:
    """What a worker brings to the end of a checkpoint."""
    return [0.1, 1.0, 0.3, [], error, found]


def all_have_written(coordinator, step: int) -> None:
    end = end_of(step - 1)
    coordinator.tell(BarrierPassed(end, {"0": share()}, step + 2))
    coordinator.tell(Committed(step))


def test_a_checkpoint_has_its_name_once_all_have_written(begun, coordinator):
    background, session, folders, _, step = begun
    background.before(step + 1)
    assert not folders.published
    all_have_written(coordinator, step)
    session.waiting.for_commit(step)  # said behind it
    background.before(step + 2)
    assert folders.published == [f"automatic_step{step - 1}"]


def figures(state_bytes: int) -> StageFigures:
    return StageFigures(0, state_bytes, LogFigures())


class Choice:
    """As runtime.worker.log_choice.LogChoice, of a worker that has measured nothing but how often it was asked."""

    def __init__(self) -> None:
        self.begun = 0
        self.calls: list[object] = []

    def begin(self) -> StageFigures:
        self.begun += 1
        return figures(self.begun)

    def __getattr__(self, name: str):
        return lambda *given: self.calls.append((name, *given)) or ((2, 0) if name == "choose" else None)


@pytest.fixture
def choosing(session, interval):
    """A worker that logs, and has begun a checkpoint behind the one before its first step, at which all wait."""
    choice, session.view.newcomer = Choice(), True
    background = Background(session, LOOP, Folders(), interval, 1, lambda: None, lambda: 4, choice)
    step = interval.due
    background.before(step)
    return background, session, choice, step


def test_what_all_have_measured_comes_along_and_the_first_worker_chooses(choosing, interval, coordinator):
    background, _, choice, step = choosing
    end = end_of(step - 1)
    coordinator.tell(BarrierPassed(end, {"0": share(figures(1)), "1": share(figures(5))}, step + 2))
    background.conclude()
    (reached,) = coordinator.hear(BarrierReached)
    assert reached.values["0"][-1] == [0, 1, [*LogFigures()]], "what it had measured when the checkpoint began"
    (durable,) = coordinator.hear(Durable)
    assert (durable.step, durable.valid_from, durable.boundaries) == (step - 1, 4, (2, 0))
    assert choice.calls == [("made",), ("choose", [figures(1), figures(5)], interval.every)]


def test_of_a_checkpoint_that_was_not_written_nothing_is_chosen(choosing, coordinator):
    background, _, choice, step = choosing
    coordinator.tell(BarrierPassed(end_of(step - 1), {"0": share(error="full")}, step))
    background.conclude()
    assert choice.calls == []


def test_what_was_measured_with_other_members_is_forgotten(choosing):
    background, session, choice, step = choosing
    session.view.changed_behind, session.view.generation = step, generation(2, [0, 2])
    background.before(step + 1)
    assert choice.calls == [("forget",)]


@pytest.mark.parametrize(
    "brought, part",
    [
        (None, " is None"),
        ([0.1, 1.0], " is [0.1, 1.0]"),
        ([float("nan"), *share()[1:]], ".cost_s is nan"),
        ([*share()[:3], ["x"], "", None], ".made[0] is 'x'"),
        ([*share()[:5], [0, 1]], ".figures is [0, 1]"),
    ],
)
def test_a_share_that_is_none_ends_the_job_in_one_line_that_names_its_rank(begun, coordinator, brought, part):
    background, *_, step = begun
    end = end_of(step - 1)
    coordinator.tell(BarrierPassed(end, {"0": share(), "7": brought}, step + 2))
    with pytest.raises(RecycleError, match=re.escape(f"what rank 7 has brought to {end}{part}")) as refused:
        background.conclude()
    assert "\n" not in str(refused.value)


def test_who_wants_none_to_be_written_waits_until_all_have(begun, coordinator):
    background, _, folders, written, step = begun
    all_have_written(coordinator, step)
    background.conclude()
    assert folders.published == [f"automatic_step{step - 1}"]
    assert written == [Path("checkpoints") / f".incomplete-1-automatic_step{step - 1}"]
    (reached,) = coordinator.hear(BarrierReached)
    assert reached.barrier == end_of(step - 1) and list(reached.values) == ["0"]


def test_a_checkpoint_that_gets_its_name_leaves_the_next_one_alone_which_others_write_already(coordinator, tmp_path):
    """Both may go to one folder: an automatic one, and that of a job that ends."""
    session = coordinator.session(0)
    session.waiting.for_lease = lambda what, interruptible=True: None
    session.view.adopt(generation(1, [0]))
    automatic, before, other = (
        Checkpoint(session, lambda point: None, lambda path, copies: pytest.fail("it is written"), print, tmp_path, tag)
        for tag in ("automatic_step3", "automatic_step2", "global_step4")
    )
    for path in (automatic.path(1), before.path(0), other.path(1)):
        path.mkdir()
    assert automatic.named(automatic.path(1), "a checkpoint") == ""
    assert {path.name for path in tmp_path.iterdir()} == {"automatic_step3", other.path(1).name, "latest"}
    other.remove(other.path(1))
    assert {path.name for path in tmp_path.iterdir()} == {"automatic_step3", "latest"}


def test_the_newest_checkpoint_is_named_by_who_puts_it_in_place_as_its_framework_has_it(coordinator, tmp_path):
    """Any worker that named it later, one that has come back for instance, might name an older one."""
    session = coordinator.session(0)
    session.waiting.for_lease = lambda what, interruptible=True: None
    session.view.adopt(generation(1, [0]))
    tracker = ("latest_checkpointed_iteration.txt", "3")
    made = Checkpoint(session, lambda point: None, None, lambda folder: None, tmp_path, "iter_0000003", tracker)
    made.path(1).mkdir()
    assert made.named(made.path(1), "a checkpoint") == ""
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000003", tracker[0]}
    assert (tmp_path / tracker[0]).read_text() == "3"


def of_worker(rank: int, saves_to: str = "", checkpoint_dir: str | None = None) -> JobCheckpoints:
    parts = SimpleNamespace(
        settings=SimpleNamespace(checkpoint_dir=checkpoint_dir, checkpoint=None),
        session=SimpleNamespace(rank=rank),
        framework=SimpleNamespace(checkpoints=SimpleNamespace(complete=None)),
        state=None,
        world=SimpleNamespace(reach=None),
        run_dir="run",
    )
    loop = SimpleNamespace(save=lambda place, made: "")
    made = JobCheckpoints(parts, loop, lambda: None, lambda write, path: None, lambda: 0, None)
    if saves_to:
        made.save(Path(saves_to), "global_step3", True, None, 3)
    return made


@pytest.mark.parametrize(
    "saved, checkpoint_dir, folder",
    (
        (("", "own", "own"), None, "own"),  # rank 0 has come back, and its script has left out what was over
        (("own", "", "own"), None, "own"),
        (("", "", ""), None, "run/checkpoint"),
        (("", "own", ""), "set", "set"),
    ),
)
def test_the_last_checkpoint_goes_to_one_folder_whoever_has_come_back(saved, checkpoint_dir, folder):
    """Each at a place of its own would wait for the others until the job is killed."""
    workers = [of_worker(rank, saves_to, checkpoint_dir) for rank, saves_to in enumerate(saved)]
    brought: dict[str, str] = {}

    def bring(place: str, values: dict[str, str]) -> BarrierPassed:
        brought.update(values)
        return BarrierPassed(Barrier(Meets.SCRIPT, place), brought, 4)

    for worker in workers:
        worker.agree_on_folder(bring)  # all have brought theirs
    assert {worker.agree_on_folder(bring) for worker in workers} == {Path(folder)}


class InFiles(Folders):
    """Makes checkpoints that are empty folders."""

    def named(self, made: Path, said: str, **details: object) -> str:
        (self.folder / self.tag).mkdir(exist_ok=True)
        return super().named(made, said, **details)


class Series:
    """The automatic checkpoints of the only worker, of which two are kept, of any steps."""

    def __init__(self, session, coordinator, folder: Path) -> None:
        self.session, self.coordinator, self.folders = session, coordinator, InFiles()
        self.folders.folder = folder
        self.interval = CheckpointInterval(0.1, 0)
        self.background = Background(session, LOOP, self.folders, self.interval, 2, lambda: pytest.fail("alone"))

    def make(self, step: int, known: list[int]) -> set[str]:
        """Make one of ``step``, where another worker says that it knows those before. Return the names of all."""
        self.interval.due = step + 1
        self.background.before(step + 1)
        end = end_of(step)
        others = {"0": [0.1, 1.0, 0.3, [], "", None], "1": [0.1, 1.0, 0.3, known, "", None]}
        self.coordinator.tell(BarrierPassed(end, others, step + 2))
        self.background.conclude()
        for thread in threading.enumerate():
            if thread.name == "recycle: old checkpoint":
                thread.join(30.0)
        return {path.name for path in self.folders.folder.iterdir()}


@pytest.fixture
def series(session, coordinator, tmp_path) -> Series:
    return Series(session, coordinator, tmp_path)


def test_the_first_worker_comes_back_and_removes_what_was_made_before(series, tmp_path):
    for step in (10, 20):
        (tmp_path / f"automatic_step{step}").mkdir()
    assert series.make(30, [10, 20]) == {"automatic_step20", "automatic_step30"}
    assert series.make(40, [10, 20, 30]) == {"automatic_step30", "automatic_step40"}


def test_one_that_is_made_again_behind_a_return_to_an_older_state_stays(series):
    for step in (10, 20):
        series.make(step, [])
    assert "automatic_step10" in series.make(10, [])
    assert series.make(20, []) == {"automatic_step10", "automatic_step20"}

"""Jobs of real processes, and no test that leaves anything behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.support.cluster import ForkServer, Result, Run
from tests.support.hosts import MORE, NAMES, Hosts, NoHosts, hosts
from tests.support.jobs import CHECKPOINT, DEEPSPEED, PLAIN, SQUARE, Shape, Vehicle
from tests.support.launching import DEADLINE_S, Launch, here, launching
from tests.support.returns import HELD, LONG
from tests.tiers import leave_out

if TYPE_CHECKING:
    from tests.support.megatron_lm_jobs import Jobs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("plain_too")
    if "vehicle" in metafunc.fixturenames and marker:
        both = marker.kwargs.get("deepspeed", True) or metafunc.config.getoption("--all-kills")
        metafunc.parametrize("vehicle", (PLAIN, DEEPSPEED) if both else (PLAIN,), ids=str, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests that run in plain torch too, one of each function runs with DeepSpeed; of each file one test with
    DeepSpeed runs under its launcher.
    """
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.processes)
        item.add_marker(pytest.mark.timeout(DEADLINE_S))
    everything, seed = config.getoption("--all-kills"), config.getoption("--kill-seed")
    functions: dict[str, list[pytest.Item]] = {}
    files: dict[str, list[pytest.Item]] = {}
    left_out = []
    for item in mine:
        plain = _vehicle(item) is PLAIN or hasattr(item.module, "vehicle")  # a file with one of its own is about that
        if not plain and "vehicle" in getattr(item, "fixturenames", ()):
            if item.get_closest_marker("plain_too"):
                functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
            elif everything or not item.get_closest_marker("all_kills"):
                files.setdefault(str(item.path), []).append(item)
    for name, function in functions.items():
        chosen = function if everything else [Random(f"{seed} {Path(name).name}").choice(function)]
        left_out += [item for item in function if item not in chosen]
        files.setdefault(str(function[0].path), []).extend(chosen)
    for name, file in files.items():
        for item in file if everything else [Random(f"{seed} {Path(name).name}").choice(file)]:
            item.add_marker(pytest.mark.real_launcher)
    leave_out(config, items, left_out)


def _vehicle(item: pytest.Item) -> Vehicle | None:
    return item.callspec.params.get("vehicle") if hasattr(item, "callspec") else None


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    """Two hosts, alpha and beta, where this machine has network namespaces."""
    yield from _hosts(NAMES)


@pytest.fixture(scope="module")
def four() -> Iterator[Hosts]:
    """The same with two more, gamma and delta."""
    yield from _hosts(MORE[:4])


@pytest.fixture(scope="module")
def five() -> Iterator[Hosts]:
    yield from _hosts(MORE)


def _hosts(names: tuple[str, ...]) -> Iterator[Hosts]:
    try:
        with hosts(names) as made:
            yield made
    except NoHosts as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture
def vehicle(request: pytest.FixtureRequest) -> Vehicle:
    """Of the test's jobs; both in files that are marked ``plain_too``."""
    return getattr(request, "param", DEEPSPEED)


@pytest.fixture
def starts(request: pytest.FixtureRequest, vehicle: Vehicle) -> tuple[ForkServer, Callable[..., Run]]:
    """What starts the test's jobs: plain ones too under DeepSpeed's launcher, and from its server, where the test is
    marked so.
    """
    real = request.node.get_closest_marker("real_launcher") is not None
    return request.getfixturevalue("server" if real else vehicle.server), Run if real else here


@pytest.fixture
def launch(starts: tuple[ForkServer, Callable[..., Run]], vehicle: Vehicle, tmp_path: Path) -> Iterator[Launch]:
    server, start = starts
    with launching(server, tmp_path, start, vehicle) as launch:
        yield launch


@pytest.fixture
def by_plan(launch: Launch, tmp_path: Path) -> Launch:
    """``by_plan(*overrides, shape=, **plan)``: a run of tests/jobs/checkpoint.py, whose folders are in tmp_path."""

    def run(*overrides: str, shape: Shape = SQUARE, **plan: object) -> Run:
        plan = {"folder": str(tmp_path / "saved"), "flags": str(tmp_path / "flags")} | plan
        return launch(*overrides, shape=shape, script=CHECKPOINT, RECYCLE_TEST_CHECKPOINT=json.dumps(plan))

    return run


@pytest.fixture
def trained_by_plan(by_plan: Launch) -> Callable[..., Result]:
    """The result of such a run, without dropout, whose masks are others in stock."""

    def run(*overrides: str, **more: object) -> Result:
        return by_plan("model.dropout=0.0", *overrides, **more).ended_well()

    return run


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """``references(server, vehicle, shape, *overrides)``: the result of that job without a failure; each is run
    once.
    """
    results: dict[tuple, Result] = {}

    def run(server: ForkServer, vehicle: Vehicle, shape: Shape, *more: str) -> Result:
        if (key := (vehicle, shape, more)) not in results:
            with launching(server, tmp_path_factory.mktemp("reference"), vehicle=vehicle) as launch:
                result = launch(*more, shape=shape).finish()
            assert result.code == 0 and not result.of("lost"), result.output[-6000:]
            results[key] = result
        return results[key]

    return run


@pytest.fixture
def reference(
    request: pytest.FixtureRequest, vehicle: Vehicle, references: Callable[..., Result]
) -> Callable[..., Result]:
    """``reference(*overrides, shape=)``: the result of the test's job without a failure."""

    def run(*more: str, shape: Shape = SQUARE) -> Result:
        return references(request.getfixturevalue(vehicle.server), vehicle, shape, *more)

    return run


@pytest.fixture
def come_back(launch, tmp_path):
    """``come_back(*kills, shape=, case=, comes=, number=, **job)``: the finished job of LONG steps, whose others wait
    for the newcomers' scripts; it is the ``number``-th that the test starts.
    """

    def run(
        *kills: str, shape: Shape = SQUARE, case: str = "plain", comes: bool = True, number: int = 0, **more: object
    ) -> Result:
        folder = tmp_path / f"run{number}"
        job = {"folder": str(folder), "faults": kills, "steps": LONG, "case": case, "held": HELD}
        job |= {"replicas": shape.replicas, "stages": shape.stages, **more}
        started = launch(shape=shape, script="tests/jobs/iterators.py", RECYCLE_TEST_ITERATORS=json.dumps(job))
        started.wait_for(
            lambda: len({each["seat"] for each in started.of("newcomer")}) == len(kills),
            "newcomers",
        )
        (folder / "go").touch()
        result = started.ended_well()
        seats = sorted(kill.split()[1] for kill in kills)
        assert sorted(each["seat"] for each in result.of("lost")) == seats
        assert sorted(each["seat"] for each in result.of("rejoined")) == (seats if comes else [])
        return result

    return run


@pytest.fixture(scope="session")
def stock_megatron_lm() -> dict:
    """What jobs of Megatron-LM have left without the plugin, by their flags."""
    return {}


@pytest.fixture
def job(megatron_lm_server: ForkServer, stock_megatron_lm: dict, tmp_path: Path) -> Iterator[Jobs]:
    from tests.support.megatron_lm_jobs import Jobs

    jobs = Jobs(megatron_lm_server, tmp_path, stock_megatron_lm)
    yield jobs
    left = [thing for run in jobs.runs for thing in run.clean()]
    assert not left, left

"""Jobs of real processes: a fork server for all tests of this pytest process, and no test that leaves anything behind."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

import pytest

from tests.support.cluster import ForkServer, Result, Run
from tests.support.hosts import Hosts, NoHosts, hosts
from tests.support.jobs import SQUARE, TRAIN, Shape, overrides

Launch = Callable[..., Run]
DEADLINE_S = 600  # of a test; a run takes seconds, and minutes where others use the machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.timeout(DEADLINE_S))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For jobs of scripts without DeepSpeed."""
    server = ForkServer(tmp_path_factory.mktemp("plain"), "plain")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    """Two hosts, alpha and beta, where this machine has network namespaces."""
    try:
        with hosts() as made:
            yield made
    except NoHosts as error:
        pytest.skip(f"no network namespaces here: {error}")


@contextmanager
def launching(server: ForkServer, folder: Path, start: Callable[..., Run] = Run) -> Iterator[Launch]:
    """``launch(*overrides, shape=, script=, …)`` starts a job; at the end nothing of any of them may be left."""
    runs: list[Run] = []

    def launch(*more: str, shape: Shape = SQUARE, script: str = TRAIN, **options: object) -> Run:
        place = folder / f"run{len(runs)}"
        runs.append(start(server, place, shape.ranks, script, overrides(shape, place, *more), **options))
        return runs[-1]

    try:
        yield launch
    finally:
        left = [thing for run in runs for thing in run.clean()]
    assert not left, left


@pytest.fixture
def launch(server: ForkServer, tmp_path: Path) -> Iterator[Launch]:
    with launching(server, tmp_path) as launch:
        yield launch


@pytest.fixture(scope="session")
def reference(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """``reference(*overrides, shape=)``: the result of that job without a failure; each is run once."""
    results: dict[tuple, Result] = {}

    def run(*more: str, shape: Shape = SQUARE) -> Result:
        if (shape, more) not in results:
            with launching(server, tmp_path_factory.mktemp("reference")) as launch:
                result = launch(*more, shape=shape).finish()
            assert result.code == 0 and not result.of("lost"), result.output[-6000:]
            results[shape, more] = result
        return results[shape, more]

    return run

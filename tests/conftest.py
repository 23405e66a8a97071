"""Options of the whole test run, and what is started once for all tests of this pytest process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import tiers

if TYPE_CHECKING:
    from tests.support.cluster import ForkServer

pytest_plugins = ("tests.support.again",)
WHOLE_JOBS, JOBS = "tests/cluster/", 2  # where each case starts one, and how many a function has by itself
# Of all processes that tests start: torch asks the name server for the name of each address that a store's client
# connects to, and waits 5 s where no answer comes; or else it warns each time that nobody tells.
os.environ |= {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("unit", "jobs", "test"),
        help="run one tier of tests/tiers.py, or both: test (default: everything)",
    )
    parser.addoption(
        "--draw", type=int, metavar="S", help="and a tenth of what the tier leaves out, chosen by this number"
    )
    parser.addoption(
        "--all-kills",
        action="store_true",
        help="the full matrix of kills, 20 kills at random times, and all cases of tests of which else some run",
    )
    parser.addoption(
        "--kill-seed",
        type=int,
        default=0,
        metavar="S",
        help="chooses which kills run with DeepSpeed, under its launcher, and which of many cases (default 0)",
    )
    parser.addoption(
        "--real-seeds", type=int, default=1, metavar="N", help="real jobs with failures close together (default 1)"
    )
    parser.addoption(
        "--healthy-steps",
        type=int,
        default=40,
        metavar="N",
        help="steps of a job in which everybody is healthy, and uneven (default 40)",
    )
    parser.addoption(
        "--soak", type=float, default=0, metavar="MINUTES", help="go on losing workers for that long (default: one job)"
    )
    parser.addoption(
        "--fuzz-seconds",
        type=int,
        default=20,
        metavar="N",
        help="say made-up bytes to a job's ports for that long (default 20; for a real search 600)",
    )
    parser.addoption(
        "--models",
        type=int,
        default=100,
        metavar="N",
        help="random models, plugin against stock autograd (default 100)",
    )
    parser.addoption("--models-seed", type=int, default=0, metavar="S", help="... which ones (default 0)")
    parser.addoption(
        "--campaign-seeds",
        type=int,
        default=100,
        metavar="N",
        help="simulated jobs with failures (default 100; with fewer, more is looked for that needs all rules)",
    )
    parser.addoption(
        "--frozen-jobs",
        type=int,
        default=100,
        metavar="N",
        help="of 2000 simulated jobs that were written down, so many are compared (default 100)",
    )
    parser.addoption(
        "--prometheus",
        metavar="PATH_OR_NAME",
        help="Prometheus itself, which a job's metrics are tried with (Debian: apt-get install prometheus; default: "
        "not tried)",
    )
    parser.addoption(
        "--freeze",
        action="store_true",
        help="write down anew what later runs are compared with: simulated jobs, and real ones (with --all-kills all "
        "of them; without -n)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "all_kills: with DeepSpeed only with --all-kills")
    config.addinivalue_line(
        "markers",
        "plain_too: by jobs in plain torch, all of them, and with DeepSpeed one of each function, which --kill-seed "
        "chooses; with deepspeed=False none, but with --all-kills",
    )
    config.addinivalue_line(
        "markers",
        "some_of(n, among=''): n of the function's cases, or of all tests with that word, which --kill-seed chooses, "
        f"{JOBS} of those in {WHOLE_JOBS} without it; all of them with --all-kills",
    )
    config.addinivalue_line("markers", "real_launcher: under DeepSpeed's own launcher")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    chosen = "all" if config.option.all_kills else f"some, by --kill-seed {config.option.kill_seed}"
    terminalreporter.write_line(f"kills with DeepSpeed, under its launcher, and cases of many: {chosen}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-kills"):
        leave_out(config, items, [item for item in items if _is_of_all_kills(item)])
        leave_out(config, items, not_chosen(items, config.getoption("--kill-seed")))
    if wanted := config.getoption("--tier"):
        names = ("unit", "jobs") if wanted == "test" else (wanted,)
        kept = set(tiers.chosen(items, names, config.getoption("--draw")))
        leave_out(config, items, [item for item in items if item not in kept])


def _is_of_all_kills(item: pytest.Item) -> bool:
    return item.get_closest_marker("all_kills") is not None and item.get_closest_marker("plain_too") is None


def not_chosen(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Of cases that are much alike, and of whole jobs all but a few; of those under DeepSpeed's launcher, which were
    chosen before, none.
    """
    alike: dict[str, list[pytest.Item]] = {}
    counts: dict[str, int] = {}
    for item in items:
        marker, of_jobs = item.get_closest_marker("some_of"), item.nodeid.startswith(WHOLE_JOBS)
        if (marker or of_jobs) and not item.get_closest_marker("real_launcher"):
            name = (marker and marker.kwargs.get("among")) or item.nodeid.partition("[")[0]
            alike.setdefault(name, []).append(item)
            (counts[name],) = marker.args if marker else (JOBS,)
    left_out = []
    for name, cases in alike.items():
        left_out += random.Random(f"{seed} {name}").sample(cases, max(0, len(cases) - counts[name]))
    return left_out


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left_out)
    kept = set(items).difference(left_out)
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    yield from _served(tmp_path_factory, "deepspeed")


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For jobs of scripts without DeepSpeed."""
    yield from _served(tmp_path_factory, "plain")


def _served(folders: pytest.TempPathFactory, kind: str) -> Iterator[ForkServer]:
    from tests.support.cluster import ForkServer  # which most tests do without

    server = ForkServer(folders.mktemp("server"), kind)
    yield server
    server.stop()

"""Options of the whole test run, and what is started once for all tests of this pytest process."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import tiers

if TYPE_CHECKING:
    from tests.support.cluster import ForkServer

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ("tests.support.again",)
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)  # the same cases in each run
settings.load_profile("fixed")
# Of all processes that tests start: torch asks the name server for the name of each address that a store's client
# connects to, and waits 5 s where no answer comes; or else it warns each time that nobody tells.
os.environ |= {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


# How many, how long, or which: (option, type, default, what it is given, help)
NUMBERS = (
    ("--kill-seed", int, 0, "S", "chooses which kills run with DeepSpeed, under its launcher, and which of many cases"),
    ("--real-seeds", int, 1, "N", "real jobs with failures close together"),
    ("--healthy-steps", int, 40, "N", "steps of a job in which everybody is healthy, and uneven"),
    ("--soak", float, 0, "MINUTES", "go on losing workers for that long; 0: one job"),
    ("--fuzz-seconds", int, 20, "N", "say made-up bytes to a job's ports for that long; for a real search 600"),
    ("--models", int, 100, "N", "random models, plugin against stock autograd"),
    ("--models-seed", int, 0, "S", "... which ones"),
    ("--campaign-seeds", int, 100, "N", "simulated jobs with failures; with fewer, more is tried that needs all rules"),
    ("--frozen-jobs", int, 100, "N", "of 2000 simulated jobs that were written down, so many are compared"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, kind, default, given, said in NUMBERS:
        parser.addoption(name, type=kind, default=default, metavar=given, help=f"{said} (default {default})")
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
        f"{tiers.OF_EACH} of those in {tiers.WHOLE_JOBS} without it; all of them with --all-kills",
    )
    config.addinivalue_line("markers", "real_launcher: under DeepSpeed's own launcher")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    chosen = "all" if config.option.all_kills else f"some, by --kill-seed {config.option.kill_seed}"
    from tests.support import megatron_lm  # whose asserts are to be rewritten before

    if megatron_lm.home() is None:
        terminalreporter.write_line(megatron_lm.MISSING)
    terminalreporter.write_line(f"kills with DeepSpeed, under its launcher, and cases of many: {chosen}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-kills"):
        tiers.leave_out(config, items, [item for item in items if _is_of_all_kills(item)])
        tiers.leave_out(config, items, tiers.not_chosen(items, config.getoption("--kill-seed")))
    if wanted := config.getoption("--tier"):
        names = ("unit", "jobs") if wanted == "test" else (wanted,)
        kept = set(tiers.chosen(items, names, config.getoption("--draw")))
        tiers.leave_out(config, items, [item for item in items if item not in kept])


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
    return True


def _is_of_all_kills(item: pytest.Item) -> bool:
    return item.get_closest_marker("all_kills") is not None and item.get_closest_marker("plain_too") is None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    yield from _served(tmp_path_factory, "deepspeed")


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For jobs of scripts without DeepSpeed."""
    yield from _served(tmp_path_factory, "plain")


@pytest.fixture(scope="session")
def megatron_lm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For jobs of Megatron-LM, which is imported once for all of them."""
    from tests.support import megatron_lm

    yield from _served(tmp_path_factory, "megatron_lm", PYTHONPATH=str(megatron_lm.home()))


def _served(folders: pytest.TempPathFactory, kind: str, **more: str) -> Iterator[ForkServer]:
    from tests.support.cluster import ForkServer  # which most tests do without

    server = ForkServer(folders.mktemp("server"), kind, **more)
    yield server
    server.stop()

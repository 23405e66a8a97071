"""Options of the whole test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kills", action="store_true", help="the full matrix of kills, and 20 kills at random times")
    parser.addoption("--real-seeds", type=int, default=1, metavar="N", help="real jobs with failures close together (default 1)")
    parser.addoption("--healthy-steps", type=int, default=40, metavar="N", help="steps of a job in which everybody is healthy, and uneven (default 40)")
    parser.addoption("--soak", type=float, default=0, metavar="MINUTES", help="go on losing workers for that long (default: one job)")
    parser.addoption("--models", type=int, default=100, metavar="N", help="random models, plugin against stock autograd (default 100)")
    parser.addoption("--models-seed", type=int, default=0, metavar="S", help="... which ones (default 0)")
    parser.addoption("--campaign-seeds", type=int, default=300, metavar="N", help="simulated jobs with failures (default 300; with fewer some rule of the protocol may not be needed)")
    parser.addoption("--frozen-jobs", type=int, default=100, metavar="N", help="of 2000 simulated jobs that were written down, so many are compared (default 100)")
    parser.addoption("--freeze", action="store_true", help="write down anew what later runs are compared with: simulated jobs, and real ones (with --all-kills all of them; without -n)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "all_kills: only with --all-kills")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-kills"):
        return
    left_out = [item for item in items if item.get_closest_marker("all_kills")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]

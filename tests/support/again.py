"""A pytest plugin for the second run of what has failed: scripts/test --numprocesses 0 --last-failed --again FILE.

A test that fails beside others and passes by itself is flaky: a defect of the product or of the test, to be mended
first of all. Its name is printed as the last line but one, and written to FILE. The run is red all the same if more
than MOST tests have to run again, or if one of them was flaky before (KNOWN).
"""

from __future__ import annotations

from pathlib import Path

import pytest

MOST = 3
KNOWN = Path(__file__).parents[1] / "flaky.txt"  # a line each: the test's name, two spaces, the cause


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--again",
        type=Path,
        metavar="FILE",
        help=f"the tests have failed once: name those that pass now, also in FILE; fails if there are over {MOST}, "
        f"or if tests/{KNOWN.name} has one of them",
    )
    parser.addoption("--known-flaky", type=Path, default=KNOWN, metavar="FILE", help=f"default: tests/{KNOWN.name}")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.again is None:
        return
    names = [item.nodeid for item in session.items]
    if not names:
        pytest.exit("again: no test is known to have failed", returncode=1)
    if len(names) > MOST:
        pytest.exit(f"again: {len(names)} tests have failed, and at most {MOST} are run again", returncode=1)
    known = [line.partition("  ")[0] for line in session.config.option.known_flaky.read_text().splitlines()]
    if before := sorted(set(names) & set(known)):
        pytest.exit(f"again: flaky before, and not mended: {', '.join(before)}", returncode=1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.again is None:
        return
    flaky = [report.nodeid for report in terminalreporter.stats.get("passed", ())]
    config.option.again.parent.mkdir(parents=True, exist_ok=True)
    config.option.again.write_text("".join(f"{name}\n" for name in flaky))
    for name in flaky:
        terminalreporter.write_line(f"flaky: {name}")

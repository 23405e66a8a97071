"""Each test here runs in a process of its own, which has the stand-in accelerator.

A process that has it can't get rid of it, and other tests are to find none.  Tests ask for the module by its fixture,
``standin``; the other fixtures' values and the parameters have to be picklable.
"""

from __future__ import annotations

import inspect
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support import standin_build
from tests.support.loaded import loaded

TEST_S = 100.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "pytest"])


@pytest.fixture(scope="session")
def standin() -> Path:
    """The built extension here, and the module tests.support.standin in a test."""
    return standin_build.built()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the first test the time to build; each one's own is limited below."""
    item.add_marker(pytest.mark.timeout(standin_build.BUILD_S + 2 * TEST_S))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run the test's function in a child, and fail with what it has raised there."""
    names = set(inspect.signature(pyfuncitem.obj).parameters) - {"standin"}
    given = {name: pyfuncitem.funcargs[name] for name in names}
    ours, theirs = PROCESSES.Pipe()
    child = PROCESSES.Process(target=in_child, args=(theirs, str(pyfuncitem.path), pyfuncitem.originalname, given))
    child.start()
    theirs.close()
    try:
        if not ours.poll(TEST_S):
            pytest.fail(f"waited {TEST_S:g} s for the process of {pyfuncitem.name}", pytrace=False)
        failure = ours.recv()
    except EOFError:
        child.join(TEST_S)
        failure = f"the process of {pyfuncitem.name} has ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
        ours.close()
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def in_child(ends: Connection, path: str, function: str, given: dict[str, Any]) -> None:
    """Run a function of a test file and send the text of what it raises, or of what the device has not raised."""
    try:
        from tests.support import standin

        test = getattr(loaded(Path(path)), function)
        test(**given | ({"standin": standin} if "standin" in inspect.signature(test).parameters else {}))
        ends.send("\n".join(standin.violations()))
    except BaseException:
        ends.send(traceback.format_exc())

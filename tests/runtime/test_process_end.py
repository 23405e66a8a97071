"""The end of a worker's process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import atexit, os, threading
    from concurrent.futures import ThreadPoolExecutor
    from recycle_plugin.runtime.processes.process_end import leave_process
    atexit.register(print, "at exit")
    begun, stuck = threading.Event(), threading.Event()

    def upload(name):
        begun.set()
        threading.main_thread().join(0.2)  # until the script itself is through
        os.write(1, name.encode() + bytes([10]))  # in one piece

    threading.Thread(target=stuck.wait, daemon=True).start()
    ThreadPoolExecutor().submit(upload, "pool")
    threading.Thread(target=upload, args=("thread",)).start()
    begun.wait()
    leave_process(CODE)
"""


@pytest.mark.parametrize("code", (0, 3))
def test_a_scripts_own_threads_end_before_a_process_that_ends_well(code):
    """... and a daemon that never does is not waited for."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).replace("CODE", str(code))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code and not done.stderr
    assert sorted(done.stdout.split("\n")) == (["", "at exit", "pool", "thread"] if code == 0 else ["", "at exit"])


@pytest.mark.parametrize("what", ("sys.stdout.close()", "sys.stdout = None", "sys.stderr.close()"))
def test_a_script_that_has_closed_its_output_ends_as_well_as_others(what):
    made = (
        f"import sys; from recycle_plugin.runtime.processes.process_end import leave_process; {what}; leave_process(0)"
    )
    done = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr


def test_a_worker_that_was_given_up_ends_though_its_script_has_closed_its_output():
    """Whatever its main thread does must stop."""
    made = (
        "import sys; from types import SimpleNamespace; from recycle_plugin import worker_process; sys.stderr.close(); "
        "worker_process._end_given_up(SimpleNamespace(view='worker 1'), 'it was silent')"
    )
    done = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3

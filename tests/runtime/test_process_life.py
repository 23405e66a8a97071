"""What the operating system tells of a process."""

from __future__ import annotations

import ctypes
import os
import signal

from recycle_plugin.runtime.system.process_life import is_dying, life_of

PR_SET_NAME = 15


def test_a_process_whose_name_is_cut_off_in_a_character_lives():
    """The kernel keeps 15 bytes of a name; a supervisor that can't read it would send no heartbeats any more."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_NAME, "обучение модели".encode(), 0, 0, 0)
        os.write(write, b"named")
        signal.pause()
    try:
        assert os.read(read, 5) == b"named"
        state, cpu_s = life_of(pid)
        assert state in "RS" and cpu_s is not None and cpu_s >= 0.0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    assert life_of(pid) == ("", None)


def test_a_killed_process_is_dying_until_it_is_gone():
    """Until somebody asks how it ended, it is still there."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        assert not is_dying(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        dying = is_dying(pid)
        os.waitpid(pid, 0)
    assert dying and not is_dying(pid)

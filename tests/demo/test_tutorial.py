"""The tutorial's commands, as they stand in the document, in the order in which they stand there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from recycle_plugin.lab.runs import MARK, await_reports, environment, processes_with
from recycle_plugin.launch import free_port
from tests.support.cluster import ForkServer
from tests.support.samples import never_printed, shapes

TUTORIAL = (Path(__file__).parents[2] / "recycle_plugin/docs/tutorial.md").read_text()
DEADLINE_S = 900  # of three launches by DeepSpeed's own command, where others use the machine

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]


def files() -> dict[str, str]:
    """By name, the block that follows "Write `name`"."""
    return dict(re.findall(r"^Write `([\w.]+)`.*?\n\n```(?:python|json)\n(.*?)```", TUTORIAL, re.DOTALL | re.MULTILINE))


def commands() -> str:
    return "\n".join(re.findall(r"^```shell\n(.*?)```", TUTORIAL, re.DOTALL | re.MULTILINE))


@pytest.fixture
def variables(tmp_path_factory):
    """Workers are forked from a warm server.  At the end no process of the jobs may be left."""
    server = ForkServer(tmp_path_factory.mktemp("server"))
    mark = f"tutorial-{os.getpid()}-{server.path}"
    yield environment(**{MARK: mark, "RECYCLE_FORK_SERVER": server.path})
    await_reports(mark)
    left = [*processes_with(mark), *(psutil.Process(pid) for pid in server.forked())]
    for process in left:
        process.kill()
    server.stop()
    assert not left, left


def test_the_tutorial_has_what_it_says():
    assert set(files()) == {"train.py", "ds_config.json"}
    assert [
        word
        for word in ("recycle doctor", "deepspeed --num_gpus 4 --module", "kill -9", "recycle status", "recycle report")
        if word not in commands()
    ] == []


@pytest.mark.some_of(1, among="walk-throughs")
def test_the_tutorial_as_it_stands(variables, tmp_path):
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    # the default one may be another test's
    own_port = f'deepspeed() {{ command deepspeed --master_port {free_port()} "$@"; }}\n'
    script = f"set -e\n{own_port}{commands()}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=DEADLINE_S
    )
    logs = "\n".join(log.read_text()[-4000:] for log in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "lost: seat 1.1 (rank 3)" in done.stdout and "rejoined: seat 1.1 (rank 3)" in done.stdout, logs
    assert len(shapes(TUTORIAL)) > 5 and not never_printed(TUTORIAL, done.stdout)
    assert "4 of 4" in done.stdout and (tmp_path / "run/report.html").exists()

"""What the launch module knows before there is a worker: the script's command, where ranks go, and the process that
workers are forked from.
"""

from __future__ import annotations

import array
import asyncio
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recycle_plugin.authentication.secret import SETTING, NoSecret
from recycle_plugin.core.messages.encoding import HEAD
from recycle_plugin.launch import Join, OneHost, free_port, placement, run, script_command
from recycle_plugin.runtime.processes import fork_server, hosted, one_host, supervisor
from recycle_plugin.runtime.processes.spawn import LANGUAGE, ForkedProcess, NoServer, Request, ServerProcess, ask
from recycle_plugin.runtime.processes.worker_keeper import Here
from tests.support.descriptors import none_left

ON = {"recycle": {"enabled": True, "placement": "spread"}}


def test_local_rank_goes_behind_the_script():
    assert script_command(["--local_rank=1", "train.py", "--steps", "3"]) == [
        "train.py",
        "--local_rank=1",
        "--steps",
        "3",
    ]


@pytest.mark.parametrize(
    "config, says",
    [
        (ON, "spread"),
        ({"recycle": {"enabled": True}}, "deepspeed"),
        ({"recycle": {"placement": "spread"}}, "deepspeed"),
        ({"recycle": {"enabled": True, "placement": "apart"}}, "deepspeed"),  # which the workers refuse
        ({"placement": "spread"}, "deepspeed"),
        (["placement"], "deepspeed"),
        ('{"placement": ' + "[" * 100_000, "deepspeed"),
    ],
)
@pytest.mark.parametrize("joined", (True, False))
def test_placement_is_read_from_the_config_on_the_command_line(tmp_path, config, says, joined):
    path = tmp_path / "ds_config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    named = [f"--deepspeed_config={path}"] if joined else ["--deepspeed_config", str(path)]
    assert placement(["train.py", "--steps", "3", *named, "--fp32"]) == says


@pytest.mark.parametrize(
    "command", ([], ["train.py"], ["train.py", "--deepspeed_config"], ["train.py", "--deepspeed_config=missing.json"])
)
def test_no_config_on_the_command_line(command):
    assert placement(command) == "deepspeed"


@pytest.mark.parametrize(
    "arguments, waits, command",
    [
        (["--join", "node1:29500", "SCRIPT", "--steps", "3"], True, ["SCRIPT", "--steps", "3"]),
        (["--join=node1:29500", "--no-wait", "SCRIPT"], False, ["SCRIPT"]),
        (["--no-wait", "--join", "node1:29500", "SCRIPT"], False, ["SCRIPT"]),
        (["--local_rank=2", "--join", "node1:29500", "SCRIPT", "-x"], True, ["SCRIPT", "--local_rank=2", "-x"]),
    ],
)
def test_a_command_line_that_asks_for_a_lost_seat(tmp_path, arguments, waits, command):
    script = tmp_path / "train.py"
    script.touch()
    given, wanted = ([str(script) if each == "SCRIPT" else each for each in some] for some in (arguments, command))
    assert Join.asked_for(given) == Join("node1", 29500, waits, wanted)


@pytest.mark.parametrize("arguments", (["train.py", "--join", "a:1"], ["--workers", "2", "train.py"], []))
def test_one_that_does_not(arguments):
    assert Join.asked_for(arguments) is None


@pytest.mark.parametrize(
    "arguments, wrong",
    [
        (["--join"], "--join : write the address and port of the job's master"),
        (["--no-wait", "setup.cfg"], "--join : write the address and port of the job's master"),
        (["--join", "node1", "setup.cfg"], "--join node1: write the address and port of the job's master"),
        (["--join", "node1:0", "setup.cfg"], "--join node1:0: write the address and port of the job's master"),
        (["--join", "node1:x", "setup.cfg"], "--join node1:x: write the address and port of the job's master"),
        (["--join", "node1:1"], "no training script given"),
        (["--join", "node1:1", "missing.py"], "there is no missing.py: write the path of your training script"),
        (["--join", "node1:1", "--workers", "2", "setup.cfg"], "--workers does not go with --join"),
        (["--join", "node1:1", "--no-wait=1", "setup.cfg"], "--no-wait does not go with --join"),
    ],
)
def test_what_is_wrong_with_it_is_one_line_with_an_example(arguments, wrong):
    said = run(arguments)
    assert said.startswith(f"recycle: error: {wrong}") and "\n" not in said
    assert said.endswith("python -m recycle_plugin.launch --join node1:29500 your_script.py")


@pytest.mark.parametrize(
    "own, local",
    [
        ({}, "0"),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "1"}, "3"),
        ({"SLURM_LOCALID": "1", "SLURM_PROCID": "5"}, "1"),
    ],
)
def test_who_joins_takes_nothing_of_another_launchers_job_but_its_own_place(own, local):
    theirs = {"RANK": "1", "WORLD_SIZE": "9", "MASTER_ADDR": "x", "MASTER_PORT": "7", "HOME": "/home"}
    found = Join("node1", 29500, True, []).environment(theirs | own)
    assert found == own | {"HOME": "/home", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "LOCAL_RANK": local}


async def test_placement_waits_for_no_host_for_ever(monkeypatch):
    monkeypatch.setattr(supervisor, "CONNECT_S", 0.5)
    address = "127.0.0.1", free_port()

    host = await hosted.Hosted.start(address, 2, dict(os.environ))
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    with pytest.raises(
        ConnectionError,
        match='^place 0 has got no rank within 0 s: with recycle.placement "spread" all supervisors have to be '
        "there first",
    ):
        await supervisor.Supervisor(["train.py"], environment, "spread", Here(), host).run()
    await host.close()


# --- on one host ---------------------------------------------------------------------------------------


def test_options_go_before_the_script_and_its_own_behind_it():
    assert OneHost.asked_for(["--workers", "4", __file__, "--workers", "2", "x"]) == OneHost(
        4, [__file__, "--workers", "2", "x"]
    )
    assert OneHost.asked_for(["--one-device", "--workers=2", __file__]) == OneHost(2, [__file__], one_device=True)
    port = free_port()
    assert OneHost.asked_for(["--no-fork", f"--port={port}", "--workers=1", __file__]) == OneHost(
        1, [__file__], port, fork=False
    )


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            ["--workers", "0", __file__],
            "--workers 0: write a whole number, 1 or more: python -m recycle_plugin.launch --workers 4 your_script.py",
        ),
        (["--workers", "-1", __file__], "--workers -1: write a whole number"),
        (["--workers", "four", __file__], "--workers four: write a whole number"),
        (["--workers"], "--workers : write a whole number"),
        (
            ["--port", "4000", __file__],
            "how many workers? Write python -m recycle_plugin.launch --workers 4 your_script.py",
        ),
        (["--workers", "2"], "no training script given: write python -m recycle_plugin.launch"),
        (["--workers", "2", "nowhere.py"], "there is no nowhere.py: write the path of your training script"),
        (["--workers", "2", "/dev/null"], "/dev/null is no file that each worker can read"),
        (["--workers", "2", "/dev"], "/dev is no file that each worker can read, nor a folder with a __main__.py"),
        (
            ["--workers", "2", "--port", "65536", __file__],
            "--port 65536: write a number from 1 to 65535, or no --port at all for a free one",
        ),
        (["--workers", "2", "--port", "http", __file__], "--port http: write a number from 1 to 65535"),
        (["--wrokers", "2", __file__], "--wrokers is no option of the launcher: write those of your script behind it"),
        (
            ["--local_rank=0"],
            "no training script given: deepspeed … --module recycle_plugin.launch your_script.py …, or on one host "
            "python -m",
        ),
        ([], "no training script given: deepspeed"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments, line):
    said = run(arguments)
    assert isinstance(said, str) and said.startswith(f"recycle: error: {line}") and "\n" not in said


def test_a_port_that_somebody_has():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        said = run(["--workers", "2", "--port", str(port), __file__])
    assert (
        said
        == f"recycle: error: port {port} cannot be used (Address already in use): write another --port, or no --port "
        "at all for a free one"
    )


# --- descriptors ---------------------------------------------------------------------------------------


def limited(command: list[str], soft: int, hard: int, **more: str) -> subprocess.CompletedProcess:
    begin = (
        f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return subprocess.run(
        [sys.executable, "-c", begin, *command],
        capture_output=True,
        text=True,
        timeout=100,
        env=dict(os.environ) | more,
    )


RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    "options, more, said",
    [(["--workers", "8"], {}, 1), ([], RANK_0, 1), ([], RANK_0 | {"RANK": "1", "LOCAL_RANK": "1"}, 0)],
    ids=["on one host", "under a launcher", "under a launcher, another rank"],
)
def test_a_job_that_needs_more_descriptors_than_there_can_be_ends_with_one_line(options, more, said):
    ended = limited(["-m", "recycle_plugin.launch", *options, __file__], 24, 24, **more)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and ended.stdout == "" and len(lines) == said, ended.stderr
    for line in lines:
        assert line.startswith(
            "recycle: error: processes may open no more than 24 files and connections here, and each needs up to 96 in "
            "a job of 8 workers (64, and 4 for each)"
        )


def test_the_limit_is_raised_as_far_as_it_may_be_and_what_is_started_inherits_it():
    inherits = (
        "import resource, subprocess, sys; from recycle_plugin.runtime.processes.descriptors import provide; "
        "provide(8); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    ended = limited(["-c", inherits, "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"], 24, 96)
    assert ended.stdout == "(96, 96)\n", ended.stderr


# --- the process that workers are forked from ------------------------------------------------------------


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """``imported(text)`` is the name of a module of that text, which this process's children can import."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "imported_first.py").write_text(text)
        return "imported_first"

    return write


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def started(module: str, timeout_s: float = 100.0) -> None:
    async def play() -> None:
        server = await ServerProcess.start([module], timeout_s)
        assert await server.stop() == ""

    before = children()
    try:
        asyncio.run(play())
    finally:
        assert set(children()) <= set(before)


def test_what_an_import_prints_is_no_answer(imported, capfd):
    started(imported("print('unsafe at any speed')"))
    assert capfd.readouterr().err == "unsafe at any speed\n"


@pytest.mark.parametrize(
    "text, why",
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            r"in the process to fork them from there are 2 threads \(.+, .+\)",
        ),
        (
            "import torch; torch.cuda.is_initialized = lambda: True\n"
            "torch.accelerator.current_accelerator = lambda: torch.device('cuda')",
            "in the process to fork them from an accelerator is in use",
        ),
        (
            "import nothing_of_this_name",
            "the process to fork them from exited with code 1 before it had imported imported_first",
        ),
    ],
)
def test_a_process_that_should_not_be_forked_is_not(imported, text, why):
    with pytest.raises(NoServer, match=f"^{why}$"):
        started(imported(text))


def test_an_import_that_does_not_end(imported):
    with pytest.raises(NoServer, match="^the process to fork them from has not imported imported_first within 0.5 s$"):
        started(imported("import signal; signal.pause()"), 0.5)


def test_numpy_starts_no_threads_there():
    """OpenBLAS does so when it is loaded, unless it is told not to."""
    started("numpy")


async def test_it_outlives_who_asks_badly_and_says_how_a_worker_ended(imported):
    before = set(children())

    server = await ServerProcess.start(["json"])
    address = server.address.replace("@", "\0")
    with socket.socket(socket.AF_UNIX) as nothing, socket.socket(socket.AF_UNIX) as half:
        nothing.connect(address)
        half.connect(address)
        half.sendall(LANGUAGE.encode(Request("none", (), {}, "/"))[:-1])
    ask(server.address, Request("none", (), {}, "/"), [1]).close()
    worker = await ForkedProcess.start(
        server.address, imported("import os, sys; os._exit(int(sys.argv[1]))"), ["5"], dict(os.environ)
    )
    assert await worker.wait() == 5
    lost = await ForkedProcess.start(server.address, imported("import signal; signal.pause()"), [], dict(os.environ))
    for child in set(children()) - before:
        os.kill(child, signal.SIGKILL)
    assert await lost.wait() == -signal.SIGKILL and await server.stop() == "was killed by signal 9 (SIGKILL)"
    with pytest.raises(
        ConnectionError,
        match="imported_first was not started: the process that it is to be forked from can't be reached",
    ):
        await ForkedProcess.start(server.address, "imported_first", [], dict(os.environ))


async def test_it_outlives_a_worker_that_ends_as_who_has_asked_for_it_goes(imported):
    """Both at one look of the server's, which stands still meanwhile."""
    before = set(children())
    server = await ServerProcess.start(["json"])
    (own,) = set(children()) - before
    with ask(
        server.address, Request(imported("import signal; signal.pause()"), (), {**os.environ}, "/"), [1, 2]
    ) as asked:
        worker = psutil.Process(int(asked.recv(100)))
        os.kill(own, signal.SIGSTOP)
        worker.kill()
        while worker.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.001)
    os.kill(own, signal.SIGCONT)
    another = await ForkedProcess.start(server.address, "keyword", [], dict(os.environ))
    assert await another.wait() == 0 and await server.stop() == ""


@pytest.mark.parametrize("ending, code, said", (("'what is wrong'", 1, "what is wrong\n"), ("", 0, ""), ("3", 3, "")))
async def test_a_worker_ends_as_a_process_of_its_own_would(imported, capfd, ending, code, said):
    server = await ServerProcess.start(["json"])
    worker = await ForkedProcess.start(
        server.address, imported(f"import sys; sys.exit({ending})"), [], dict(os.environ)
    )
    assert await worker.wait() == code and await server.stop() == ""
    assert capfd.readouterr().err == said


async def test_a_signal_reaches_a_worker_that_has_only_just_been_forked(imported):
    """The server holds such signals back for itself; were they ignored there, a worker would lose one that comes before
    it is set up.
    """

    server = await ServerProcess.start(["json"])
    module = imported("import signal; signal.pause()")
    for _ in range(40):
        worker = await ForkedProcess.start(server.address, module, [], dict(os.environ))
        os.kill(worker.pid, signal.SIGTERM)
        assert await worker.wait() == -signal.SIGTERM
    assert await server.stop() == ""


def test_a_moment_without_descriptors_ends_no_worker_and_the_next_is_forked_after_it(imported, capfd):
    """Where there is none to come in; and where there is none for what comes along."""
    before, said = set(children()), []

    async def play() -> None:
        server = await ServerProcess.start(["json"])
        (pid,) = set(children()) - before
        idle = psutil.Process(pid).num_fds()
        first = await ForkedProcess.start(
            server.address, imported("import signal; signal.pause()"), [], dict(os.environ)
        )
        while psutil.Process(pid).num_fds() > idle + 2:  # its own of that worker, and what was to be the worker's
            await asyncio.sleep(0.01)
        with none_left(pid):
            second = asyncio.create_task(ForkedProcess.start(server.address, "imported_first", [], dict(os.environ)))
            while "accepted" not in "".join(said):
                said.append(capfd.readouterr().err)
                await asyncio.sleep(0.01)
        for worker in (first, await second):
            os.kill(worker.pid, signal.SIGTERM)
            assert await worker.wait() == -signal.SIGTERM
        assert await server.stop() == ""

    asyncio.run(asyncio.wait_for(play(), 100))
    line = (
        "recycle: warning: at the process that workers are forked from a connection could not be accepted "
        "(Too many open files); it is tried again every 0.5 s, and this is said once\n"
    )
    assert "".join(said) + capfd.readouterr().err == line


REQUEST = LANGUAGE.encode(Request("m", ("a",), {"b": "c"}, "/"))


@given(
    st.binary(max_size=60)
    | st.builds(lambda cut, more: REQUEST[:cut] + more, st.integers(0, len(REQUEST)), st.binary(max_size=20)),
    st.integers(0, 4),
)
@example(REQUEST, 2)
def test_any_request_is_taken_or_refused_and_no_descriptor_is_kept_of_it(data, descriptors):
    open_before = len(os.listdir("/proc/self/fd"))
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        if data:
            near.sendmsg(
                [data[: HEAD.size]],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1] * descriptors))] if descriptors else [],
            )
            near.sendall(data[HEAD.size :])
        near.shutdown(socket.SHUT_WR)
        try:
            request, streams = fork_server._received(far)
        except (OSError, ValueError):
            streams = []
        else:
            assert type(request) is Request and len(streams) == 2
        for stream in streams:
            os.close(stream)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_caller_that_goes_before_it_hears_that_there_is_no_room_ends_no_server(monkeypatch, tmp_path):
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        served = fork_server.Server(listener, lambda: None)
        monkeypatch.setattr(os, "fork", fork)
        with ask(path, Request("module", (), {}, "/"), [1, 2]) as caller:
            served._accept()
            assert caller.recv(100) == b"no process could be forked (Resource temporarily unavailable)\n"
        ask(path, Request("module", (), {}, "/"), [1, 2]).close()
        served._accept()


def test_another_user_gets_no_process(monkeypatch):
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        monkeypatch.setattr(os, "getuid", lambda: -1)
        with pytest.raises(ValueError, match="user"):
            fork_server._received(far)


def test_another_users_process_is_asked_for_nothing(monkeypatch, tmp_path):
    """It may have taken the name of one that has gone; a request has a worker's whole environment."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: -1)
        with pytest.raises(ConnectionError, match=f"can't be reached .it is user {own}'s"):
            ask(path, Request("module", (), {"SECRET": "x"}, "/"), [1, 2])
        monkeypatch.undo()
        with listener.accept()[0] as there:
            assert there.recv(100) == b""


# --- the environment -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, meant",
    [("RECYCLE_SECRETFILE", "RECYCLE_SECRET_FILE"), ("RECYCLE_TSL", "RECYCLE_TLS")],
)
def test_a_misspelt_variable_is_refused_before_anything_starts(monkeypatch, name, meant):
    monkeypatch.setenv(name, "x")
    said = f"recycle: error: the environment has {name}, which the plugin does not know: write {meant}, or unset it"
    assert run(["--workers", "1", __file__]) == said
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run([__file__]) == 1  # the host's first rank says so


def test_a_variable_that_only_begins_as_ours_do_is_named(monkeypatch, capsys):
    monkeypatch.setenv("RECYCLE_BIN", "x")
    monkeypatch.setenv("RECYCLE_TEST_X", "x")
    run([])
    assert "the environment has RECYCLE_BIN, which the plugin does not know: it reads" in capsys.readouterr().err


def test_every_variable_that_is_read_is_known():
    from recycle_plugin.runtime.processes.variables import OWN, USERS

    package = Path(fork_server.__file__).parents[2]
    read = {
        name for path in package.rglob("*.py") for name in re.findall(r'"(RECYCLE_[A-Z_]+[A-Z])"', path.read_text())
    }
    assert {name for name in read if not name.startswith("RECYCLE_TEST")} <= {*USERS, *OWN}


async def test_no_folder_is_made_for_a_secret_that_the_user_places(tmp_path):
    """What is misspelt would be made, and other hosts look elsewhere."""
    path = tmp_path / "nosuch" / "secret"

    with pytest.raises(NoSecret, match=f"^there is no folder {path.parent}, where the job's secret is to be"):
        await hosted.Hosted.start(("127.0.0.1", free_port()), 1, {SETTING: str(path)})
    assert not path.parent.exists()


async def no_room(*_: object) -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def no_witness() -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_where_there_is_no_room_for_a_process_it_is_said_in_one_line(capsys, monkeypatch):
    """As the store's, of a coordinator or of who takes its place, or a worker of a launcher for one host."""
    assert hosted.in_one_line(no_room) == 1
    monkeypatch.setattr(one_host.Launcher, "run", no_room)
    assert one_host.main(one_host.Launcher(["train.py"], 1, 1, "deepspeed", {}, None)) == 1
    monkeypatch.setattr(one_host, "Witness", no_witness)
    assert one_host.main(one_host.Launcher(["train.py"], 1, 1, "deepspeed", {}, None)) == 1
    line = "recycle: error: [Errno 11] Resource temporarily unavailable\n"
    assert capsys.readouterr().err == 3 * line


@pytest.mark.parametrize(
    "master, said",
    [
        ("::1", "has only an IPv6 address, and jobs listen at IPv4 ones: start the launcher with --master_addr"),
        ("no.such.host.invalid", "is unknown on its own host ("),
    ],
)
def test_a_master_without_an_address_that_is_listened_at_is_refused(master, said):
    with pytest.raises(hosted.BadMaster, match=f"^master address {master} {re.escape(said)}"):
        hosted._own_address(master)

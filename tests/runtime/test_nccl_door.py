"""What is set or refused before sums go over NCCL (recycle_plugin/runtime/collectives/nccl_door.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recycle_plugin.errors import RecycleError
from recycle_plugin.launch import with_link
from recycle_plugin.runtime.collectives import nccl_door, transports
from recycle_plugin.runtime.collectives.transports import carry_on_device
from recycle_plugin.runtime.worker import parts

NCCL = "libnccl.so.2"
SETS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
}
LEFT = {"NCCL_CUMEM_ENABLE": "1", "NCCL_COMM_BLOCKING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
WRONG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("3", "2", "1"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1",),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("1",),
    "TORCH_NCCL_ENABLE_MONITORING": ("1",),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1",),
    "TORCH_NCCL_PROPAGATE_ERROR": ("1",),
    "TORCH_NCCL_DESYNC_DEBUG": ("1",),
    "NCCL_NVLS_ENABLE": ("1", "2"),
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": ("1800", "21", "0", "-1", "soon"),
    "NCCL_CUMEM_ENABLE": ("0",),
    "NCCL_COMM_BLOCKING": ("1",),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1",),
}


@pytest.fixture
def fit(monkeypatch):
    monkeypatch.setattr(nccl_door, "unfit", lambda: iter(()))


def test_what_is_unset_is_set_and_what_fits_stays(fit):
    environment: dict[str, str] = {}
    nccl_door.prepare(environment)
    assert environment == SETS
    own = dict(SETS, TORCH_NCCL_NONBLOCKING_TIMEOUT="20", TORCH_NCCL_ENABLE_MONITORING="false", **LEFT)
    kept = dict(own)
    nccl_door.prepare(own)
    assert own == kept


def test_the_launcher_sets_what_cuda_reads_at_its_start_for_jobs_over_nccl(tmp_path):
    over, other = tmp_path / "over.json", tmp_path / "other.json"
    over.write_text('{"recycle": {"enabled": true, "device_link": "nccl"}}')
    other.write_text('{"recycle": {"enabled": true, "device_link": "host"}}')
    own = {"CUDA_MODULE_LOADING": "LAZY", "HOME": "/"}
    found = with_link(own, ["train.py", "--deepspeed_config", str(over)])
    assert found == own | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} and not [*nccl_door.objections(found)]
    for command in (
        ["train.py", "--deepspeed_config", str(other)],
        ["train.py"],
        ["--deepspeed_config", str(tmp_path)],
    ):
        assert with_link(own, command) == own


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_what_would_end_or_hang_a_survivor_is_refused_in_one_line(fit, name, value):
    environment = {name: value}
    with pytest.raises(RecycleError, match=rf"^{name} is '{value}', and recycle.device_link is \"nccl\": leave it out"):
        nccl_door.prepare(environment)
    assert environment == {name: value}
    (said,) = nccl_door.objections(environment)
    assert "\n" not in said


@pytest.mark.parametrize("release", [(2, 26, 2), (2, 27, 3), (2, 28, 2), (2, 28, 9), (2, 29, 7), (2, 30, 7)])
def test_releases_that_will_do(release):
    assert nccl_door.wrong_release(release) is None


@pytest.mark.parametrize(
    "release, said",
    [
        ((2, 25, 1), "2.25.1: groups can be aborted from 2.26.2 on; install a later one"),
        ((2, 28, 3), "2.28.3: 2.28.3 to 2.28.8 crash where a group is aborted; install a later one"),
        ((2, 28, 8), "2.28.8: 2.28.3 to 2.28.8 crash where a group is aborted; install a later one"),
        ((2, 31, 0), "2.31.0: from 2.31.0 on an abort may wait for members that are gone; install an earlier one"),
        (None, 'no library of NCCL\'s is loaded that tells its release: write "host"'),
    ],
)
def test_releases_that_will_not(release, said):
    loaded = "" if release is None else "the loaded NCCL is "
    assert nccl_door.wrong_release(release) == f'recycle.device_link is "nccl", and {loaded}{said}'


@pytest.mark.parametrize("code, release", [(23007, (2, 30, 7)), (22602, (2, 26, 2)), (None, None)])
@pytest.mark.parametrize("preloaded", [False, True])
def test_the_release_is_that_of_the_library_that_torch_calls(tmp_path, code, release, preloaded):
    """As torch does it: its library needs one of NCCL, and another may be there first, under the same name."""
    torch_s = libraries(tmp_path, own=22809 if preloaded else code, other=code)
    asks = f"from ctypes import CDLL; CDLL({str(torch_s)!r}); CDLL({str(tmp_path / 'own' / NCCL)!r}, 256); "
    asks += "from recycle_plugin.runtime.collectives.nccl_door import loaded_release; print(loaded_release())"
    first = {"LD_PRELOAD": str(tmp_path / "other" / NCCL)} if preloaded else {}
    said = subprocess.run([sys.executable, "-c", asks], env=os.environ | first, capture_output=True, text=True)
    assert (said.stdout.strip(), said.stderr) == (str(release), "")


def libraries(folder: Path, own: int | None, other: int | None) -> Path:
    """A library with torch's name, which needs folder/own's NCCL of this release; folder/other has the other one."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler here")
    for name, code in (("own", own), ("other", other)):
        (folder / name).mkdir()
        (folder / f"{name}.c").write_text(f"int ncclGetVersion(int *v) {{ *v = {code or 0}; return {not code:d}; }}")
        options = ["-shared", "-fPIC", f"-Wl,-soname,{NCCL}", "-o", str(folder / name / NCCL)]
        subprocess.run([compiler, *options, str(folder / f"{name}.c")], check=True)
    (folder / "torch.c").write_text("int ncclGetVersion(int *); int calls(void) { int v; return ncclGetVersion(&v); }")
    made = folder / nccl_door.CALLER
    options = ["-shared", "-fPIC", f"-L{folder / 'own'}", f"-l:{NCCL}", f"-Wl,-rpath,{folder / 'own'}"]
    subprocess.run([compiler, "-o", str(made), str(folder / "torch.c"), *options], check=True)
    return made


def test_a_process_that_has_loaded_none_says_so():
    assert nccl_door.loaded_release() is None
    assert next(nccl_door.unfit()).endswith('write "host"')


@pytest.mark.parametrize("kind", ["cpu", "xpu"])
def test_a_worker_without_a_gpu_is_refused(kind, coordinator):
    with pytest.raises(
        RecycleError, match=f'^recycle.device_link is "nccl", and this worker computes on {kind}: write'
    ):
        carry_on_device(coordinator.session(0), "nccl", kind, {})


def test_it_holds_once_the_door_is_passed(fit, coordinator):
    session, environment = coordinator.session(0), {}
    carry_on_device(session, "host", "cpu", environment)
    assert session.device_link == "host" and not environment
    carry_on_device(session, "nccl", transports.NVIDIA, environment)
    assert session.device_link == "nccl" and environment == SETS


@pytest.mark.parametrize(
    "what, said",
    [
        ({"shards": 2}, "seats of several processes"),
        ({"compute": len}, "jobs whose script calls backward\\(\\) itself"),
        ({"pushed": len}, "jobs whose script calls backward\\(\\) itself"),
    ],
)
def test_jobs_in_which_it_is_not_supported_are_refused(what, said):
    framework = SimpleNamespace(**{"shards": 1, "compute": None, "pushed": None} | what)
    parts._check_link("host", framework)
    with pytest.raises(RecycleError, match=f'^recycle.device_link is "nccl", which is not supported in {said} yet'):
        parts._check_link("nccl", framework)

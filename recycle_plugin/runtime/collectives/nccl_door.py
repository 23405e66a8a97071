"""Preconditions for losing members of a group over NCCL: environment variables, and NCCL's release.

torch is imported only to ask what this process has loaded; ``recycle doctor`` runs without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from recycle_plugin.errors import RecycleError

UNSET = ""
NO = ("0", "false", "False", "n", "no", "off")
CALL_S, LONGEST_S = 10, 20  # seconds of a call of NCCL's: the value we set, and the most allowed
OLDEST_TORCH = "2.7.1"  # earlier ones hang if a group is bound to a device
OLDEST, FIRST_UNTRIED = (2, 26, 2), (2, 31, 0)
BAD = (((2, 28, 3), (2, 28, 8), "crash where a group is aborted"),)

STORE = "else torch asks the group's store for keys that it does not have here, and ends the process"


class Variable(NamedTuple):
    """A variable that gets ``value`` if it is unset; a value set by others must be in ``fits``."""

    name: str
    value: str
    fits: tuple[str, ...]
    why: str


VARIABLES = (
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        NO,
        "else torch ends the process after an error, or aborts a group by itself without telling that its sums are "
        "garbage",
    ),
    Variable("TORCH_NCCL_BLOCKING_WAIT", "0", NO, "else a lost member blocks the others where nothing ends it"),
    Variable("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", NO, "else an error after an abort ends the process"),
    Variable("TORCH_NCCL_ENABLE_MONITORING", "0", NO, "else torch ends a process whose abort takes long"),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", NO, "else a dump and the holder of Python's lock wait for each other"),
    Variable("TORCH_NCCL_PROPAGATE_ERROR", "0", NO, STORE),
    Variable("TORCH_NCCL_DESYNC_DEBUG", "0", NO, STORE),
    Variable("NCCL_NVLS_ENABLE", "0", ("0",), "NVLink SHARP's memory is shared with the lost member"),
    Variable("NCCL_CUMEM_ENABLE", UNSET, ("1",), "else memory is shared in a way that a member's death makes invalid"),
    Variable("NCCL_COMM_BLOCKING", UNSET, ("0",), "else no call of NCCL's can be aborted"),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        UNSET,
        tuple(map(str, range(2, 33))),
        "with one connection a stuck sum blocks all streams",
    ),
)
AT_START = {  # read by CUDA as a process starts, so the launcher sets them
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # else links share a queue, and a stuck one holds up the others
    "CUDA_MODULE_LOADING": "EAGER",  # a kernel that is loaded beside a stuck one waits for it (measured)
}
CALLER = "libtorch_cuda.so"
LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"  # seconds that a call to a lost peer may take; an abort may wait as long


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the unset variables in the environment of this process; raises RecycleError for unfit values and releases."""
    for wrong in (*objections(environment), *unfit()):
        raise RecycleError(wrong)
    environment.update(sets(environment))


def sets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the unset variables that the plugin sets."""
    wanted = {variable.name: variable.value for variable in VARIABLES} | {LIMIT: str(CALL_S)}
    return {name: value for name, value in wanted.items() if value != UNSET and name not in environment}


def at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the unset variables that the launcher sets for workers."""
    return {name: value for name, value in AT_START.items() if name not in environment}


def objections(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each mistake in the environment."""
    for variable in VARIABLES:
        given = environment.get(variable.name)
        if given is not None and given not in variable.fits:
            yield (
                f'{variable.name} is {given!r}, and recycle.device_link is "nccl": leave it out, or write '
                f"{variable.fits[0]}; {variable.why}"
            )
    given = environment.get(LIMIT, "1")
    if not given.isdecimal() or not 0 < int(given) <= LONGEST_S:
        yield (
            f'{LIMIT} is {given!r}, and recycle.device_link is "nccl": leave it out, or write seconds, from 1 to '
            f"{LONGEST_S}; a call whose peer is gone may block for so long"
        )


def unfit() -> Iterator[str]:
    """Yield one line for each loaded release that does not fit."""
    import torch

    if not torch.distributed.is_nccl_available():
        yield 'recycle.device_link is "nccl", and torch is built without NCCL here: write "host"'
        return
    if Version(torch.__version__) < Version(OLDEST_TORCH):
        yield f'recycle.device_link is "nccl", and torch is {torch.__version__}: it needs {OLDEST_TORCH} or later'
    wrong = wrong_release(loaded_release())
    if wrong is not None:
        yield wrong


def loaded_release() -> tuple[int, int, int] | None:
    """Return the release of NCCL that torch calls in this process; None if it calls none.

    torch.cuda.nccl.version() is the one torch was compiled with. Several may be loaded: torch loads its own beside one
    of LD_PRELOAD, and calls the latter. So this resolves the symbol as the linker does from torch's library.
    """
    mapped = Path("/proc/self/maps").read_text().split()
    code = ctypes.c_int()
    for path in [word for word in mapped if word.endswith(CALLER)][:1]:
        with suppress(AttributeError):
            library: Any = ctypes.CDLL(path)
            if library.ncclGetVersion(ctypes.byref(code)) == 0:
                return code.value // 10000, code.value // 100 % 100, code.value % 100
    return None


def wrong_release(release: tuple[int, int, int] | None) -> str | None:
    """Return why groups over this release of NCCL cannot lose members, in one line; None if they can."""
    if release is None:
        return 'recycle.device_link is "nccl", and no library of NCCL\'s is loaded that tells its release: write "host"'
    if release < OLDEST:
        return f"{_loaded(release)}: groups can be aborted from {_text(OLDEST)} on; install a later one"
    for first, last, does in BAD:
        if first <= release <= last:
            return f"{_loaded(release)}: {_text(first)} to {_text(last)} {does}; install a later one"
    if release >= FIRST_UNTRIED:
        return (
            f"{_loaded(release)}: from {_text(FIRST_UNTRIED)} on an abort may wait for members that are gone; install "
            "an earlier one"
        )
    return None


def _loaded(release: tuple[int, int, int]) -> str:
    return f'recycle.device_link is "nccl", and the loaded NCCL is {_text(release)}'


def _text(release: tuple[int, int, int]) -> str:
    return ".".join(map(str, release))

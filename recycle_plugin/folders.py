"""Write folders and files that appear under their name whole or not at all, and say why one can't be written."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar
from zipfile import ZipFile, is_zipfile
from zlib import crc32

from recycle_plugin.errors import NotSaved, RecycleError

T = TypeVar("T")
READ = 1 << 20  # bytes at a time
SHOWN = 300  # characters of an error on weights that do not fit
UNFINISHED = ".incomplete-"  # in the name of a checkpoint while it is written
# Age in seconds of another job's leftovers at which no process writes to them any more: each file takes minutes, and
# all are written at once.
STALE_S = 3600.0
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def put_in_place(made: Path, final: Path) -> None:
    """Give the complete folder ``made`` the name ``final`` in one step; an old ``final`` gets the name of ``made``. If
    the file system can't exchange two names, there is a moment without ``final``.
    """
    for each in (*(path for path in made.rglob("*") if path.is_dir()), made):
        sync(each)
    if not final.exists():
        made.rename(final)
    elif not _exchange(made, final):
        aside = made.with_name(f"{made.name}-replaced")
        final.rename(aside)
        try:
            made.rename(final)
        except OSError:
            aside.rename(final)
            raise
        aside.rename(made)
    sync(final.parent)


def prepared(path: Path, text: str, by: str = "") -> Path:
    """Write ``text`` to disk beside ``path``, and return the file, for :func:`replace` to put it in place. ``by``:
    distinguishes writers if there may be several at once. Raises NotSaved.
    """
    unfinished = path.with_name(f".{path.name}{by}.unfinished")
    try:
        write(unfinished, lambda file: file.write(text.encode()), path)
    except NotSaved:
        with suppress(OSError):  # with a full disk this may fail too
            unfinished.unlink()
        raise
    return unfinished


def replace(made: Path, path: Path) -> None:
    """Replace ``path`` by the file ``made`` in one step."""
    made.replace(path)
    sync(path.parent)


def put(path: Path, text: str, by: str = "") -> None:
    """Replace ``path`` by ``text`` in one step; ``by`` as in :func:`prepared`. Raises NotSaved."""
    replace(prepared(path, text, by), path)


def make(folder: Path) -> None:
    """Make a folder and its parents. Raises NotSaved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotSaved(refusal(folder, error)) from error


def write(path: Path, into: Callable[[CheckedFile], object], called: Path | None = None) -> None:
    """Write to the file ``path`` by ``into(output)``, flush it to the disk, and read it back to check it. Raises
    NotSaved for any error; the message names ``called`` if given, the file that ``path`` will replace.
    """
    output = None
    try:
        with path.open("wb") as file:
            output = CheckedFile(file)
            into(output)
            output.flush()
            os.fsync(file.fileno())
        if _crc(path) != output.crc:
            raise OSError(errno.EIO, "what was read back is not what was written")
    except Exception as error:  # an object that can't be pickled may raise anything
        raise NotSaved(refusal(called or path, (output and output.refused) or error)) from error


def verify(path: Path) -> None:
    """Raise RecycleError if a file of ``torch.save`` is damaged: ``torch.load`` ignores its CRCs. Reads all of it."""
    try:
        if not is_zipfile(path):
            return  # not torch.save's format: torch reports it
        with ZipFile(path) as file:
            damaged = file.testzip()
    except Exception as error:  # from changed bytes zipfile raises anything
        raise RecycleError(f"{path} is damaged: {str(error) or type(error).__name__}") from error
    if damaged is not None:
        raise RecycleError(f"{path} is damaged: the CRC of {damaged} is wrong")


def named_by(latest: Path) -> Path:
    """Return the folder beside the file ``latest`` that it names. Raises RecycleError if it can't be read."""
    try:
        return latest.parent / latest.read_text().strip()
    except (OSError, ValueError) as error:
        raise RecycleError(f"{latest} {unread(error)}: name the checkpoint to load") from error


def unread(error: Exception) -> str:
    """Return why a checkpoint can't be read, in our words instead of the library's that raised ``error``."""
    if isinstance(error, OSError) and error.strerror:
        return f"can't be read ({error.strerror})"
    return "is damaged, incomplete, or not of such a job"


def unfit(error: Exception) -> str:
    """Return which weights of a checkpoint do not fit the module if that is torch's error, else ""."""
    first, _, rest = str(error).partition("\n")
    return " ".join(rest.split())[:SHOWN] if first.startswith("Error(s) in loading state_dict") else ""


class CheckedFile:
    """A file for ``torch.save``, with the data's CRC, and in ``refused`` the system's error that torch replaces."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.refused: OSError | None = None
        self.crc = 0

    def write(self, data: bytes | memoryview) -> int:
        self.crc = crc32(data, self.crc)
        return self._noting(lambda: self._file.write(data))

    def flush(self) -> None:
        self._noting(self._file.flush)

    def _noting(self, do: Callable[[], T]) -> T:
        try:
            return do()
        except OSError as error:
            self.refused = self.refused or error
            raise


def _crc(path: Path) -> int:
    """Return the CRC of a file, read from the disk instead of the cache as far as the system allows."""
    crc = 0
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(READ):
            crc = crc32(piece, crc)
    return crc


def refusal(path: Path | str, error: Exception) -> str:
    """Return why ``path``, a file or a description, can't be written, in one line."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        return f"{path} can't be written: {type(error).__name__}: {' '.join(str(error).split())}"
    room = _room(path) if number in FULL and isinstance(path, Path) else ""
    return f"{REFUSALS.get(number) or os.strerror(number)}: {path} can't be written{room}"


FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSALS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EROFS: "disk read-only",
    errno.EACCES: "permission denied",
    errno.EIO: "disk broken (input/output error)",
}


def _room(path: Path) -> str:
    try:
        there = path.absolute()
        found = shutil.disk_usage(next(each for each in (there, *there.parents) if each.exists()))
    except OSError:
        return ""
    return f", {size(found.free)} of {size(found.total)} are free"


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def remove(path: Path) -> None:
    """Remove a folder or a file that other processes may be removing or writing to."""
    if path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def taken(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder, some of which may disappear meanwhile."""
    total = 0
    for each in (path, *path.rglob("*")):
        with suppress(OSError):
            total += each.stat().st_size if each.is_file() else 0
    return total


def written_last(folder: Path) -> float:
    """Return when a folder or a file in it was last written, in seconds since the epoch."""
    times = []
    for path in (folder, *folder.rglob("*")):
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # removed meanwhile
            pass
    return max(times, default=time.time())


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return (
        exchange is not None
        and exchange(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
    )

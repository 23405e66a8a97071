"""Collect the wheels for a machine that has torch and no package index: ``scripts/on_gpu --pack DIR``.

They are the dependencies of this package without those of torch, in the releases installed here, for that machine's
Python and system. Those that it already has in a suitable release are left out, by a file with its ``pip list``
(--beside). The wheels go to DIR/part-1, DIR/part-2, ..., each small enough to be carried at once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

OURS, GIVEN = "recycle_plugin", "torch"
EXTRAS = ("", "deepspeed", "megatron", "report")  # of ours, which the stages need
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
PART = 60 << 20  # bytes
BUILDS = "setuptools"  # needed there to install this checkout
PIP_S = 600.0  # of a call of pip
SOURCES = ("antlr4-python3-runtime", "deepspeed")  # released as sources only; both are pure Python


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect the wheels into the folder that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(prog="on_gpu --pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="that machine's (default: 3.12)")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="what `pip list` prints there: that is left out")
    found = parser.parse_args(arguments)
    if list(found.folder.glob("part-*")):
        return complain(f"{found.folder} has parts already: name an empty folder")
    try:
        there = listed(found.beside.read_text()) if found.beside else {}
    except (OSError, ValueError) as error:
        return complain(f"--beside {found.beside}: {error}")
    names = needed(found.python, there)
    try:
        with tempfile.TemporaryDirectory() as folder:
            collect(names, found.python, Path(folder))
            sizes = divide(sorted(Path(folder).glob("*.whl")), found.folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        return complain(f"the wheels could not be collected: {error}")
    for part, size in sizes.items():
        print(f"{part}: {size / (1 << 20):.1f} MiB")
    print(f"{len(names)} wheels, {sum(sizes.values()) / (1 << 20):.1f} MiB in {len(sizes)} parts")
    return 0


def complain(line: str) -> int:
    """Print what is wrong, and return the exit code."""
    print(f"on_gpu --pack: {line}", file=sys.stderr)
    return 2


def needed(python: str, there: Mapping[str, Version]) -> list[str]:
    """Return the distributions that this package needs, without torch's and those that are ``there`` already."""
    found = closure(OURS, python, without=closure(GIVEN, python))
    asked = {name: {canonicalize_name(one.name): one.specifier for one in wanted(name, python)} for name in found}
    own = canonicalize_name(OURS)
    brought = found - there.keys() | {own}

    def does(name: str) -> bool:
        """Return whether all that is brought allows the release there, and replaces nothing that this one needs."""
        asking = (asked[by][name] for by in brought if name in asked[by])
        allowed = all(each.contains(there[name], prereleases=True) for each in asking)
        return allowed and not asked[name].keys() & brought & there.keys()

    while more := {name for name in found - brought if not does(name)}:
        brought |= more
    return sorted(brought - {own} | {BUILDS} - there.keys())


def listed(text: str) -> dict[str, Version]:
    """Return {name: release} from the output of ``pip list``, as columns or with --format=freeze. Raises ValueError."""
    rows = [line.replace("==", " ").split() for line in text.splitlines()]
    found = {}
    for row in rows:
        if len(row) > 1 and row[1][0].isdigit():
            found[canonicalize_name(row[0])] = Version(row[1])
    if not found:
        raise ValueError("not what `pip list` prints: a name and a release in each line")
    return found


def closure(root: str, python: str, without: Iterable[str] = ()) -> set[str]:
    """Return ``root`` and its installed dependencies, except those in ``without`` or reached only through them."""
    found, todo = set(without), [root]
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in found:
            found.add(name)
            todo += [one.name for one in wanted(name, python)]
    return found - set(without)


def wanted(name: str, python: str) -> list[Requirement]:
    """Return a distribution's requirements, ours with EXTRAS, others without; [] if it is not installed here."""
    versions = {"python_version": python, "python_full_version": f"{python}.0"}
    extras = EXTRAS if name == canonicalize_name(OURS) else ("",)
    try:
        found = map(Requirement, requires(name) or ())
    except PackageNotFoundError:
        return []
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({**versions, "extra": extra}) for extra in extras)
    ]


def collect(names: Sequence[str], python: str, folder: Path) -> None:
    """Have pip put the wheels of the distributions into ``folder``. Raises CalledProcessError and TimeoutExpired."""
    pinned = {name: f"{name}=={version(name)}" for name in names}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = [pinned[name] for name in SOURCES if name in pinned]
    ready = [text for name, text in pinned.items() if name not in SOURCES]
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
    # DeepSpeed's setup looks for torch, which is in this environment
    for command in (
        ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *built],
        ["download", *options, "--dest", str(folder), *ready],
    ):
        subprocess.run([*pip, *command], check=True, timeout=PIP_S, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def divide(wheels: Sequence[Path], folder: Path) -> dict[str, int]:
    """Copy the wheels into parts of at most PART bytes, the largest first, and return {part: its bytes}."""
    sizes: list[int] = []
    for wheel in sorted(wheels, key=lambda path: (-path.stat().st_size, path.name)):
        size = wheel.stat().st_size
        place = next((number for number, filled in enumerate(sizes) if filled + size <= PART), len(sizes))
        sizes += [0] * (place == len(sizes))
        sizes[place] += size
        target = folder / f"part-{place + 1}" / wheel.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read_bytes())
    return {f"part-{number}": size for number, size in enumerate(sizes, 1)}


if __name__ == "__main__":
    sys.exit(main())

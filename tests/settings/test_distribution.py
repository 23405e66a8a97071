"""The wheel and the sdist by themselves: in an empty environment the plain script of the documents trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_plugin import __version__

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1200  # of a pip call that has to fetch torch
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]


def run(*command: object, cwd: Path, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RES_OPTIONS")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def script() -> str:
    text = (ROOT / "recycle_plugin/docs/jobs.md").read_text().partition("## Without DeepSpeed")[2]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1].replace("< 200", "< 20")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("checkout")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    subprocess.run(["tar", "-cf", folder / "all.tar", "-T", "-"], cwd=ROOT, input=names, text=True, check=True)
    subprocess.run(["tar", "-xf", "all.tar"], cwd=folder, check=True)
    return folder


def built(folder: Path, kind: str, out: Path) -> Path:
    out.mkdir()
    code = f"from setuptools.build_meta import build_{kind} as build; build({str(out)!r})"
    run(sys.executable, "-c", code, cwd=folder)
    (path,) = out.iterdir()
    return path


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_plain_script_trains_where_nothing_else_is_installed(checkout: Path, tmp_path: Path, kind: str) -> None:
    package = built(checkout, kind, tmp_path / "built")
    run(sys.executable, "-m", "venv", "fresh", cwd=tmp_path)
    python = tmp_path / "fresh/bin/python"
    pins = {"PIP_CONSTRAINT": str(ROOT / "scripts/constraints.txt")}
    run(python, "-m", "pip", "install", "--quiet", package, cwd=tmp_path, **pins)
    absent = "import importlib.util as u; print([n for n in ('deepspeed', 'megatron', 'matplotlib') if u.find_spec(n)])"
    assert run(python, "-c", absent, cwd=tmp_path).strip() == "[]"
    (tmp_path / "train.py").write_text(script())
    said = run(python, "-m", "recycle_plugin.launch", "--workers", 4, "train.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "step: 20: loss" in said and "all workers have left after step 20" in said
    if kind == "wheel":
        with_the_lab_beside_it(python, checkout, tmp_path)


def with_the_lab_beside_it(python: Path, checkout: Path, folder: Path) -> None:
    """The campaign is there where the lab's own distribution is installed too, and not before."""
    assert "campaign" not in run(python.with_name("recycle"), "--help", cwd=folder)
    lab = built(checkout / "recycle_plugin/lab", "wheel", folder / "lab")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", lab, cwd=folder)
    assert "nothing was wrong" in run(python.with_name("recycle"), "campaign", "--seed", 3, cwd=folder)


def test_the_lab_has_the_version_of_the_package() -> None:
    text = (ROOT / "recycle_plugin/lab/pyproject.toml").read_text()
    assert f'version = "{__version__}"' in text and f"recycle_plugin=={__version__}" in text
    packages = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "recycle_plugin/lab").rglob("*.py")}
    assert {name.replace("/", ".") for name in packages} == set(re.findall(r'^    "([\w.]+)",$', text, re.MULTILINE))

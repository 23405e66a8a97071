"""Releases that the plugin is not written for are refused by name where it is switched on."""

from __future__ import annotations

import sys
import types
from importlib import metadata

import pytest

from recycle_plugin.adapters.deepspeed.entry import check_versions
from recycle_plugin.errors import RecycleError


@pytest.fixture
def installed(monkeypatch) -> dict[str, str]:
    """Releases; a test changes them."""
    known = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "megatron-core": "0.16.1"}
    monkeypatch.setattr(metadata, "version", known.__getitem__)
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    return known


def test_what_is_installed_here_is_in_the_ranges():
    check_versions()


@pytest.mark.parametrize(
    "name, release, needs",
    [
        ("deepspeed", "0.18.9", ">=0.19.3,<0.20"),
        ("deepspeed", "0.19.2", ">=0.19.3,<0.20"),
        ("deepspeed", "0.20.0", ">=0.19.3,<0.20"),
        ("torch", "2.5.1+cu121", ">=2.6"),
        ("megatron-core", "0.17.0", ">=0.16,<0.17"),
    ],
)
def test_a_release_outside_is_refused_in_one_line(installed, name, release, needs):
    installed[name] = release
    with pytest.raises(RecycleError) as caught:
        check_versions()
    said = str(caught.value)
    assert (
        said == f"{name} {release} is installed, and the plugin needs {needs}: pip install '{name}{needs}', or set "
        "recycle.enabled to false"
    )


def test_megatron_core_counts_only_where_it_is_used(installed, monkeypatch):
    installed["megatron-core"] = "0.12.0"
    monkeypatch.delitem(sys.modules, "megatron.core")
    check_versions()


@pytest.mark.parametrize("release", ("0.19.3", "0.19.8", "0.19.9.dev1"))
def test_releases_inside_are_taken(installed, release):
    installed["deepspeed"] = release
    check_versions()

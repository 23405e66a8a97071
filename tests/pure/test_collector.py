"""Python's collector of cycles rests while what is left of a step is worked out, and no longer."""

from __future__ import annotations

import gc

import pytest

from recycle_plugin.core.worker.collector import no_collections


@pytest.fixture
def collections(request: pytest.FixtureRequest) -> list[str]:
    """The phases of what the collector does during a test."""
    seen: list[str] = []
    callback = lambda phase, info: seen.append(phase)
    gc.callbacks.append(callback)
    request.addfinalizer(lambda: gc.callbacks.remove(callback))
    return seen


def test_nothing_is_collected_inside_and_all_is_again_behind_it(collections: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), no_collections():
        _many = [(number, (number,)) for number in range(100_000)]
        assert not collections
        1 / 0  # noqa: B018
    assert gc.isenabled()
    _more = [(number, (number,)) for number in range(100_000)]
    assert collections


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with no_collections(), no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

"""Golden texts and Hypothesis settings for the tests that need no torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile(
    "pure",
    parent=settings.get_profile("fixed"),
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pure")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden texts instead of comparing with them"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """``golden(name, text)`` compares with tests/pure/golden/name, or rewrites it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden", default=False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        assert path.is_file(), f"no golden text {path}: run pytest tests/pure --update-golden and review it"
        assert text + "\n" == path.read_text()

    return compare

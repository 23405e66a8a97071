"""Fixtures of several commands' tests."""

from tests.support.doctor import doctor, surroundings

__all__ = ["doctor", "surroundings"]

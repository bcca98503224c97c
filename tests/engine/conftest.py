"""Holds the fixture that the tests of this folder share."""

from tests.support.engine.isas import isa

__all__ = ["isa"]

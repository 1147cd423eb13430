"""Fixtures for tests of the examination: those of the commands, whose stores and peers they use."""

from tests.cli.conftest import secret_file, store

__all__ = ["secret_file", "store"]

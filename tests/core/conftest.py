"""Ranks start from a server process that takes seconds to start once: tests that measure time must not meet that."""

import os

import pytest

from nanopar_core import testing


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    testing.run(1, os.getpid)

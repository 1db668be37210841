from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Launchers

from slipstream.launch import Launcher


@pytest.fixture(scope="session")
def launchers() -> Iterator[Launchers]:
    made = Launchers()
    yield made
    made.close()


@pytest.fixture
def warm(launchers: Launchers) -> Launcher:
    """A launcher that has imported everything."""
    return launchers.take()

"""Groups of processes that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """As many processes as the parameter says."""
    group = Ranks(request.param)
    yield group
    group.close()

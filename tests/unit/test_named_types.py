"""What messages call a thing that was given."""

from __future__ import annotations

import numpy as np
import pytest

from flash_helpers.messages import named_type


@pytest.mark.parametrize(
    ("value", "name"),
    [(None, "None"), (3, "an int"), ([], "a list"), (np.zeros(1), "an ndarray"), (1.5, "a float")],
)
def test_types_have_their_article(value: object, name: str) -> None:
    assert named_type(value) == name

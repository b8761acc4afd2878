"""Where captured tensors may be: on the device of the queries, of which a caller may not say the number."""

from __future__ import annotations

import pytest
import torch

from flash_attention.mods.recording import is_on

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("device", "wanted", "right"),
    [
        ("cuda:0", "cuda", True),
        ("cuda:1", "cuda", True),
        ("cuda:0", "cuda:0", True),
        ("cuda:1", "cuda:0", False),
        ("cpu", "cuda", False),
        ("cpu", "cpu", True),
    ],
)
def test_a_device_without_a_number_is_any_of_its_type(device: str, wanted: str, right: bool) -> None:
    assert is_on(torch.device(device), torch.device(wanted)) is right

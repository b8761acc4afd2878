"""What the Hopper family's tensor maps can say, and the reasons for what they cannot."""

from __future__ import annotations

import pytest
import torch

from flash_attention.checks.tma import stride_obstacle

X = torch.zeros(2, 64, 4, 128, dtype=torch.float16)
QKV = torch.zeros(2, 64, 3, 4, 128, dtype=torch.float16)


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.transpose(1, 2),
        QKV[:, :, 1],
        X[..., 8:72],
        X[:, ::3],
        X[0],
        X[:, :, :1].as_strided((2, 64, 1, 128), (64 * 512, 512, 7, 1)),  # a size of 1 with an odd stride
        X[:1].expand(1, -1, -1, -1),
        torch.zeros(2, 0, 4, 128, dtype=torch.float16),
    ],
    ids=["contiguous", "heads_first", "of_qkv", "columns", "rows", "packed", "odd_stride", "one", "empty"],
)
def test_tensors_that_can_be_said(x: torch.Tensor) -> None:
    assert stride_obstacle(k=x) is None


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (X[:1].expand(3, -1, -1, -1), "stride of 0 in dimension 0; strides must be positive"),
        (X[:, :, :1].expand(-1, -1, 4, -1), "stride of 0 in dimension 2"),
        (
            torch.zeros(8, dtype=torch.float16).as_strided((1, 1, 2, 8), (8, 8, 0, 1)),
            "stride of 0 in dimension 2",
        ),
        (
            torch.empty((2, 1, 1, 8), dtype=torch.float16, device="meta").as_strided(
                (2, 1, 1, 8), (1 << 39, 8, 8, 1)
            ),
            "stride of 1099511627776 bytes in dimension 0",
        ),
    ],
)
def test_reasons(x: torch.Tensor, reason: str) -> None:
    assert str(stride_obstacle(q=X, k=x)).startswith("k has a ")
    assert reason in str(stride_obstacle(q=X, k=x))


@pytest.mark.parametrize(
    "x",
    [X[..., ::2], X[..., 4:68], torch.zeros(2, 64, 4, 40, dtype=torch.float16)[..., :36]],
    ids=["last_stride", "address", "rows"],
)
def test_what_is_copied_before_a_launch_is_no_obstacle(x: torch.Tensor) -> None:
    assert stride_obstacle(k=x) is None

"""Lines of docs/contract.md about calls on a part of the keys: masks that are moved, partial outputs, SMs."""

from __future__ import annotations

import pytest
import torch
from test_contract import attend, attend_packed, check, column, counted, packed, ramps

from flash_attention.cached import attention_cached
from flash_helpers.test.utils import reference

OFFSETS = [-400, -90, -31, -1, 1, 5, 64, 130, 400]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (20, 9)}, {"window": (20, 9), "causal": True}]
)
def test_c36_a_diagonal_offset(device, offset, options):
    for seq_q, seq_k in ((90, 90), (50, 130), (130, 50), (1, 300)):
        check(*ramps((1, seq_q, 4, 64), (1, seq_k, 2, 64), device), diagonal_offset=offset, **options)


def test_c36_an_offset_moves_both_limits(device):
    given = counted(5, 7, device)
    assert column(attend(*counted(3, 7, device), causal=True, diagonal_offset=-2)) == [2.0, 2.5, 3.0]
    moved = attend(*given, window=(3, 1), diagonal_offset=2)
    assert torch.equal(moved, attend(*given, window=(1, 3)))
    assert torch.equal(attend(*given, diagonal_offset=5), attend(*given))
    # A part of the keys that ends 3 keys before the last query's place, beside the whole.
    q, k, v = ramps((1, 40, 2, 64), (1, 60, 2, 64), device)
    _, lse = attend(q, k[:, :57], v[:, :57], causal=True, diagonal_offset=3, return_lse=True)
    _, expected = reference(q, k, v, causal=True)
    torch.testing.assert_close(lse[:, :, :37].double(), expected[:, :, :37], atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("bad", [1.0, True, "1", None, 0.0, False])
def test_c36_bad_offsets(device, bad):
    with pytest.raises(TypeError, match=r"diagonal_offset is .*; it must be an int"):
        attend(*counted(3, 3, device), diagonal_offset=bad)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (20, -3)}, {"window": (-2, 30)}, {"window": (-9, 4)}]
)
def test_c36_packed_and_cached(device, options):
    arguments, alone = packed(device)
    for offset in (-40, -3, 2, 19):
        o, lse = attend_packed(*arguments, return_lse=True, diagonal_offset=offset, **options)
        expected = [reference(*one, diagonal_offset=offset, **options) for one in alone]
        torch.testing.assert_close(o.double(), torch.cat([e[0] for e, _ in expected]), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(
            lse.double(), torch.cat([x[0] for _, x in expected], 1), atol=1e-3, rtol=2e-6
        )
    for seq_q in (1, 70):
        q, k, v = ramps((3, seq_q, 4, 64), (3, 96, 2, 64), device)
        used = torch.tensor([96, 0, 31], dtype=torch.int32, device=device)
        for offset in (-40, -3, 0, 2, 19):
            o, lse = attention_cached(q, k, v, used, return_lse=True, diagonal_offset=offset, **options)
            for item, n in enumerate(used.tolist()):
                one = slice(item, item + 1)
                expected, expected_lse = reference(
                    q[one], k[one, :n], v[one, :n], diagonal_offset=offset, **options
                )
                torch.testing.assert_close(o[one].double(), expected, atol=2e-3, rtol=2e-3)
                torch.testing.assert_close(lse[one].double(), expected_lse, atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 700), (130, 700), (300, 400)])
@pytest.mark.parametrize(("window", "hidden"), [((37, -5), 5), ((None, -64), 64), ((300, -130), 130)])
def test_c30_keys_behind_the_last_window_may_hold_anything(device, window, hidden, seq_q, seq_k):
    q, k, v = ramps((1, seq_q, 4, 64), (1, seq_k, 2, 64), device)
    expected = attend(q, k, v, window=window)
    k[:, -hidden:] = v[:, -hidden:] = float("nan")
    assert torch.equal(attend(q, k, v, window=window), expected)

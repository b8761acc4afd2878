"""``attention`` with ``score_mod`` and ``mask_mod`` on the CPU, against eager flex_attention in float64."""

from __future__ import annotations

import math

import pytest
import torch
from gallery import BATCH, GALLERY, HEADS, SEQ, alibi, causal, documents, window
from torch import Tensor

import flash_attention
import flash_attention.errors
from flash_attention.cached import attention_cached
from flash_attention.errors import ModError
from flash_attention.mods import and_masks
from flash_helpers.test.reference import reference

flex = pytest.importorskip("torch.nn.attention.flex_attention")


def inputs(seq_q=SEQ, seq_k=SEQ, heads=HEADS, heads_kv=2, d=32, batch=BATCH):
    generator = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=generator).half()  # noqa: E731
    return make(batch, seq_q, heads, d), make(batch, seq_k, heads_kv, d), make(batch, seq_k, heads_kv, d)


def eager_flex(q: Tensor, k: Tensor, v: Tensor, score_mod=None, mask_mod=None) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64, by PyTorch's own uncompiled code; rows without a key are 0 and -inf."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    block_mask = None
    if mask_mod is not None:
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        block_mask = flex.create_block_mask(mask_mod, *sizes, device="cpu")
    out, lse = flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, return_lse=True)
    return out.transpose(1, 2), lse


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery(name: str) -> None:
    kind, function = GALLERY[name]
    mods = {"score_mod" if kind == "score" else "mask_mod": function}
    q, k, v = inputs()
    expected, expected_lse = eager_flex(q, k, v, **mods)
    out, lse = flash_attention.attention(q, k, v, return_lse=True, **mods)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=1e-3)


TABLE = torch.randn(5, generator=torch.Generator().manual_seed(2), dtype=torch.float32)


def depends_on_all(s, b, h, q, k):
    return s * (1.0 + 0.1 * h) + TABLE[(q + 2 * k + b) % 5] - 0.01 * torch.abs(q - k)


def hides_by_all(b, h, q, k):
    return ((q + k * 3 + b + h) % 4 != 0) & (q // 7 >= k // 9 - 40)


def close(found, expected, tolerance=2e-3) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


MODS = {"score_mod": depends_on_all, "mask_mod": hides_by_all}


@pytest.mark.parametrize("mods", [MODS, {"score_mod": depends_on_all}, {"mask_mod": hides_by_all}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (30, 5)},
        {"softcap": 1.5},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
    ],
    ids=str,
)
def test_beside_other_options(options, mods) -> None:
    q, k, v = inputs(90, 130)
    sinks = torch.linspace(-1, 1, HEADS) if "window" in options else None
    close(
        flash_attention.attention(q, k, v, return_lse=True, sinks=sinks, **options, **mods),
        reference(q, k, v, sinks=sinks, **options, **mods),
    )


@pytest.mark.parametrize(
    "shape", [(3, 700, 320, 8, 2), (1, 5000, 70, 2, 1), (2, 1, 600, 8, 1), (40, 33, 33, 12, 4)]
)
def test_parts_of_large_calls_have_their_own_indices(shape) -> None:
    batch, seq_q, seq_k, heads, heads_kv = shape
    q, k, v = inputs(seq_q, seq_k, heads, heads_kv, 16, batch)
    close(flash_attention.attention(q, k, v, return_lse=True, **MODS), reference(q, k, v, **MODS))


def test_packed_sequences_count_their_own_places() -> None:
    lengths = [(5, 40), (0, 3), (60, 60), (17, 1)]
    ends = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in zip(*lengths, strict=True)]
    q, k, v = (x[0] for x in inputs(int(ends[0][-1]), int(ends[1][-1]), batch=1))
    out, lse = flash_attention.attention_varlen(q, k, v, *ends, 60, 60, return_lse=True, **MODS)
    for i, (n_q, n_k) in enumerate(lengths):
        rows, keys = slice(ends[0][i], ends[0][i] + n_q), slice(ends[1][i], ends[1][i] + n_k)
        own = {
            "score_mod": lambda s, b, h, q, k, i=i: depends_on_all(s, b + i, h, q, k),
            "mask_mod": lambda b, h, q, k, i=i: hides_by_all(b + i, h, q, k),
        }
        expected = reference(q[None, rows], k[None, keys], v[None, keys], **own)
        close((out[None, rows], lse[None, :, rows]), expected)


def test_caches_with_pages() -> None:
    q, k, v = inputs(2, 48)
    used = torch.tensor([48, 20], dtype=torch.int32)
    table = torch.tensor([[2, 0, 1], [5, 3, 4]], dtype=torch.int32)
    pages = []
    for x in (k, v):
        of_page = torch.empty(6, 16, *x.shape[2:], dtype=x.dtype)
        of_page[table.flatten().long()] = x.reshape(6, 16, *x.shape[2:])
        pages.append(of_page)
    out, lse = attention_cached(q, *pages, used, block_table=table, return_lse=True, **MODS)
    for i, n in enumerate(used.tolist()):
        own = {
            "score_mod": lambda s, b, h, q, k, i=i: depends_on_all(s, b + i, h, q, k),
            "mask_mod": lambda b, h, q, k, i=i: hides_by_all(b + i, h, q, k),
        }
        close(
            (out[i : i + 1], lse[i : i + 1]),
            reference(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], **own),
        )


def test_a_mask_computes_what_the_option_computes() -> None:
    q, k, v = inputs(130, 130)
    for mask, options in ((causal, {"causal": True}), (window(40), {"window": (40, 0)})):
        expected = flash_attention.attention(q, k, v, softcap=1e30, return_lse=True, **options)
        found = flash_attention.attention(q, k, v, softcap=1e30, return_lse=True, mask_mod=mask)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_rows_without_a_key_and_scores_of_infinity() -> None:
    q, k, v = inputs(6, 5)
    out, lse = flash_attention.attention(q, k, v, mask_mod=lambda b, h, q, k: q < 0, return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    hidden = lambda s, b, h, q, k: torch.where(q == 2, -math.inf, s)  # noqa: E731
    out, lse = flash_attention.attention(q, k, v, score_mod=hidden, return_lse=True)
    assert not out[:, 2].any()
    assert (lse[:, :, 2] == -math.inf).all()
    out, lse = (
        flash_attention.attention(q, k, v, score_mod=lambda s, b, h, q, k: s / 0.0 * 0 + math.inf)[:1],
        None,
    )
    assert out[0].isnan().all()


def test_hidden_keys_may_hold_nan_in_k() -> None:
    q, k, v = inputs(8, 8)
    expected = flash_attention.attention(q, k, v, mask_mod=lambda b, h, q, k: k != 3)
    k[:, 3] = math.nan
    assert torch.equal(flash_attention.attention(q, k, v, mask_mod=lambda b, h, q, k: k != 3), expected)


def test_tiles_that_a_mask_leaves_empty_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2048, 2048, 2, 2, 16, 1)
    products = []
    multiply = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args, **kw: products.append(1) or multiply(*args, **kw))
    flash_attention.attention(q, k, v, mask_mod=lambda b, h, q, k: k < 256)
    few = len(products)
    flash_attention.attention(q, k, v, mask_mod=lambda b, h, q, k: k % 4096 < 4096)
    assert (few, len(products) - few) == (1, 8)


def test_values_are_read_anew_in_each_call() -> None:
    q, k, v = inputs(9, 9)
    bias = torch.zeros(9)
    add = lambda s, b, h, q, k: s + bias[k]  # noqa: E731
    before = flash_attention.attention(q, k, v, score_mod=add)
    assert torch.equal(before, flash_attention.attention(q, k, v, score_mod=add))
    bias[3] = 5.0
    close((flash_attention.attention(q, k, v, score_mod=add),), reference(q, k, v, score_mod=add)[:1])


def test_calls_without_keys_or_queries() -> None:
    q, k, v = inputs(4, 0)
    out, lse = flash_attention.attention(q, k, v, return_lse=True, **MODS)
    assert not out.any()
    assert (lse == -math.inf).all()
    q, k, v = inputs(0, 4)
    assert flash_attention.attention(q, k, v, **MODS).shape == q.shape


# ---------------------------------------------------------------------- refusals
def test_what_is_refused() -> None:
    q, k, v = inputs(8, 8)

    def branch(s, b, h, q, k):
        return s if q > k else -s

    with pytest.raises(ModError, match=r"branch.*branches on a value.*where"):
        flash_attention.attention(q, k, v, score_mod=branch)
    with pytest.raises(TypeError, match="mask_mod is 'causal'; it must be"):
        flash_attention.attention(q, k, v, mask_mod="causal")
    with pytest.raises(TypeError, match=r"flash_attention\.attention\("):
        flash_attention.sdpa(q, k, v, score_mod=branch)
    table = torch.zeros(4, 16)
    with pytest.raises(ValueError, match="overlap"):
        flash_attention.attention(
            q, k, v, out=(o := torch.empty_like(q)), score_mod=lambda s, b, h, q, k: s + o.view(-1)[k]
        )
    assert table.sum() == 0


def test_meta_tensors_give_meta_results() -> None:
    q, k, v = (x.to("meta") for x in inputs(8, 8))
    out = flash_attention.attention(q, k, v, mask_mod=causal)
    assert out.is_meta
    assert out.shape == q.shape


def test_a_mod_and_documents_together() -> None:
    ends = torch.tensor([0, 10, 30, SEQ])
    q, k, v = inputs()
    mods = {"score_mod": alibi(HEADS), "mask_mod": and_masks(documents(causal, ends), window(12))}
    close(flash_attention.attention(q, k, v, return_lse=True, **mods), reference(q, k, v, **mods))

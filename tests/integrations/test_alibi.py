"""``alibi_slopes`` of flash-attn's functions, against its formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.compat import flash_attn, flash_attn_3, vllm_flash_attn
from flash_attention.mods import remembered
from flash_helpers.test.reference import reference

BATCH, HEADS, HEADS_KV, D_HEAD = 2, 4, 2, 32


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device="cpu").half().to(torch.get_default_device())


def qkv(seq_len_q: int, seq_len_k: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(BATCH, seq_len_q, HEADS, D_HEAD),
        random(BATCH, seq_len_k, HEADS_KV, D_HEAD),
        random(BATCH, seq_len_k, HEADS_KV, D_HEAD, seed=1),
    )


def slopes(of_items: bool) -> Tensor:
    each = torch.tensor([0.5, 0.25, 0.0, -0.125])
    return torch.stack((each, 2 * each.flip(0))) if of_items else each


def bias(own: Tensor, seq_len_q: int, seq_len_k: int) -> Any:
    """The formula of flash-attn's documentation."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own_slope = own[b, h] if own.ndim == 2 else own[h]
        return score - own_slope * (i + seq_len_k - seq_len_q - j).abs()

    return score_mod


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("of_items", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (9, 3)},
        {"window_size": (9, 0)},
        {"softcap": 3.0, "causal": True},
    ],
    ids=str,
)
def test_batches(of_items: bool, options: dict[str, Any]) -> None:
    q, k, v = qkv(11, 20)
    own = slopes(of_items)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, alibi_slopes=own, return_attn_probs=True, **options)
    left, right = options.get("window_size", (None, None))
    words = {"causal": options.get("causal", False), "softcap": options.get("softcap", 0.0)}
    expected = reference(q, k, v, window=(left, right), score_mod=bias(own, 11, 20), **words)
    close(out, expected[0])
    close(lse, expected[1])
    kv = torch.stack((k, v), dim=2)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, alibi_slopes=own, **options), out)


@pytest.mark.parametrize("of_items", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(of_items: bool, causal: bool) -> None:
    """The last query of each sequence stands at its last key."""
    q, k, v = (x.flatten(0, 1) for x in qkv(12, 15))
    own = slopes(of_items)
    ends_q, ends_k = torch.tensor([0, 5, 24]).int(), torch.tensor([0, 17, 30]).int()
    given = (q, k, v, ends_q, ends_k, 19, 17)
    out = flash_attn.flash_attn_varlen_func(*given, causal=causal, alibi_slopes=own)
    of_vllm = vllm_flash_attn.flash_attn_varlen_func(
        q, k, v, 19, ends_q, 17, ends_k, causal=causal, alibi_slopes=own
    )
    assert torch.equal(of_vllm, out)
    for i in range(2):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        one = (q[None, rows], k[None, keys], v[None, keys])
        of_item = own[i] if of_items else own
        lengths = one[0].shape[1], one[1].shape[1]
        close(out[None, rows], reference(*one, causal=causal, score_mod=bias(of_item, *lengths))[0])


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"cache_batch_idx": [1, 0]}], ids=str)
def test_caches(options: dict[str, Any], device: str) -> None:
    if device != "cpu" and "num_splits" in options:
        pytest.skip("packed queries over a cache have no kernel with functions")
    q, k_cache, v_cache = qkv(3, 20)
    used = torch.tensor([17, 6]).int()
    own = slopes(True)
    if "cache_batch_idx" in options:
        options = {"cache_batch_idx": torch.tensor(options["cache_batch_idx"]).int()}
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, causal=True, alibi_slopes=own, **options
    )
    for i, n in enumerate((17, 6)):
        item = int(options["cache_batch_idx"][i]) if "cache_batch_idx" in options else i
        one = (q[i : i + 1], k_cache[item : item + 1, :n], v_cache[item : item + 1, :n])
        close(out[i : i + 1], reference(*one, causal=True, score_mod=bias(own[i], 3, n))[0])


def test_gradients_in_packed_sequences() -> None:
    """Of q, k, v and of slopes that require grad."""
    ends = torch.tensor([0, 5, 12]).int()
    rows = [x[0, :12].float().requires_grad_() for x in qkv(12, 12)]
    own = slopes(False).requires_grad_()
    half = [x.detach().half().requires_grad_() for x in rows]
    out = flash_attn.flash_attn_varlen_func(*half, ends, ends, 7, 7, alibi_slopes=own)
    found = torch.autograd.grad(out.float().square().sum(), (*half, own))
    parts = []
    for first, last in ((0, 5), (5, 12)):
        q, k, v = (x[first:last].transpose(0, 1) for x in rows)
        k, v = (x.repeat_interleave(HEADS // HEADS_KV, 0) for x in (k, v))
        distance = (torch.arange(last - first)[:, None] - torch.arange(last - first)).abs()
        scores = q @ k.transpose(1, 2) * D_HEAD**-0.5 - own[:, None, None] * distance
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    expected = torch.autograd.grad(torch.cat(parts).square().sum(), (*rows, own))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y, atol=2e-2, rtol=2e-2)


def test_equal_slopes_are_recorded_once() -> None:
    """Each call makes functions anew, for the same tensors and other lengths."""
    own = slopes(False)
    ends = torch.tensor([0, 5, 12]).int()
    q, k, v = (x[0, :12] for x in qkv(12, 12))
    remembered._known.clear()
    for seq_len in (4, 5, 4):
        flash_attn.flash_attn_func(*qkv(3, seq_len), alibi_slopes=own)
        flash_attn.flash_attn_varlen_func(
            q, k, v, ends, ends.clone() if seq_len == 5 else ends, 7, 7, alibi_slopes=own
        )
    recorded = [entry for entries in remembered._known.values() for entry in entries]
    assert len({entry.mod for entry in recorded}) == 2  # packed sequences of two lengths read both offsets
    assert len(recorded) == 4  # two differences of lengths; the same offsets, and two tensors of them


def test_compiled_calls() -> None:
    torch._dynamo.reset()
    own = slopes(False)
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
    given = qkv(9, 12)
    assert torch.equal(
        compiled(*given, alibi_slopes=own), flash_attn.flash_attn_func(*given, alibi_slopes=own)
    )


def test_chunks_of_packed_sequences_are_recorded_once() -> None:
    q, k, v = (x[0, :12] for x in qkv(12, 12))
    ends = torch.tensor([0, 5, 12]).int()
    remembered._known.clear()
    for _ in range(3):
        flash_attn_3.flash_attn_varlen_func(q, k, v, ends, ends.clone(), 7, 7, attention_chunk=3)
        flash_attn_3.flash_attn_varlen_func(q, k, v, ends, ends, 7, 7, attention_chunk=3)
    same = [entry for entries in remembered._known.values() for entry in entries if not entry.mod.tensors]
    assert len(same) == 1


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (torch.ones(HEADS).half(), TypeError, r"alibi_slopes has the type torch.float16; it must be float32"),
        (
            torch.ones(HEADS + 1),
            ValueError,
            r"alibi_slopes has shape \(5,\); it must be \(4,\), .* or \(2, 4\)",
        ),
        (0.5, TypeError, r"alibi_slopes is 0.5; it must be a tensor of float32, or None"),
    ],
    ids=["type", "shape", "number"],
)
def test_refusals(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_func(*qkv(4, 4), alibi_slopes=given)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"seqused_k": torch.ones(3).int()}, r"seqused_k has shape \(3,\); it must be \(2,\)"),
        ({"cu_seqlens_q": torch.tensor(7).int()}, r"cu_seqlens_q has shape \(\); it must be \(batch \+ 1,\)"),
    ],
    ids=["counts", "offsets"],
)
@pytest.mark.only_on("cpu")
def test_what_says_the_lengths_of_vllms_call_is_checked_before_slopes(wrong: Any, text: str) -> None:
    pages = random(6, 4, HEADS, D_HEAD)
    given = {
        "max_seqlen_q": 4, "cu_seqlens_q": torch.tensor([0, 4, 7]).int(), "max_seqlen_k": 12,
        "seqused_k": torch.tensor([9, 12]).int(), "block_table": torch.arange(6).int().view(2, 3),
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        vllm_flash_attn.flash_attn_varlen_func(
            random(7, HEADS, D_HEAD), pages, pages, alibi_slopes=torch.ones(HEADS), **(given | wrong)
        )


@pytest.mark.only_on("cpu")
def test_offsets_of_packed_sequences_are_checked_before_slopes() -> None:
    q, ends = random(7, HEADS, D_HEAD), torch.tensor([0, 4, 7]).int()
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, name: torch.tensor(7).int()}
        with pytest.raises(ValueError, match=rf"{name} has shape \(\); it must be \(batch \+ 1,\)"):
            flash_attn.flash_attn_varlen_func(
                q, q, q, max_seqlen_q=4, max_seqlen_k=4, alibi_slopes=torch.ones(HEADS), **given
            )

"""``flex_attention`` by its own name: what PyTorch's uncompiled code gives in float64, or a named error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attention
from flash_attention import attention, explain_choice, last_kernel, sdpa
from flash_attention.errors import ModError
from flash_attention.flex_attention import flex_attention
from flash_attention.mods import block_mask as block_masks
from flash_attention.mods import mask_of_blocks, trace
from flash_helpers.kernel_configs import device_facts

flex = pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = [pytest.mark.only_on("cpu"), pytest.mark.filterwarnings("ignore")]

BATCH, HEADS, SEQ = 2, 4, 300
DOCUMENT = torch.arange(SEQ) // 70


def inputs(heads_kv: int = HEADS, batch_kv: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, HEADS, SEQ, 32), *[(batch_kv, heads_kv, SEQ, 32)] * 2]
    q, k, v = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    return q, k, v


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.exp2(-(h + 1.0)) * (kv_idx - q_idx)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 50)


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


def by_item(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (kv_idx >= b * 140) & (q_idx % (h + 2) != 1)


def blocks(mask_mod: Any, b: int | None = None, h: int | None = None, size: int = 128) -> Any:
    return flex.create_block_mask(mask_mod, b, h, SEQ, SEQ, device="cpu", BLOCK_SIZE=size)


def check(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    expected, expected_lse = flex.flex_attention(
        q.double(), k.double(), v.double(), return_lse=True, **options
    )
    out, lse = flex_attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1.6e-2, atol=1.6e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)
    alone = flex_attention(q, k, v, **options)  # perhaps by PyTorch's own attention
    torch.testing.assert_close(alone.double(), expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("score_mod", [None, alibi])
@pytest.mark.parametrize("mask_mod", [None, window, documents, by_item])
def test_mods_and_block_masks(score_mod: Any, mask_mod: Any) -> None:
    q, k, v = inputs()
    sizes = (BATCH, HEADS) if mask_mod is by_item else (None, None)
    check(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=None if mask_mod is None else blocks(mask_mod, *sizes),
        scale=0.3,
    )


def test_shared_heads_and_shared_keys() -> None:
    check(*inputs(heads_kv=2), block_mask=blocks(window), enable_gqa=True)
    check(*inputs(batch_kv=1), block_mask=blocks(by_item, BATCH, HEADS))
    with pytest.raises(ValueError, match=r"query has 4 heads, key 2; .*enable_gqa=True"):
        flex_attention(*inputs(heads_kv=2))


def test_a_function_needs_no_lists() -> None:
    q, k, v = inputs()
    assert torch.equal(
        flex_attention(q, k, v, block_mask=documents), flex_attention(q, k, v, block_mask=blocks(documents))
    )


def test_auxiliary_results() -> None:
    q, k, v = inputs()
    out, aux = flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True))
    expected, lse = flex_attention(q, k, v, return_lse=True)
    assert isinstance(aux, flex.AuxOutput)
    assert torch.equal(out, expected)
    assert aux.lse is not None
    assert torch.equal(aux.lse, lse)


@pytest.mark.parametrize("facts", [None, device_facts("H100")])
def test_a_choice_is_explained_as_the_call_takes_the_object(facts: Any) -> None:
    q, k, v = (x.transpose(1, 2) for x in inputs())
    asked: Any = {"return_lse": True, "facts": facts}
    of_lists = in_blocks([[0], [1], [0, 2]])
    for mask, same in ((blocks(documents), documents), (of_lists, mask_of_blocks(of_lists))):
        found = explain_choice(q, k, v, mask_mod=mask, **asked)
        assert found == explain_choice(q, k, v, mask_mod=same, **asked)
        if facts is None:
            attention(q, k, v, mask_mod=mask, return_lse=True)
            assert last_kernel() == found.kernel
    with pytest.raises(ValueError, match="the BlockMask was made for 300 queries and 300 keys"):
        explain_choice(q[:, :200], k, v, mask_mod=of_lists, **asked)


def test_the_object_in_the_place_of_a_function() -> None:
    q = inputs()[0].transpose(1, 2)
    with pytest.raises(TypeError, match=r"score_mod is a BlockMask; .* Pass it as mask_mod"):
        attention(q, q, q, score_mod=blocks(documents))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"block_mask is a function; it must be a BlockMask of torch\.nn"):
        mask_of_blocks(documents)
    with pytest.raises(TypeError, match=r"mask_mod is a BlockMask; .*mask_of_blocks makes one of it"):
        trace(None, blocks(documents))


# ---------------------------------------------------------------------- what is used of a BlockMask
@pytest.mark.parametrize(
    ("mask_mod", "sizes"), [(window, (None, None)), (documents, (None, None)), (by_item, (BATCH, HEADS))]
)
@pytest.mark.parametrize("size", [64, 128, (128, 64)])
def test_lists_that_say_what_the_function_says_are_not_read_again(
    mask_mod: Any, sizes: Any, size: Any
) -> None:
    assert mask_of_blocks(blocks(mask_mod, *sizes, size=size)) is mask_mod


def in_blocks(listed: list[list[int]], full: list[list[int]] | None = None, mask_mod: Any = None) -> Any:
    """Of three blocks a side; places of blocks a row."""

    def lists(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
        places = [row + [i for i in range(3) if i not in row] for row in rows]
        return counts, torch.tensor([[places]], dtype=torch.int32)

    more = (None, None) if full is None else lists(full)
    return flex.BlockMask.from_kv_blocks(
        *lists(listed), *more, BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=(SEQ, SEQ)
    )


def dense(listed: list[list[int]]) -> Tensor:
    mask = torch.zeros(3, 3, dtype=torch.bool)
    for row, columns in enumerate(listed):
        mask[row, columns] = True
    return mask.repeat_interleave(128, 0).repeat_interleave(128, 1)[:SEQ, :SEQ]


def test_lists_that_hide_more_than_the_function_are_kept() -> None:
    q, k, v = inputs()
    listed, full = [[0], [1], [0, 2]], [[], [0], [1]]
    for mask_mod, seen in (
        (None, torch.ones(SEQ, SEQ, dtype=torch.bool)),
        (window, window(0, 0, torch.arange(SEQ)[:, None], torch.arange(SEQ))),
    ):
        found = flex_attention(q, k, v, block_mask=in_blocks(listed, full, mask_mod))
        visible = dense(listed) & seen | dense(full)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), visible
        )
        torch.testing.assert_close(found.double(), expected, rtol=1.6e-2, atol=1.6e-2)


def test_lists_that_are_changed_are_read_again() -> None:
    q, k, v = inputs()
    mask = in_blocks([[0], [1], [2]])
    before = flex_attention(q, k, v, block_mask=mask)
    mask.kv_indices[0, 0, 2, 0] = 1
    assert torch.equal(
        flex_attention(q, k, v, block_mask=mask),
        flex_attention(q, k, v, block_mask=in_blocks([[0], [1], [1]])),
    )
    assert not torch.equal(flex_attention(q, k, v, block_mask=mask), before)


@pytest.mark.parametrize("change", ["contents", "a number", "another tensor"])
def test_what_the_function_captures_may_change(change: str) -> None:
    """Lists stay what they are, as in PyTorch: the function is asked in the blocks that they call partial."""
    own, length = torch.arange(SEQ) // 100, 0

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (own[q_idx] == own[kv_idx]) & (kv_idx >= length)

    q, k, v = inputs()
    mask = blocks(document)
    before = flex_attention(q, k, v, block_mask=mask)
    assert mask_of_blocks(mask) is document
    if change == "contents":
        own.copy_(torch.arange(SEQ) // 30)
    elif change == "a number":
        length = 40
    else:
        own = torch.arange(SEQ) // 30
    found = flex_attention(q, k, v, block_mask=mask)
    assert not torch.equal(found, before)
    places = torch.arange(SEQ)
    listed = block_masks.blocks_of(mask)[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:SEQ, :SEQ]
    seen = (listed == 2) | (listed == 1) & document(0, 0, places[:, None], places)
    rows = seen.any(-1)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen)
    torch.testing.assert_close(found[:, :, rows].double(), expected[:, :, rows], rtol=1.6e-2, atol=1.6e-2)
    assert not found[:, :, ~rows].any()


def test_what_is_captured_without_versions_is_not_taken_to_stay() -> None:
    q, k, v = inputs()
    with torch.inference_mode():
        own = torch.arange(SEQ) // 100
        mask = blocks(lambda b, h, q_idx, kv_idx: own[q_idx] == own[kv_idx])
        before = flex_attention(q, k, v, block_mask=mask)
        own.fill_(0)  # blocks that are not listed stay hidden
        own[:64] = 1
        found = flex_attention(q, k, v, block_mask=mask)
    assert not torch.equal(found, before)


def test_lists_too_long_to_compare_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_masks.MOST_PAIRS, "cpu", 1000)
    mask = blocks(documents)
    assert "t0[q // 128, k // 128]" in str(trace(mask_mod=mask_of_blocks(mask)).mod)
    check(*inputs(), block_mask=mask)


# ---------------------------------------------------------------------- what is refused
def test_refusals_have_names() -> None:
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"^kernel_options is .*pass None"):
        flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})
    with pytest.raises(NotImplementedError, match=r"^return_aux asks for max_scores"):
        flex_attention(q, k, v, return_aux=flex.AuxRequest(max_scores=True))
    with pytest.raises(ValueError, match=r"^return_lse is True, and return_aux is given"):
        flex_attention(q, k, v, return_lse=True, return_aux=flex.AuxRequest(lse=True))
    with pytest.raises(
        ValueError, match=r"made for 300 queries and 300 keys; query and key have 299 and 300"
    ):
        flex_attention(q[:, :, 1:], k, v, block_mask=blocks(window))
    with pytest.raises(ValueError, match=r"made with n_heads 4, and the call has 2"):
        flex_attention(q[:, :2], k[:, :2], v[:, :2], block_mask=blocks(by_item, BATCH, HEADS))
    with pytest.raises(TypeError, match=r"^block_mask is a tensor of shape"):
        flex_attention(q, k, v, block_mask=torch.ones(SEQ, SEQ, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must be tensors \(batch, n_heads, seq, d\)"):
        flex_attention(q[0], k[0], v[0])
    with pytest.raises(ModError, match=r"sliced BlockMask"):
        flex_attention(q[:1], k[:1], v[:1], block_mask=blocks(by_item, BATCH, HEADS)[:1])


def test_packed_sequences_take_the_function_alone() -> None:
    q = torch.zeros(SEQ, HEADS, 32, dtype=torch.bfloat16)
    ends = torch.tensor([0, SEQ], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"mask_mod is a BlockMask, .*pass its mask_mod"):
        flash_attention.attention_varlen(q, q, q, ends, ends, SEQ, SEQ, mask_mod=blocks(window))


def test_a_list_that_another_one_replaces_is_read() -> None:
    """Also where the new tensor gets the place in memory of the old one."""
    mask = flex.create_block_mask(window, None, None, SEQ, SEQ, device="cpu", BLOCK_SIZE=64)
    first = mask.full_kv_num_blocks.clone()
    for i in range(30):
        counts = first.clone() if i % 2 else torch.zeros_like(first)
        mask.full_kv_num_blocks = None
        mask.full_kv_num_blocks = counts
        seen = block_masks.blocks_of(mask) == int(block_masks.Tile.FULL)
        traced = trace(None, mask_of_blocks(mask))
        assert bool(seen.any()) == bool(counts.any())
        tables = [x for x in traced.tensors if x.dtype is torch.uint8]
        assert not tables or torch.equal(tables[0] == int(block_masks.Tile.FULL), seen[0, 0])
        assert tables or counts.any() or not first.any()


def mask_mod(b, h, q, k):
    return q - k  # the query, the key and the mask_mod


def test_the_users_own_words_are_left_as_they_are() -> None:
    q = torch.zeros(1, 1, 16, 16).half()
    with pytest.raises(ModError, match=r"^block_mask mask_mod returns .*: def mask_mod\(b, h, q, k\):; it"):
        flex_attention(q, q, q, block_mask=mask_mod)
    with pytest.raises(ModError, match=r"block_mask .*lambda b, h, q, k: q\.cumsum\(k\)"):
        flex_attention(q, q, q, block_mask=lambda b, h, q, k: q.cumsum(k))
    with pytest.raises(ModError, match=r"raised ValueError: the causal q and k, at .*"):
        flex_attention(q, q, q, block_mask=raises)
    with pytest.raises(TypeError, match="attn_mask is 'causal'"):
        sdpa(q, q, q, attn_mask="causal")  # type: ignore[arg-type]


def raises(b, h, q, k):
    raise ValueError("the causal q and k")

"""Every kind of mask function that Transformers has: computed as its own grid of pairs says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5")
kernels = pytest.importorskip("flash_attention.integrations.transformers")
from transformers import masking_utils as masks  # noqa: E402

from flash_attention.compat.transformers import masks as kernel_masks  # noqa: E402

N_TOKENS, N_HEADS, D_HEAD = 12, 2, 16
SERVED, BY_FUNCTION = "served", "by function"  # the latter have no band

ZEROS = torch.zeros(2, dtype=torch.int64)
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1]] * 2)
ONE_BLOCK_APART = torch.tensor([[0, -1, 0] + [-1] * 9] * 2)
SEQUENCES = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 6 + [2] * 3])
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(3), *range(6), *range(3)]])
JUMPING = torch.tensor([[0, 1, *range(100, 110)]] * 2)


def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) | (key < 4)


def packed(mask_function: Callable[..., Any], positions: Tensor) -> Callable[..., Any]:
    """As ``create_causal_mask`` of the installed Transformers does it."""
    ids = masks.find_packed_sequence_indices(positions)
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)
    if remap is not None:  # after 5.17 the positions are those within a sequence
        mask_function = remap(mask_function, positions)
    return masks.and_masks(mask_function, masks.packed_sequence_mask_function(ids))


def both_sides(size: int) -> Callable[..., Any]:
    """As ``sliding_window_bidirectional_mask_function``, which 5.0 does not have."""
    return lambda batch, head, query, key: abs(query - key) <= size


def blocks(ids: Tensor) -> Callable[..., Any]:
    """As ``blockwise_overlay``, which 5.0 does not have: tokens of one block see each other."""
    return lambda batch, head, query, key: (ids[batch, query] == ids[batch, key]) & (ids[batch, query] >= 0)


both_sides = getattr(masks, "sliding_window_bidirectional_mask_function", both_sides)
blocks = getattr(masks, "blockwise_overlay", blocks)
TAKES_LENGTHS = (
    "q_length" in inspect.signature(masks.sdpa_mask).parameters
)  # before, the places of the queries

CAUSAL, ALL = masks.causal_mask_function, masks.bidirectional_mask_function
WINDOW = masks.sliding_window_causal_mask_function(4)
BOTH_SIDES = both_sides(3)
PACKED: dict[str, Any] = {"allow_is_causal_skip": False}
OVERLAY: dict[str, Any] = {"use_vmap": True, "allow_is_causal_skip": False}
MASK_FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "causal": (CAUSAL, {}, SERVED),
    "bidirectional": (ALL, {}, SERVED),
    "sliding window": (WINDOW, {"local_size": 4}, SERVED),
    "bidirectional window": (BOTH_SIDES, {"local_size": 3}, SERVED),
    "window by overlay": (masks.and_masks(CAUSAL, masks.sliding_window_overlay(5)), OVERLAY, SERVED),
    "chunks that cut": (masks.chunked_causal_mask_function(4, ZEROS), {"local_size": 4}, SERVED),  # as packed
    "chunks that cut nothing": (masks.chunked_causal_mask_function(64, ZEROS), {"local_size": 64}, SERVED),
    "blocks of images": (masks.or_masks(CAUSAL, blocks(BLOCKS)), {}, BY_FUNCTION),
    "a block with a gap": (masks.or_masks(CAUSAL, blocks(ONE_BLOCK_APART)), {}, BY_FUNCTION),
    "no blocks": (masks.or_masks(CAUSAL, blocks(-torch.ones_like(BLOCKS))), {}, SERVED),
    "blocks by or_mask_function": (masks.or_masks(CAUSAL, blocks(BLOCKS)), OVERLAY, BY_FUNCTION),
    "prefix": (masks.or_masks(CAUSAL, prefix), OVERLAY, BY_FUNCTION),
    "keys alone": (masks.and_masks(CAUSAL, lambda b, h, q, k: k >= 3), OVERLAY, BY_FUNCTION),
    "heads": (masks.and_masks(CAUSAL, lambda b, h, q, k: h != 0), OVERLAY, BY_FUNCTION),
    "packed": (packed(CAUSAL, POSITIONS), PACKED, SERVED),
    "packed, a window": (packed(WINDOW, POSITIONS), {**PACKED, "local_size": 4}, SERVED),
    "packed, no order": (masks.and_masks(ALL, masks.packed_sequence_mask_function(SEQUENCES)), {}, SERVED),
    "packed with blocks": (
        masks.or_masks(packed(CAUSAL, POSITIONS), blocks(BLOCKS)), {}, BY_FUNCTION
    ),
}  # fmt: skip
PADDINGS = {
    "none": None,
    "full": [slice(0, 0), slice(0, 0)],
    "left": [slice(0, 0), slice(0, 5)],
    "right": [slice(0, 0), slice(8, 12)],
}


class Layer(torch.nn.Module):
    """Says the opposite of the masks, which are to decide."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def heads(n: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(2, N_HEADS, n, D_HEAD, generator=generator, device="cpu").half()


def on_device(x: Any) -> Any:
    return x.to(torch.get_default_device()) if isinstance(x, Tensor) else x


def as_transformers_says(given: dict[str, Any]) -> dict[str, Any]:
    """The lengths, in the arguments that the installed Transformers hands to a mask interface."""
    if TAKES_LENGTHS:
        return given
    given = dict(given)
    places = torch.arange(given.pop("q_length")) + given.pop("q_offset", 0)
    return {**given, "cache_position": places}


def compare(given: dict[str, Any], tokens: Tensor | None, is_causal: bool) -> None:
    """Attention of random heads with the mask of this library, against the pairs that Transformers draws."""
    device = torch.get_default_device()
    given = {name: on_device(value) for name, value in given.items()}
    said = as_transformers_says(given)
    grid = masks.sdpa_mask(
        **{**said, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        batch_size=2, attention_mask=tokens, device=device,
    )  # fmt: skip
    mask = kernels.padding_mask(batch_size=2, attention_mask=tokens, device=device, **said)
    q = heads(given["q_length"], 1).to(device)
    k, v = (heads(given["kv_length"], seed).to(device) for seed in (2, 3))
    out, _ = kernels.attention_forward(Layer(is_causal), q, k, v, mask)
    scores = (q.float() @ k.float().transpose(2, 3)) * D_HEAD**-0.5
    weights = scores.masked_fill(~grid, float("-inf")).softmax(3).nan_to_num(0)
    expected = (weights @ v.float()).transpose(1, 2)
    rows = torch.ones(2, given["q_length"], dtype=torch.bool)
    if tokens is not None and given["mask_function"] is not ALL:
        places = torch.arange(given["q_length"]) + given.get("q_offset", 0)
        rows = tokens.bool()[:, places]
    torch.testing.assert_close(out[rows].float(), expected[rows], atol=2e-3, rtol=2e-3)


@pytest.mark.only_on("cpu")  # the tensors within the mask functions are there
@pytest.mark.parametrize(
    ("kind", "padding"),
    [
        (kind, padding)
        for kind in MASK_FUNCTIONS
        for padding in PADDINGS
        if padding == "none" or "packed" not in kind  # positions pack where there is no mask of padding
    ],
)
def test_mask_function(kind: str, padding: str) -> None:
    mask_function, options, outcome = MASK_FUNCTIONS[kind]
    tokens = None
    if PADDINGS[padding] is not None:
        tokens = torch.ones(2, N_TOKENS, dtype=torch.bool)
        for item, hidden in enumerate(PADDINGS[padding]):
            tokens[item, hidden] = False
        if "chunks" in kind:
            left = (tokens.cumsum(1) == 0).sum(1)
            size = options["local_size"]
            mask_function = masks.chunked_causal_mask_function(size, left)
    given = dict(q_length=N_TOKENS, kv_length=N_TOKENS, mask_function=mask_function, **options)
    is_causal = kind in ("bidirectional", "bidirectional window", "packed, no order")
    if kind == "chunks that cut" and padding in ("left", "right"):
        outcome = BY_FUNCTION
    compare(given, tokens, is_causal)
    said = dict(given, batch_size=2, attention_mask=tokens, device="cpu")
    meaning = kernel_masks.meaning_of(kernels.padding_mask(**as_transformers_says(said)))
    assert (meaning.mask_mod is not None) is (outcome == BY_FUNCTION)


@pytest.mark.only_on("cpu")
def test_a_function_that_cannot_be_recorded_is_drawn() -> None:
    table = torch.rand(2, N_TOKENS, N_TOKENS, generator=torch.Generator().manual_seed(2)) > 0.3

    def looked_up(batch: Any, head: Any, query: Any, key: Any) -> Any:
        if isinstance(query, Tensor):  # symbols are none
            return table[batch, query, key]
        raise TypeError("tensors alone")

    given = dict(q_length=N_TOKENS, kv_length=N_TOKENS, mask_function=looked_up, allow_is_causal_skip=False)
    compare(given, None, False)
    tokens = torch.ones(2, N_TOKENS, dtype=torch.bool)
    tokens[1, :4] = False
    compare(given, tokens, False)


PLACES = {  # queries, keys, place of the first query, place of the first key
    "one new token": (1, 12, 11, 0),
    "three new tokens": (3, 12, 9, 0),
    "an empty static cache": (4, 12, 0, 0),
    "a static cache": (3, 12, 5, 0),
    "a sliding cache": (3, 7, 9, 5),
}


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["causal", "sliding window"])
@pytest.mark.parametrize("kind", PLACES)
def test_queries_behind_a_cache(kind: str, name: str, is_padded: bool) -> None:
    q_length, kv_length, q_offset, kv_offset = PLACES[kind]
    tokens = None
    if is_padded:
        tokens = torch.ones(2, q_offset + q_length, dtype=torch.bool)
        tokens[1, :2] = False
    mask_function, options, _ = MASK_FUNCTIONS[name]
    given = dict(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, **options,
    )  # fmt: skip
    compare(given, tokens, is_causal=False)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("q_length", [1, 6, 24, 30])
def test_an_encoder_keeps_all_its_keys(q_length: int, is_padded: bool) -> None:
    tokens = None
    if is_padded:
        tokens = torch.ones(2, 24, dtype=torch.bool)
        tokens[1, 20:] = False
    compare(dict(q_length=q_length, kv_length=24, q_offset=0, kv_offset=0, mask_function=ALL), tokens, True)


def test_a_mask_without_a_function_cuts_no_keys() -> None:
    assert (
        kernels.padding_mask(2, q_length=6, kv_length=24, q_offset=0, kv_offset=0, attention_mask=None)
        is None
    )


@pytest.mark.only_on("cpu")
def test_padding_between_tokens_is_counted_by_a_window() -> None:
    tokens = torch.ones(2, N_TOKENS, dtype=torch.bool)
    tokens[1, 4:6] = False
    given = dict(q_length=N_TOKENS, kv_length=N_TOKENS)
    compare(dict(given, mask_function=CAUSAL), tokens, False)
    compare(dict(given, mask_function=WINDOW, local_size=4), tokens, False)


@pytest.mark.only_on("cpu")
def test_queries_behind_the_last_key() -> None:
    compare(dict(q_length=4, kv_length=6, q_offset=4, mask_function=CAUSAL), None, False)


def test_a_mask_of_other_sizes_is_refused() -> None:
    mask = kernels.padding_mask(2, q_length=6, kv_length=6, mask_function=CAUSAL)
    for q, k in ((heads(4, 1), heads(6, 2)), (heads(6, 1), heads(8, 2))):
        q, k = on_device(q), on_device(k)
        with pytest.raises(NotImplementedError, match="the mask was made for 6 queries and 6 keys"):
            kernels.attention_forward(Layer(True), q, k, k, mask)


# ------------------------------------------------------------------------------------------- packed sequences
CLEAR = {
    "one": ([[*range(9)]], [9]),
    "two": ([[0, 1, 2, 3, 0, 1, 2, 3, 4]], [4, 5]),
    "from two on": ([[2, 3, 4, 2, 3, 4, 5, 6, 7]], [3, 6]),
    "a jump": ([[0, 1, 100, 101, 102, 103, 104, 105, 106]], [9]),
    "two items": ([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]], [4, 5, 2, 7]),
}


@pytest.mark.parametrize("kind", CLEAR)
def test_positions_say_where_sequences_start(kind: str) -> None:
    positions, lengths = CLEAR[kind]
    q, k, v = (on_device(heads(9, seed)[: len(positions)]) for seed in (1, 2, 3))
    out, _ = kernels.attention_forward(Layer(True), q, k, v, None, position_ids=torch.tensor(positions))
    rows = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]
    begin = 0
    for length in lengths:
        part = [x[:, :, begin : begin + length].float() for x in rows]
        expected = torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True).transpose(1, 2)
        got = out.flatten(0, 1)[None, begin : begin + length]
        torch.testing.assert_close(got.float(), expected, atol=2e-3, rtol=2e-3)
        begin += length


@pytest.mark.parametrize(
    "positions", [[3, 4, 5, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 7, 8, 9, 10], [0, 0, 1, 1, 2, 2, 3, 3, 4]]
)
def test_positions_that_are_not_clear_are_refused(positions: list[int]) -> None:
    q = on_device(heads(9, 1)[:1])
    with pytest.raises(NotImplementedError, match=r"^position_ids return to the smallest one"):
        kernels.attention_forward(Layer(True), q, q, q, None, position_ids=torch.tensor([positions]))


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("kind", ["the mask splits, positions do not", "positions split, the mask does not"])
def test_a_mask_and_positions_that_disagree_are_refused(kind: str) -> None:
    splits = kind.startswith("the mask")
    positions = JUMPING if splits else POSITIONS
    mask_function = packed(CAUSAL, JUMPING) if splits else CAUSAL
    given = dict(q_length=N_TOKENS, kv_length=N_TOKENS, mask_function=mask_function)
    mask = kernels.padding_mask(2, **as_transformers_says(given))
    q = heads(N_TOKENS, 1)
    with pytest.raises(NotImplementedError, match="do not agree on where packed sequences start"):
        kernels.attention_forward(Layer(True), q, q, q, mask, position_ids=positions)


def test_offsets_come_together_or_not_at_all() -> None:
    q = on_device(heads(9, 1)[:1])
    with pytest.raises(
        ValueError, match=r"^cu_seq_lens_q came without cu_seq_lens_k, max_length_q, max_length_k"
    ):
        kernels.attention_forward(Layer(True), q, q, q, None, cu_seq_lens_q=torch.tensor([0, 4, 9]))


@pytest.mark.parametrize("kind", ["bools", "numbers", "causal"])
def test_a_mask_of_inference_mode(kind: str) -> None:
    """It has no version: what was found out of it before counts no more."""
    with torch.inference_mode():
        q, k, v = (torch.randn(2, N_HEADS, N_TOKENS, D_HEAD, dtype=torch.bfloat16) for _ in range(3))
        seen = torch.rand(2, 1, N_TOKENS, N_TOKENS) > 0.4
        seen |= torch.eye(N_TOKENS, dtype=torch.bool)
        mask = seen.clone() if kind == "bools" else torch.zeros(2, 1, N_TOKENS, N_TOKENS)
        if kind == "causal":
            seen = torch.ones_like(seen).tril()
        if kind != "bools":
            mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        for _ in range(2):
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            found, _ = kernels.attention_forward(Layer(True), q, k, v, mask)
            torch.testing.assert_close(found.transpose(1, 2), expected, rtol=0.02, atol=0.02)
            mask[..., 1:6] = False if kind == "bools" else torch.finfo(mask.dtype).min
            mask[..., 0] = True if kind == "bools" else 0.0

"""Which choices of a Hopper forward kernel go together."""

from __future__ import annotations

from flash_helpers.kernels.hopper.forward import resources
from flash_helpers.kernels.hopper.forward.next_item import NextItem
from flash_helpers.kernels.hopper.forward.resources import Fields
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.kernels.traits import PLAIN, ForwardTraits

MMA_K = 16  # reduction length of one wgmma
MAX_PREFETCH = 16  # prefetch_next
D_HEADS = (64, 96, 128, 192, 256)
PRODUCT_WIDTHS = (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
"""Columns of a product ``wgmma``, in src/include/hopper/wgmma.cuh."""


def malformed_reason(config: Fields, traits: ForwardTraits) -> str | None:
    """Why no GPU can run a configuration compiled for some traits, or None."""
    return (
        _sizes_reason(config)
        or _stages_reason(config)
        or _traits_reason(traits)
        or _products_reason(config, traits)
        or _order_reason(config)
        or _overlap_reason(config)
        or _softmax_reason(config)
        or _registers_reason(config, traits)
    )


def _sizes_reason(config: Fields) -> str | None:
    for name in ("d_head", "d_head_v"):
        if getattr(config, name) not in D_HEADS:
            return f"{name} is {getattr(config, name)}; this family has {', '.join(map(str, D_HEADS))}"
    if config.B_r % resources.WARPGROUP_ROWS or config.n_consumers not in resources.REGISTERS:
        return (
            f"B_r is {config.B_r}; each consumer warpgroup owns {resources.WARPGROUP_ROWS} query rows and "
            f"a block has one to {max(resources.REGISTERS)} of them, so it must be one of "
            f"{', '.join(str(n * resources.WARPGROUP_ROWS) for n in resources.REGISTERS)}"
        )
    if config.B_c not in PRODUCT_WIDTHS:
        return f"B_c is {config.B_c}; products are {', '.join(map(str, PRODUCT_WIDTHS))} columns wide"
    return None


def _stages_reason(config: Fields) -> str | None:
    if not 2 <= config.kv_stages <= 8:
        return f"kv_stages is {config.kv_stages}; V's slot is in use while the next K is waited for: 2 to 8"
    if not 0 <= config.extra_k_stages <= 8 - config.kv_stages:
        return (
            f"extra_k_stages is {config.extra_k_stages}; with kv_stages of {config.kv_stages} it must be 0 "
            f"to {8 - config.kv_stages}"
        )
    if not 1 <= config.q_stages <= 4:
        return f"q_stages is {config.q_stages}; it must be 1 to 4"
    return None


def _traits_reason(traits: ForwardTraits) -> str | None:
    if traits.paged and not traits.varlen:
        return "paged: rows past the end of a sequence are cut off as with varlen; it needs varlen"
    return traits.planned_obstacle()


def _products_reason(config: Fields, traits: ForwardTraits) -> str | None:
    # Parts of split keys are float32.
    stores_directly = config.direct_store or traits.split or traits.planned
    if not stores_directly and resources.padded(config.d_head_v) > resources.padded(config.d_head):
        return (
            f"d_head_v is {config.d_head_v} and d_head {config.d_head}: O would not fit the Q slot it leaves "
            "through; choose direct_store"
        )
    if config.ping_pong and config.n_consumers < 2:
        return f"ping_pong: B_r is {config.B_r}, one warpgroup; turns need two or more"
    if config.early_pass and not (config.ping_pong and config.overlap_products):
        return "early_pass is about turns of two products: it needs ping_pong and overlap_products"
    if config.half_tiles and (not config.overlap_products or config.B_c // 2 not in PRODUCT_WIDTHS):
        return (
            f"half_tiles: B_c is {config.B_c}, and the first product is half as wide; it needs "
            "overlap_products and B_c of 96, 128, 160, 192 or 256"
        )
    if not 0 <= config.q_register_steps <= config.d_head // MMA_K:
        return (
            f"q_register_steps is {config.q_register_steps}; head size {config.d_head} has "
            f"{config.d_head // MMA_K} steps"
        )
    return None


def _order_reason(config: Fields) -> str | None:
    if not 0 <= config.prefetch_next <= MAX_PREFETCH:
        return f"prefetch_next is {config.prefetch_next}; it must be 0 to {MAX_PREFETCH}"
    if config.prefetch_next and config.n_consumers > 2:
        return (
            f"prefetch_next: B_r is {config.B_r}, and the load thread of more than two consumer warpgroups "
            "has no registers to spare; choose B_r of 64 or 128"
        )
    if config.section_heads < 0 or (config.section_heads and not config.head_sections):
        return f"section_heads is {config.section_heads}; it must be 0, or positive with head_sections"
    return None


def _overlap_reason(config: Fields) -> str | None:
    if config.forced_overlap and not config.overlap_products:
        return "forced_overlap needs overlap_products: there is no P V to keep the softmax under"
    if config.next_item != NextItem.NONE:
        if not config.overlap_products:
            return "next_item needs overlap_products: the next product starts while another runs"
        if not config.direct_store and config.q_stages < 2:
            return (
                "next_item: O is staged in the old Q slot while the next Q is in use; choose q_stages of "
                "2 or more, or direct_store"
            )
    if config.next_item == NextItem.AFTER_LAST_PV and config.q_stages < 2:
        return (
            "next_item AFTER_LAST_PV holds its turn while it waits for the next Q, and one Q slot "
            "would never be free; choose q_stages of 2 or more"
        )
    return None


def _softmax_reason(config: Fields) -> str | None:
    if config.softmax_reference == SoftmaxReference.ANCHORED:
        return "softmax_reference ANCHORED is of the Ampere family; choose LAGGED"
    by_row = config.softmax_reference == SoftmaxReference.LAGGED_BY_ROW
    if config.chunk_tiles < 0 or (config.chunk_tiles and not by_row):
        return (
            f"chunk_tiles is {config.chunk_tiles}; it must be 0, or positive with a softmax_reference "
            "LAGGED_BY_ROW"
        )
    return None


def _registers_reason(config: Fields, traits: ForwardTraits) -> str | None:
    budget = resources.register_budget(config, traits)[1] - resources.REGISTER_OVERHEAD[config.n_consumers]
    if (registers := resources.resident_registers(config)) > budget:
        compiled_for = f" of a kernel for {traits.short_form()}" if traits != PLAIN else ""
        return (
            f"S, P and O take {registers} registers a thread; {config.n_consumers} "
            f"consumer warpgroup(s){compiled_for} leave {budget}, and spilled accumulators let no "
            "products overlap"
        )
    return None

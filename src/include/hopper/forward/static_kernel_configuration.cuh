// What follows from a Hopper configuration at compile time: threads, registers, and the map of shared
// memory. A configuration that cannot work is refused here by name.
//
// Shared memory of a block:
//
//     Q slots     q_stages  x (B_r, d)     O is staged in its item's Q slot unless it is stored directly
//     K ring      kv_stages + extra_k_stages  x (B_c, d)
//     V ring      kv_stages x (B_c, d_v)
//     diagonals   of each K slot: what scores begin at (begun_scores.cuh), where they do
//     streamed    streamed_stages x (B_r, B_c) of a tensor that a mod captured, if there is room
//     kept        of what chunks of keys have left, as much as there is room for (chunk_sums.cuh)
//     control     1 KiB: mbarriers, the work item of each Q slot
#pragma once

#include <algorithm>

#include "common/known_ahead.cuh"
#include "common/mod.cuh"
#include "common/shared_diagonals.cuh"
#include "flash_attention.cuh"
#include "hopper/layout.cuh"

namespace flash::hopper {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpsPerWarpgroup = 4;
inline constexpr int kControlBytes = 1024;
inline constexpr int kMaxSmemBytes = 227 * 1024;

// Registers a thread of the producer and of a consumer warpgroup, by number of consumers. A block is
// launched with 65536 / threads registers a thread (rounded down to 8), and setmaxnreg moves them: the
// sum over the warpgroups must not exceed that allocation, or the request never returns. 40 are what the
// producer's item decoding needs; 32 spill a few bytes outside its loop but leave consumers theirs.
struct RegisterBudget {
    int producer, consumer;
};
// Finding sequences and parts (warp_loads) takes the load warp more, and so does finding the tiles that a mod
// leaves something of; to plan takes still more. Three and four consumers have none to give: their load warp
// spills, outside of its loop over tiles.
constexpr RegisterBudget register_budget(int n_consumers, bool warp_loads, bool finds_tiles = false,
                                         bool planned = false) {
    switch (n_consumers) {
        case 1:
            return {planned ? 128 : warp_loads || finds_tiles ? 56 : 40, 240};
        case 2:
            if (planned) return {88, 208};
            return warp_loads    ? RegisterBudget{72, 216}
                   : finds_tiles ? RegisterBudget{56, 224}
                                 : RegisterBudget{40, 232};
        case 3:
            return {32, 160};
        case 4:
            return {32, 112};
        default:
            return {0, 0};
    }
}

// Where a member has the name of a configuration's field (direct_store, half_tiles, paired_blocks,
// prefetch_next), the traits may have overruled the field: kernels read the member.
// COPIES: whether copies bring what a mod streams, where they can; the launch decides it.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD = NoMod, bool COPIES = true>
struct StaticForwardKernelConfig {
    using Mod = MOD;  // functions of the user's
    static constexpr bool has_mod = is_mod<MOD>;
    static constexpr bool mod_changes_scores = changes_scores<MOD>();
    static constexpr bool mod_hides_keys = hides_keys<MOD>();
    static constexpr bool drops = drops_weights<MOD>;
    static constexpr HopperForwardKernelConfig cfg = CFG;
    static constexpr ForwardTraits traits = TRAITS;
    static constexpr DType dtype = CFG.dtype;
    static constexpr int d_head = CFG.d_head;      // columns of Q and K
    static constexpr int d_head_v = CFG.d_head_v;  // columns of V and O
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int q_stages = CFG.q_stages;
    static constexpr int v_stages = CFG.kv_stages;
    static constexpr int k_stages = CFG.kv_stages + CFG.extra_k_stages;

    static constexpr int n_consumers = B_r / kWarpgroupRows;
    static constexpr int n_consumer_warps = n_consumers * kWarpsPerWarpgroup;
    static constexpr int mask_groups =
        n_consumers;  // of rows, with kinds of tiles of their own (mod_tiles.cuh)
    static constexpr int n_threads = (n_consumers + 1) * kWarpgroupThreads;

    static constexpr int q_shared_steps = d_head / kMmaDepth - CFG.q_register_steps;  // of Q K^T
    static constexpr int q_registers = CFG.q_register_steps > 0 ? 4 * CFG.q_register_steps : 1;

    static constexpr int q_bytes = tile_bytes(B_r, d_head);
    static constexpr int k_bytes = tile_bytes(B_c, d_head);
    static constexpr int v_bytes = tile_bytes(B_c, d_head_v);

    static constexpr int smem_q = 0;
    static constexpr int smem_k = smem_q + q_stages * q_bytes;
    static constexpr int smem_v = smem_k + k_stages * k_bytes;
    static constexpr int smem_diagonals = smem_v + v_stages * v_bytes;
    // A function adds to scores what grows evenly with the distance between key and query.
    static constexpr bool adds_steps = adds_evenly<MOD>;
    // Scores begin at what it adds, where that follows from the distance otherwise, and where there is room:
    // with a mod that hides no keys, of sequences of one length, and where Q of the next item has a slot, so
    // that it is known ahead.
    using Diagonals = SharedDiagonals<B_c, B_r>;
    static constexpr int wanted_diagonal_bytes = k_stages * Diagonals::kBytes;
    static constexpr bool begins_scores =
        adds_of_distance<MOD> && !adds_steps && !mod_hides_keys && !TRAITS.varlen && !TRAITS.split &&
        q_stages > 1 && smem_diagonals + wanted_diagonal_bytes + kControlBytes <= kMaxSmemBytes;
    // Scores are softmax_scale times what they are counted in.
    static constexpr bool counts_unscaled = !mod_changes_scores || adds_steps || begins_scores;
    static constexpr int kDiagonalWarps = 2;  // of the producer, which find what scores begin at
    static constexpr int smem_streamed = smem_diagonals + (begins_scores ? wanted_diagonal_bytes : 0);
    static constexpr int streamed_bytes = tile_bytes(kWarpgroupRows, B_c);  // of a warpgroup
    static constexpr int streamed_room =
        (kMaxSmemBytes - kControlBytes - smem_streamed) / (n_consumers * streamed_bytes);
    // Beside an O of wider heads there are no registers.
    static constexpr bool copies_streamed = COPIES && streams_tiles<MOD> && !mod_hides_keys &&
                                            !TRAITS.varlen && !TRAITS.split && B_c % kPanelColumns == 0 &&
                                            streamed_room > 0 && d_head_v <= 128;
    static constexpr int streamed_stages = copies_streamed ? min_of(streamed_room, 2) : 0;
    using WithoutCopies = StaticForwardKernelConfig<CFG, TRAITS, MOD, false>;
    static constexpr int smem_kept = smem_streamed + n_consumers * streamed_stages * streamed_bytes;
    // What chunks of keys have left of an item, 16 bytes of each consumer thread a slot (chunk_sums.cuh): so
    // many slots as there is room for.
    static constexpr int kept_slot_bytes = n_consumers * kWarpgroupThreads * 16;
    static constexpr int wanted_kept_slots = CFG.chunk_tiles > 0 ? d_head_v / 8 + 2 : 0;
    static constexpr int kept_slots =
        min_of(max_of(kMaxSmemBytes - kControlBytes - smem_kept, 0) / kept_slot_bytes, wanted_kept_slots);
    static constexpr int smem_control = smem_kept + kept_slots * kept_slot_bytes;
    static constexpr int smem_bytes = smem_control + kControlBytes;

    // O's parts are float32, for which a Q slot has no room; planned work has parts among its items.
    static constexpr bool direct_store = CFG.direct_store || TRAITS.split || TRAITS.planned;
    static constexpr int chunk_tiles =
        CFG.chunk_tiles;  // of a chunk of keys (common/chunks.cuh); 0: no chunks
    // What becomes of a row depends on the row alone.
    static constexpr bool by_row = CFG.softmax_reference == SoftmaxReference::LAGGED_BY_ROW;
    // A mask may hide columns at the right edge of other tiles than the last.
    static constexpr bool masks_diagonal = TRAITS.causal || TRAITS.window;
    // An item's first tile may be another than tile 0.
    static constexpr bool tiles_begin = TRAITS.window || TRAITS.split || TRAITS.planned;
    // Items may have no tiles. Then a whole warp goes from item to item, one thread of it loads tiles (of
    // pages, all of it), and all write the rows of items without.
    static constexpr bool warp_loads = TRAITS.varlen || TRAITS.split;
    // Items may have rows for the first warpgroups only, as of sequences that decode: the others pass their
    // tiles on (idle_items.cuh).
    static constexpr bool idles = TRAITS.planned && n_consumers > 1 && CFG.overlap_products;
    // Causal: of an item's first tile a warpgroup may see only the first half.
    static constexpr bool half_tiles = CFG.half_tiles && TRAITS.causal && !tiles_begin && !has_mod;
    static constexpr RegisterBudget registers =
        register_budget(n_consumers, warp_loads, mod_hides_keys, TRAITS.planned);
    static constexpr int prefetch_next = warp_loads || has_mod ? 0 : CFG.prefetch_next;
    // What a consumer must know of an item does not fit one 16-byte word.
    static constexpr bool long_items = tiles_begin || TRAITS.varlen;
    // Causal: the first tiles may lie wholly above the diagonal of all but the last warpgroup, which pass
    // them on unused. So many at most; the tile before the item's first must keep its V slot meanwhile.
    static constexpr int tiles_above_diagonal = ceil_div((n_consumers - 1) * kWarpgroupRows, B_c);
    static constexpr int max_skipped_tiles =
        !TRAITS.causal || tiles_begin || has_mod || CFG.next_item == NextItem::AFTER_LAST_PV ? 0
        : CFG.trimmed      ? min_of(tiles_above_diagonal, v_stages - 1)
        : n_consumers == 3 ? 1
                           : 0;

    // Two blocks, one cluster, share the tiles of two query blocks. Under a causal mask the lower query block
    // passes on those of the other that lie above its own diagonal; with next_item the tile before them keeps
    // its V slot until then.
    static constexpr bool can_pass_tiles =
        CFG.next_item == NextItem::NONE || ceil_div(B_r, B_c) + max_skipped_tiles < v_stages;
    static constexpr bool paired_blocks = CFG.paired_blocks && !TRAITS.window && !warp_loads &&
                                          (!has_mod || (copies_streamed && !TRAITS.causal)) &&
                                          (!TRAITS.causal || can_pass_tiles);
    static constexpr bool passes_tiles = paired_blocks && TRAITS.causal;
    // Item numbers on their way to the second block. The first, which takes them from the counter, is ahead
    // by the tiles in the K ring at most, each of another item, and by the item whose number it sends.
    static constexpr int mail_slots = paired_blocks && CFG.dynamic_schedule ? 16 : 0;
    // Of a copy of K or V with so many columns: paired blocks divide its panels, or its rows.
    FLASH_HOST_DEVICE static constexpr int kv_box_rows(int columns) {
        return paired_blocks && panel_count(columns) % 2 == 1 ? B_c / 2 : B_c;
    }
    static constexpr int item_rows =
        paired_blocks ? 2 * B_r : B_r;  // of an item as it is numbered: of both blocks

    static_assert(!TRAITS.planned || (TRAITS.varlen && !TRAITS.split && !has_mod),
                  "planned: it needs varlen, has parts of its own, and no mods");
    static_assert(CFG.chunk_tiles >= 0 && (CFG.chunk_tiles == 0 || by_row),
                  "chunk_tiles: 0, or positive with a softmax_reference LAGGED_BY_ROW");
    static_assert(!has_mod || !by_row, "LAGGED_BY_ROW: no mods");
    static_assert(!has_mod || !TRAITS.softcap, "with a mod, a soft cap is a part of it");
    static_assert(!TRAITS.paged || TRAITS.varlen,
                  "paged: rows behind a sequence's last one are cut off as with varlen");
    static_assert(is_head_size(d_head) && is_head_size(d_head_v),
                  "d_head, d_head_v: 64, 96, 128, 192 or 256");
    static_assert(B_r % kWarpgroupRows == 0 && n_consumers >= 1 && n_consumers <= 4,
                  "B_r: 64 rows a consumer warpgroup, one to four of them");
    static_assert(B_c % kMmaDepth == 0 && B_c >= 16 && B_c <= 256, "B_c: a multiple of 16 up to 256");
    static_assert(CFG.softmax_reference != SoftmaxReference::ANCHORED, "ANCHORED: Ampere family only");
    static_assert(q_stages >= 1 && q_stages <= 4, "q_stages: 1 to 4");
    static_assert(
        v_stages >= 2 && k_stages <= 8 && CFG.extra_k_stages >= 0,
        "kv_stages, with extra_k_stages: 2 to 8 (V's slot is still in use when the next K is waited for)");
    static_assert(smem_bytes <= kMaxSmemBytes, "the tiles exceed the 227 KiB of shared memory of a block");
    static_assert(direct_store || q_bytes >= tile_bytes(B_r, d_head_v),
                  "O is staged in Q's slot and must fit: d_head_v <= d_head, or direct_store");
    static_assert(!CFG.ping_pong || n_consumers >= 2, "ping_pong: turns need at least two consumers");
    static_assert(!CFG.early_pass || (CFG.ping_pong && CFG.overlap_products),
                  "early_pass: about turns of two products; ping_pong and overlap_products");
    static_assert(mail_slots == 0 || mail_slots > k_stages + 2, "room for the item numbers under way");
    static_assert(CFG.prefetch_next >= 0 && CFG.prefetch_next <= 16, "prefetch_next: 0 to 16");
    static_assert(CFG.prefetch_next == 0 || n_consumers <= 2,
                  "prefetch_next: the load thread of more than two consumers has no registers to spare");
    static_assert(!CFG.half_tiles || (CFG.overlap_products && B_c % (2 * kMmaDepth) == 0),
                  "half_tiles: the first product is half as wide; overlap_products, B_c a multiple of 32");
    static_assert(CFG.q_register_steps >= 0 && q_shared_steps >= 0, "q_register_steps: 0 to d_head / 16");
    static_assert(CFG.section_heads >= 0 && (CFG.section_heads == 0 || CFG.head_sections),
                  "section_heads: 0, or positive with head_sections");
    static_assert(!CFG.forced_overlap || CFG.overlap_products,
                  "forced_overlap forces the softmax under P V: overlap_products must put it there");
    static_assert(CFG.next_item == NextItem::NONE || CFG.overlap_products,
                  "next_item: starting the next item early needs overlap_products");
    static_assert(
        CFG.next_item == NextItem::NONE || CFG.direct_store || q_stages >= 2,
        "next_item: O is staged in the old Q slot while the next Q is in use: two q_stages, or direct_store");
    static_assert(CFG.next_item != NextItem::AFTER_LAST_PV || q_stages >= 2,
                  "next_item AFTER_LAST_PV holds its turn while it waits for the next Q: with one Q slot the "
                  "warpgroups would wait for each other");
};

}  // namespace flash::hopper

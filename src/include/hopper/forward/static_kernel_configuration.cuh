// What follows from a Hopper configuration at compile time: threads, registers, and the map of shared
// memory. A configuration that cannot work is refused here by name.
//
// Shared memory of a block:
//
//     Q slots     q_stages  x (B_r, d)     O is staged in its item's Q slot unless it is stored directly
//     K ring      kv_stages + extra_k_stages  x (B_c, d)
//     V ring      kv_stages x (B_c, d_v)
//     control     1 KiB: mbarriers, the work item of each Q slot
#pragma once

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
// warp_loads: finding sequences and parts takes the load warp more. Three and four consumers have none to
// give: their load warp spills, outside of its loop over tiles.
constexpr RegisterBudget register_budget(int n_consumers, bool warp_loads) {
    switch (n_consumers) {
        case 1:
            return {warp_loads ? 56 : 40, 240};
        case 2:
            return warp_loads ? RegisterBudget{72, 216} : RegisterBudget{40, 232};
        case 3:
            return {32, 160};
        case 4:
            return {32, 112};
        default:
            return {0, 0};
    }
}

// Other head sizes are padded by the caller to one of these.
constexpr bool is_head_size(int d) { return d == 64 || d == 96 || d == 128 || d == 192 || d == 256; }

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
struct StaticForwardKernelConfig {
    static constexpr DType kDType = CFG.dtype;
    static constexpr int d_head = CFG.d_head;      // columns of Q and K
    static constexpr int d_head_v = CFG.d_head_v;  // columns of V and O
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int kQStages = CFG.q_stages;
    static constexpr int kVStages = CFG.kv_stages;
    static constexpr int kKStages = CFG.kv_stages + CFG.extra_k_stages;

    static constexpr int n_consumers = B_r / kWarpgroupRows;
    static constexpr int n_consumer_warps = n_consumers * kWarpsPerWarpgroup;
    static constexpr int n_threads = (n_consumers + 1) * kWarpgroupThreads;

    static constexpr int kQSharedSteps = d_head / kMmaDepth - CFG.q_register_steps;  // of Q K^T
    static constexpr int kQRegisters = CFG.q_register_steps > 0 ? 4 * CFG.q_register_steps : 1;

    static constexpr int kQBytes = tile_bytes(B_r, d_head);
    static constexpr int kKBytes = tile_bytes(B_c, d_head);
    static constexpr int kVBytes = tile_bytes(B_c, d_head_v);

    static constexpr int kQOffset = 0;
    static constexpr int kKOffset = kQOffset + kQStages * kQBytes;
    static constexpr int kVOffset = kKOffset + kKStages * kKBytes;
    static constexpr int kControlOffset = kVOffset + kVStages * kVBytes;
    static constexpr int smem_bytes = kControlOffset + kControlBytes;

    // O's parts are float32, for which a Q slot has no room.
    static constexpr bool kDirectStore = CFG.direct_store || TRAITS.split;
    // A mask may hide columns at the right edge of other tiles than the last.
    static constexpr bool kMasksDiagonal = TRAITS.causal || TRAITS.window;
    // An item's first tile may be another than tile 0.
    static constexpr bool kTilesBegin = TRAITS.window || TRAITS.split;
    // Items may have no tiles. Then a whole warp goes from item to item, one thread of it loads tiles, and
    // all write the rows of items without.
    static constexpr bool kWarpLoads = TRAITS.varlen || TRAITS.split;
    // Causal: of an item's first tile a warpgroup may see only the first half.
    static constexpr bool kHalfTiles = CFG.half_tiles && TRAITS.causal && !kTilesBegin;
    static constexpr RegisterBudget kRegisters = register_budget(n_consumers, kWarpLoads);
    static constexpr int kPrefetchNext = kWarpLoads ? 0 : CFG.prefetch_next;
    // What a consumer must know of an item does not fit one 16-byte word.
    static constexpr bool kLongItems = kTilesBegin || TRAITS.varlen;
    // Causal: the first tiles may lie wholly above the diagonal of all but the last warpgroup, which pass
    // them on unused. So many at most; the tile before the item's first must keep its V slot meanwhile.
    static constexpr int kTilesAboveDiagonal = ceil_div((n_consumers - 1) * kWarpgroupRows, B_c);
    static constexpr int kMaxSkippedTiles =
        !TRAITS.causal || kTilesBegin || CFG.next_item == NextItem::AFTER_LAST_PV ? 0
        : CFG.trimmed      ? min_of(kTilesAboveDiagonal, kVStages - 1)
        : n_consumers == 3 ? 1
                           : 0;

    // Two blocks, one cluster, share the tiles of two query blocks. Under a causal mask the lower query block
    // passes on those of the other that lie above its own diagonal; with next_item the tile before them keeps
    // its V slot until then.
    static constexpr bool kCanPassTiles =
        CFG.next_item == NextItem::NONE || ceil_div(B_r, B_c) + kMaxSkippedTiles < kVStages;
    static constexpr bool kPaired =
        CFG.paired_blocks && !TRAITS.window && !kWarpLoads && (!TRAITS.causal || kCanPassTiles);
    static constexpr bool kPassesTiles = kPaired && TRAITS.causal;
    // Item numbers on their way to the second block. The first, which takes them from the counter, is ahead
    // by the tiles in the K ring at most, each of another item, and by the item whose number it sends.
    static constexpr int kMailSlots = kPaired && CFG.dynamic_schedule ? 16 : 0;
    // Of a copy of K or V with so many columns: paired blocks divide its panels, or its rows.
    FLASH_HOST_DEVICE static constexpr int kv_box_rows(int columns) {
        return kPaired && panel_count(columns) % 2 == 1 ? B_c / 2 : B_c;
    }
    static constexpr int kItemRows = kPaired ? 2 * B_r : B_r;  // of an item as it is numbered: of both blocks

    static_assert(!TRAITS.paged || TRAITS.varlen,
                  "paged: rows behind a sequence's last one are cut off as with varlen");
    static_assert(is_head_size(d_head) && is_head_size(d_head_v),
                  "d_head, d_head_v: 64, 96, 128, 192 or 256");
    static_assert(B_r % kWarpgroupRows == 0 && n_consumers >= 1 && n_consumers <= 4,
                  "B_r: 64 rows a consumer warpgroup, one to four of them");
    static_assert(B_c % kMmaDepth == 0 && B_c >= 16 && B_c <= 256, "B_c: a multiple of 16 up to 256");
    static_assert(CFG.softmax_reference != SoftmaxReference::ANCHORED, "ANCHORED: Ampere family only");
    static_assert(kQStages >= 1 && kQStages <= 4, "q_stages: 1 to 4");
    static_assert(
        kVStages >= 2 && kKStages <= 8 && CFG.extra_k_stages >= 0,
        "kv_stages, with extra_k_stages: 2 to 8 (V's slot is still in use when the next K is waited for)");
    static_assert(smem_bytes <= kMaxSmemBytes, "the tiles exceed the 227 KiB of shared memory of a block");
    static_assert(kDirectStore || kQBytes >= tile_bytes(B_r, d_head_v),
                  "O is staged in Q's slot and must fit: d_head_v <= d_head, or direct_store");
    static_assert(!CFG.ping_pong || n_consumers >= 2, "ping_pong: turns need at least two consumers");
    static_assert(!CFG.early_pass || (CFG.ping_pong && CFG.overlap_products),
                  "early_pass: about turns of two products; ping_pong and overlap_products");
    static_assert(kMailSlots == 0 || kMailSlots > kKStages + 2, "room for the item numbers under way");
    static_assert(CFG.prefetch_next >= 0 && CFG.prefetch_next <= 16, "prefetch_next: 0 to 16");
    static_assert(CFG.prefetch_next == 0 || n_consumers <= 2,
                  "prefetch_next: the load thread of more than two consumers has no registers to spare");
    static_assert(!CFG.half_tiles || (CFG.overlap_products && B_c % (2 * kMmaDepth) == 0),
                  "half_tiles: the first product is half as wide; overlap_products, B_c a multiple of 32");
    static_assert(CFG.q_register_steps >= 0 && kQSharedSteps >= 0, "q_register_steps: 0 to d_head / 16");
    static_assert(CFG.section_heads >= 0 && (CFG.section_heads == 0 || CFG.head_sections),
                  "section_heads: 0, or positive with head_sections");
    static_assert(!CFG.forced_overlap || CFG.overlap_products,
                  "forced_overlap forces the softmax under P V: overlap_products must put it there");
    static_assert(CFG.next_item == NextItem::NONE || CFG.overlap_products,
                  "next_item: starting the next item early needs overlap_products");
    static_assert(
        CFG.next_item == NextItem::NONE || CFG.direct_store || kQStages >= 2,
        "next_item: O is staged in the old Q slot while the next Q is in use: two q_stages, or direct_store");
    static_assert(CFG.next_item != NextItem::AFTER_LAST_PV || kQStages >= 2,
                  "next_item AFTER_LAST_PV holds its turn while it waits for the next Q: with one Q slot the "
                  "warpgroups would wait for each other");
};

}  // namespace flash::hopper

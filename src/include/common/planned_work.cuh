// Work that the device finds for itself, where only it knows how long sequences are: which items there are,
// and which of them number i is. A launch is the same for all lengths, so that one CUDA graph serves them.
//
// Rows. The heads of a group, which read the same keys, are rows of one head: row r of a block of queries is
// head r % group of query r / group.
//
// Items. An item is one block of queries of one head (of rows), and one part of the keys (part_plan.cuh).
// Those of sequences of several blocks, prompts, are numbered for themselves, and so are the others',
// decoding (planned_scheduler.cuh). Within a sequence
//   - heads go in sections, whose keys stay in the L2 cache while all blocks of queries pass over them;
//   - blocks of queries go from last to first: under a causal mask the longest items start first;
//   - of one block the heads of the section come one after another, each with all its parts.
//
// Parts. A sequence that is cut has its rows in the workspace, behind those of the sequences before it:
// (parts, heads of rows, queries that count, group). Where the workspace is too small, which no valid lengths
// lead to, it is not cut.
//
// A warp looks at 32 sequences at a time, one a lane. Whatever the lengths are, no row is named that the
// tensors do not have (sequence_rows.cuh).
#pragma once

#include "common/cuda_utils.cuh"
#include "common/mask.cuh"
#include "common/page_table.cuh"
#include "common/part_plan.cuh"
#include "common/ptx.cuh"
#include "common/sequence_rows.cuh"

namespace flash {

inline constexpr int kMostSlots = 1 << 16;
inline constexpr int64_t kMostPlannedItems = 1 << 30;

// What a launch tells of the work.
struct PlannedLaunch {
    const int *cu_seqlens_q;           // (batch + 1)
    const int *cu_seqlens_k;           // (batch + 1) or nullptr
    const int *seqused_q, *seqused_k;  // (batch) or nullptr
    int batch;
    int longest_q, longest_k;  // rows of a sequence
    int rows_q, rows_k;        // nameable_rows of q and k
    int row_heads;             // heads of rows: query heads / group
    int heads_per_kv_head;     // of them, that read one kv head
    int group;                 // query heads that are rows of one
    RowDivisor by_group;
    int block_queries;  // of a block: B_r / group
    RowDivisor by_block;
    int l2_keys;       // keys of one head that may stay in the L2 cache
    bool has_prompts;  // a sequence may have more than one block of queries
    bool all_parts;    // sequences in one part go through the workspace, too
    PartPlan plan;
    float *partial_o, *partial_lse;  // (partial_rows, d_head_v), (partial_rows)
    int64_t partial_rows;

    // Blocks of so many queries.
    FLASH_HOST_DEVICE constexpr int blocks_of(int queries) const {
        return by_block.divide(queries + block_queries - 1);
    }
};

// The group of heads that become rows of blocks of B_r: the largest divisor of `heads` that has room.
constexpr int heads_as_rows(int heads, int B_r) {
    int group = min_of(heads, B_r);
    while (group > 1 && heads % group != 0) --group;
    return max_of(group, 1);
}

// Of a problem with packed queries, for blocks of B_r rows. kv_bytes: of a key and its value.
inline PlannedLaunch planned_launch(const ForwardProblem &problem, int B_r, int kv_bytes) {
    const int group = heads_as_rows(problem.n_heads / problem.n_heads_kv, B_r);
    const int block_queries = B_r / group;
    const int row_heads = problem.n_heads / group;
    return {
        .cu_seqlens_q = problem.cu_seqlens_q,
        .cu_seqlens_k = problem.cu_seqlens_k,
        .seqused_q = problem.seqused_q,
        .seqused_k = problem.seqused_k,
        .batch = problem.batch,
        .longest_q = problem.seq_len_q,
        .longest_k = problem.seq_len_k,
        .rows_q = nameable_rows(problem.total_q),
        .rows_k = nameable_rows(problem.total_k),
        .row_heads = row_heads,
        .heads_per_kv_head = row_heads / problem.n_heads_kv,
        .group = group,
        .by_group = RowDivisor::of(group),
        .block_queries = block_queries,
        .by_block = RowDivisor::of(block_queries),
        .l2_keys = (32 << 20) / kv_bytes,
        .has_prompts = problem.seq_len_q > block_queries,
        .all_parts = problem.o_float32,
        .plan = PartPlan::of(problem.plan_slots, max_of(problem.plan_shortest, 1),
                             max_of(problem.plan_longest, 1), min_of(problem.plan_few_queries, block_queries),
                             problem.plan_fixed),
        .partial_o = problem.partial_o,
        .partial_lse = problem.partial_lse,
        .partial_rows = problem.partial_rows,
    };
}

// Whether a planned kernel can run a problem: what it reads is there.
inline bool plan_allows(const ForwardProblem &problem, int block_queries) {
    if (problem.cu_seqlens_q == nullptr) return false;
    if (problem.plan_slots < 0 || problem.plan_slots > kMostSlots || problem.partial_rows < 0) return false;
    if (problem.plan_fixed < 0 || problem.plan_fixed > kMostParts) return false;
    // The numbers of items, of sequences that are all as long as the longest, stay in 32 bits.
    const int64_t blocks = max_of(ceil_div(problem.seq_len_q, block_queries), kMostParts);
    if (int64_t(problem.batch) * problem.n_heads * blocks > kMostPlannedItems) return false;
    const bool parts = problem.plan_slots > 0 || problem.plan_fixed > 1 || problem.o_float32;
    return !parts || (problem.partial_o != nullptr && problem.partial_lse != nullptr);
}

// A sequence, as its lengths and the launch say.
struct PlannedSequence {
    SequenceRows q, k;  // all rows of q; the keys that count
    int used;           // queries that count
    int blocks;         // of queries
    int parts;          // of the keys

    // That of another lane. By a whole warp.
    FLASH_DEVICE PlannedSequence of_lane(int lane) const {
        const auto there = [&](int x) { return __shfl_sync(kAllLanes, x, lane); };
        return {{there(q.batch), there(q.first_row), there(q.n_rows)},
                {there(k.batch), there(k.first_row), there(k.n_rows)},
                there(used),
                there(blocks),
                there(parts)};
    }
};

struct PlannedItem {
    int q_block;
    int head;  // of rows
    int batch;
    int first_kv_block, end_kv_block;  // its tiles are first … end - 1; kNoItem: there is no item
    int part, parts;
    int seq_len_q, seq_len_k;  // queries that count, keys
    int q_row, k_row;          // where the sequence begins
    int all_queries;           // of the sequence, those that do not count included
    int64_t partial_row;       // of the workspace: of this part and head the first row; -1: none is written

    FLASH_HOST_DEVICE constexpr bool has_tiles() const { return first_kv_block < end_kv_block; }
};
inline constexpr int kNoItem = -1;

// kChunkTiles: of a chunk of keys, where a sequence that is cut has its chunks as parts; 0: parts are equal.
// kPastL1: see load_word_if.
template <ForwardTraits TRAITS, int B_c, int kChunkTiles = 0, bool kPastL1 = false>
FLASH_DEVICE PlannedSequence planned_sequence(const PlannedLaunch &launch, int window_left, int window_right,
                                              int b) {
    const auto at = [&](const int *words, int place) { return words == nullptr ? nullptr : words + place; };
    int begin_q = 0, end_q = 0, begin_k = 0, end_k = 0, used_q = INT32_MAX, used_k = INT32_MAX;
    load_word_if<kPastL1>(begin_q, at(launch.cu_seqlens_q, b));
    load_word_if<kPastL1>(end_q, at(launch.cu_seqlens_q, b + 1));
    load_word_if<kPastL1>(begin_k, at(launch.cu_seqlens_k, b));
    load_word_if<kPastL1>(end_k, at(launch.cu_seqlens_k, b + 1));
    load_word_if<kPastL1>(used_q, at(launch.seqused_q, b));
    load_word_if<kPastL1>(used_k, at(launch.seqused_k, b));
    PlannedSequence s;
    s.q = packed_rows(begin_q, end_q, launch.longest_q, launch.rows_q);
    s.k = launch.cu_seqlens_k == nullptr ? SequenceRows{b, 0, launch.longest_k}
                                         : packed_rows(begin_k, end_k, launch.longest_k, launch.rows_k);
    s.k.n_rows = used_rows(s.k.n_rows, used_k);
    s.used = used_rows(s.q.n_rows, used_q);
    s.blocks = launch.blocks_of(s.q.n_rows);
    const Mask<TRAITS> mask{s.used, s.k.n_rows, window_left, window_right};
    // Of the last queries, which see most.
    const int first = max_of(0, launch.blocks_of(s.used) - 1) * launch.block_queries;
    const KeyBlocks tiles = mask.key_blocks(first, max_of(s.used - 1, 0), B_c);
    const int64_t alike = int64_t(launch.batch) * launch.row_heads * s.blocks;
    s.parts = s.used == 0 ? 1 : launch.plan.parts(alike, max_of(tiles.end - tiles.begin, 0), s.used);
    if constexpr (kChunkTiles > 0) {
        const int chunks = ceil_div(s.k.n_rows, kChunkTiles * B_c);
        s.parts = s.parts > 1 && chunks <= kMostParts ? max_of(chunks, 1) : 1;
    }
    return s;
}

// What is counted of a sequence: its items, say, and its rows in the workspace.
struct PlannedCount {
    int n;
    int64_t partial_rows;
};

// The sequences of a launch, one behind the other; all functions are called by a whole warp.
struct PlannedGroups {
    static constexpr int kGroup = kWarpSize;

    // The same on all lanes.
    int first_sequence;         // of the group in hand
    int group_end;              // one past the number of its last item
    int64_t group_partial_end;  // the rows of the workspace behind it
    // Of this lane's sequence.
    int own_begin;        // the number of its first item
    int64_t own_partial;  // its first row in the workspace

    FLASH_DEVICE void start() {
        first_sequence = -kGroup;
        group_end = own_begin = 0;
        group_partial_end = own_partial = 0;
    }

    // Takes the group that `number` is in. False: there is no such number. `count(b)`: the PlannedCount of
    // sequence b.
    template <typename Count>
    FLASH_DEVICE bool advance_to(int batch, int number, const Count &count) {
        const int lane = threadIdx.x % kGroup;
        while (number >= group_end) {
            first_sequence += kGroup;
            if (first_sequence >= batch) return false;
            const int sequence = first_sequence + lane;
            PlannedCount own{0, 0};
            if (sequence < batch) own = count(sequence);
            int end = own.n;  // of this and all lanes before it
            int64_t partial_end = own.partial_rows;
#pragma unroll
            for (int distance = 1; distance < kGroup; distance *= 2) {
                const int before = __shfl_up_sync(kAllLanes, end, distance);
                const int64_t partial_before = __shfl_up_sync(kAllLanes, partial_end, distance);
                if (lane >= distance) {
                    end += before;
                    partial_end += partial_before;
                }
            }
            own_begin = group_end + end - own.n;
            own_partial = group_partial_end + partial_end - own.partial_rows;
            group_end += __shfl_sync(kAllLanes, end, kGroup - 1);
            group_partial_end += __shfl_sync(kAllLanes, partial_end, kGroup - 1);
        }
        return true;
    }

    struct Place {
        int lane;    // whose sequence it is
        int number;  // of the item, among those of the sequence
        int64_t partial_row;
    };

    // Of item `number` of the group in hand.
    FLASH_DEVICE Place place(int number) const {
        // The last sequence that begins at or before it: empty ones begin where the next one does.
        const int owner = 31 - __clz(__ballot_sync(kAllLanes, own_begin <= number));
        return {owner, number - __shfl_sync(kAllLanes, own_begin, owner),
                __shfl_sync(kAllLanes, own_partial, owner)};
    }
};

// Rows of the workspace that a sequence takes, and whether there is room for them.
FLASH_DEVICE int64_t partial_rows_of(const PlannedLaunch &launch, const PlannedSequence &s) {
    if (s.parts == 1 && !launch.all_parts) return 0;
    return int64_t(s.used) * launch.group * launch.row_heads * s.parts;
}
FLASH_DEVICE bool partial_fits(const PlannedLaunch &launch, const PlannedSequence &s, int64_t first) {
    return first + partial_rows_of(launch, s) <= launch.partial_rows;
}

// The items of a launch: which numbers there are, and what they mean. Args: the kernel's arguments, with
// `planned` (PlannedLaunch), window_left and window_right. kSeenBefore: see mask.cuh. kKeepsSequences: what
// was found out of the sequences in hand stays in registers; else it is found again for an item.
template <typename Kernel, typename Args, bool kSeenBefore = false, bool kKeepsSequences = true>
struct PlannedItems {
    static constexpr int kChunkTiles = chunk_tiles_of<Kernel>();
    PlannedGroups groups;
    PlannedSequence own;  // of this lane, in the group in hand
    int prompts;          // whose items these are: 1: prompts', 0: the others'

    FLASH_DEVICE void start(bool of_prompts) {
        groups.start();
        prompts = of_prompts;
    }

    FLASH_DEVICE bool has(const Args &args, int number) {
        return groups.advance_to(args.planned.batch, number, [&](int b) -> PlannedCount {
            own = sequence(args, b);
            // One that has no room in the workspace is not cut, and its numbers behind the last are idle.
            const int n = own.blocks * args.planned.row_heads * own.parts;
            return {(own.blocks > 1) == (prompts != 0) ? n : 0, partial_rows_of(args.planned, own)};
        });
    }

    FLASH_DEVICE PlannedItem item(const Args &args, int number) const {
        const PlannedLaunch &launch = args.planned;
        const auto [lane, in_sequence, partial] = groups.place(number);
        const int b = groups.first_sequence + lane;
        const PlannedSequence s = kKeepsSequences ? own.of_lane(lane) : sequence(args, b);
        const bool fits = partial_fits(launch, s, partial);

        PlannedItem item{};
        item.batch = b;
        item.parts = s.parts;
        const int in_head = s.parts == 1 ? in_sequence : in_sequence / s.parts;
        item.part = in_sequence - in_head * s.parts;
        // Where all heads are one section, or a head has one block, nothing is divided: the first load waits.
        const bool one_section = int64_t(launch.row_heads) * max_of(s.k.n_rows, 1) <= launch.l2_keys;
        const int section_heads =
            one_section ? launch.row_heads
                        : max_of(1, min_of(launch.row_heads, launch.l2_keys / max_of(s.k.n_rows, 1)));
        const int section = one_section ? 0 : in_head / (section_heads * s.blocks);
        const int first_head = section * section_heads;
        const int heads = min_of(section_heads, launch.row_heads - first_head);
        const int step = s.blocks == 1 ? 0 : (in_head - first_head * s.blocks) / heads;
        item.head = first_head + (in_head - first_head * s.blocks - step * heads);
        item.q_block = s.blocks - 1 - step;
        item.seq_len_q = s.used;
        item.seq_len_k = s.k.n_rows;
        item.q_row = s.q.first_row;
        item.k_row = s.k.first_row;
        item.all_queries = s.q.n_rows;
        const bool cut = fits && (s.parts > 1 || launch.all_parts);
        item.partial_row =
            cut ? partial + (int64_t(item.part) * launch.row_heads + item.head) * s.used * launch.group : -1;

        const int first = item.q_block * launch.block_queries;
        const int last = min_of(first + launch.block_queries, s.used) - 1;
        if (last < first || (!fits && item.part > 0)) return item;  // no query counts, or others do this
        const Mask<Kernel::traits> mask{s.used, s.k.n_rows, args.window_left, args.window_right};
        KeyBlocks blocks = mask.template key_blocks<kSeenBefore>(first, last, Kernel::B_c);
        if constexpr (kChunkTiles > 0) {
            if (cut && s.parts > 1) blocks = blocks.chunk(item.part, kChunkTiles);
        } else if (cut) {
            blocks = blocks.template part<kSeenBefore>(item.part, s.parts);
        }
        item.first_kv_block = blocks.begin;
        item.end_kv_block = blocks.end;
        return item;
    }

  private:
    static FLASH_DEVICE PlannedSequence sequence(const Args &args, int b) {
        return planned_sequence<Kernel::traits, Kernel::B_c, kChunkTiles>(args.planned, args.window_left,
                                                                          args.window_right, b);
    }
};

}  // namespace flash

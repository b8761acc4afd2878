// Planned work: persistent thread blocks take items, whose blocks of queries and parts of the keys they find
// from the lengths of the sequences (common/planned_work.cuh).
//
// One warp looks for an item and leaves it in shared memory, with what it knows of the sequences it was found
// among; all others wait for it. While they compute, no register holds anything of that.
#pragma once

#include "ampere/forward/block_walk.cuh"
#include "ampere/forward/kernel_args.cuh"
#include "ampere/load_store.cuh"
#include "ampere/paged_load.cuh"
#include "common/planned_scheduler.cuh"

namespace flash::ampere {

// Q of an item's block: row r is head r % group of query r / group. Rows behind the last become zeros.
template <typename Kernel>
FLASH_DEVICE void load_grouped_queries(const ForwardKernelArgs &args, const PlannedItem &item, int n_rows,
                                       uint32_t smem_Q) {
    using Tile = typename Kernel::QTile;
    const PlannedLaunch &planned = args.planned;
    const int d_head = Kernel::traits.padded_head ? args.d_head : Kernel::d_head;
    const GlobalMatrix gmem_Q(args.Q, args.Q_strides, 0, item.head * planned.group, d_head);
    const int64_t head_bytes = args.Q_strides.head * kElementBytes;
    const uint32_t thread = threadIdx.x;
    const int chunk = thread % Tile::row_chunks, first = thread / Tile::row_chunks;
    const int n_panels = (gmem_Q.chunks - chunk + Tile::row_chunks - 1) / Tile::row_chunks;
#pragma unroll 1
    for (int row = first; row < Kernel::B_r; row += Kernel::copy_rows) {
        const int in_range = min_of(row, n_rows - 1);  // no address is made of others
        const int query = planned.by_group.divide(in_range);
        const int64_t q_row = int64_t(item.q_row) + item.q_block * planned.block_queries + query;
        const char *gmem = gmem_Q.begin + q_row * gmem_Q.row_bytes +
                           (in_range - query * planned.group) * head_bytes + chunk * kChunkBytes;
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel) {
            const bool exists = row < n_rows && (!Kernel::traits.padded_head || panel < n_panels);
            const uint32_t smem = smem_Q + Tile::offset(row, chunk) + panel * Tile::panel_bytes;
            if constexpr (Kernel::cfg.async_copy) {
                cp_async(smem, gmem + panel * Tile::row_bytes, exists);
            } else {
                store_shared(smem, exists ? load_global(gmem + panel * Tile::row_bytes) : Chunk{});
            }
        }
    }
}

// The end of the rows of a warp.
template <typename Kernel>
FLASH_DEVICE void store_planned_rows(const ForwardKernelArgs &args, const PlannedItem &item,
                                     const Output<Kernel> &O, const OnlineSoftmax<Kernel> &softmax,
                                     int warp_row) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            const int row = warp_row + m * kMmaM + accumulator(lane, 2 * r).row;
            // Of a chunk of keys the range is looked at when all are joined.
            const float total = softmax.total(m, r);
            auto [exponent, sum] = softmax.exponent_and_sum(m, r, total);
            if (Kernel::chunk_tiles > 0 && item.partial_row >= 0) sum = total;
            store_planned_row<Kernel::dtype, Kernel::d_head, Kernel::traits.padded_head, Kernel::traits.sinks,
                              (Kernel::chunk_tiles > 0)>(args.planned, args.output, item, row, exponent, sum,
                                                         [&](int chunk) {
                                                             const float (&tile)[4] = O.rmem[m][chunk];
                                                             return make_float2(tile[2 * r], tile[2 * r + 1]);
                                                         });
        }
    }
}

template <typename Kernel>
FLASH_DEVICE void compute_planned_item(const ForwardKernelArgs &args, const PlannedItem &shared_item) {
    extern __shared__ __align__(128) char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const int warp = uniform(threadIdx.x / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    constexpr ForwardTraits traits = Kernel::traits;
    const PlannedLaunch &planned = args.planned;

    const int seq_len_q = uniform(shared_item.seq_len_q), seq_len_k = uniform(shared_item.seq_len_k);
    const int q_row = uniform(shared_item.q_block) * planned.block_queries;  // first query of the block
    const int n_queries = min_of(planned.block_queries, seq_len_q - q_row);
    const int n_rows = uniform(n_queries * planned.group);
    const int batch = uniform(shared_item.batch);
    const int kv_head = uniform(shared_item.head / planned.heads_per_kv_head);
    const int d_head = traits.padded_head ? args.d_head : Kernel::d_head;
    const int d_head_v = traits.padded_head ? args.d_head_v : Kernel::d_head;
    // The first page, or the sequence, which packed tensors have in their rows.
    const int kv_batch = traits.paged || planned.cu_seqlens_k != nullptr ? 0 : batch;
    GlobalMatrix gmem_K(args.K, args.K_strides, kv_batch, kv_head, d_head);
    GlobalMatrix gmem_V(args.V, args.V_strides, kv_batch, kv_head, d_head_v);
    if constexpr (!traits.paged) {
        const int k_row = uniform(shared_item.k_row);
        gmem_K.skip_rows(k_row);
        gmem_V.skip_rows(k_row);
    }

    Mask<traits> mask{seq_len_q, seq_len_k};
    if constexpr (traits.window) {
        mask.window_left = args.window_left;
        mask.window_right = args.window_right;
    }
    // The blocks of this part; which of them are seen whole, of the item's.
    KeyBlocks blocks =
        mask.template key_blocks<Kernel::approximate_reference>(q_row, q_row + n_queries - 1, Kernel::B_c);
    if constexpr (Kernel::chunk_tiles > 0) {
        if (shared_item.partial_row >= 0 && shared_item.parts > 1) {
            blocks = blocks.chunk(shared_item.part, Kernel::chunk_tiles);
        }
    } else if (shared_item.partial_row >= 0) {
        blocks = blocks.template part<Kernel::approximate_reference>(shared_item.part, shared_item.parts);
    }
    blocks.end = uniform(blocks.end);
    blocks.full_end = uniform(blocks.full_end);
    if constexpr (traits.window) blocks.full_begin = uniform(blocks.full_begin);
    const int last_key_row = (blocks.end - 1) * Kernel::B_c;
    const int warp_row = warp * Kernel::warp_rows;

    load_grouped_queries<Kernel>(args, shared_item, n_rows, smem + Kernel::smem_Q);
    const KVSource<Kernel> source{
        .K = kv_loader<Kernel>(gmem_K, args, args.K_strides, batch, last_key_row, smem + Kernel::smem_K),
        .V = kv_loader<Kernel>(gmem_V, args, args.V_strides, batch, last_key_row, smem + Kernel::smem_V),
        .blocks_left = blocks.end - blocks.begin,
        .hidden_keys = uniform(mask.visible_begin(q_row) - blocks.begin * Kernel::B_c),
        .walk = {},
    };
    ForwardWarp<Kernel> state{
        .mask = mask,
        .q_row = q_row,
        .last_block = blocks.end - 1,
        .pipeline = {source, smem + Kernel::smem_barriers},
        .Q = {smem + Kernel::smem_Q, warp, lane},
        .score_product = {smem + Kernel::smem_K, lane, 0},
        .output_product = {smem + Kernel::smem_V, lane},
        .softmax = OnlineSoftmax<Kernel>(args.scale),
        .O = {},
        .pair = {smem + Kernel::smem_boxes, 0},
        .mods = {},
        .walk = {},
        .rows = {planned.by_group, n_rows},
    };
    state.O.clear();

    const int kv_block = blocks.end - 1;
    state.pipeline.start(mask.seq_len_k - kv_block * Kernel::B_c);
    state.prepare_Q();
    visit_all_blocks(state, args, blocks, kv_block);
    state.pipeline.drain();
    // Warps of which no row exists have rows of padding, maybe.
    store_planned_rows<Kernel>(args, shared_item, state.O, state.softmax, warp_row);
}

template <typename Kernel>
using PlannedSchedulerOf = PlannedScheduler<Kernel, ForwardKernelArgs, Kernel::approximate_reference, false>;

// The scheduler of a warp, in as little shared memory as will do: two blocks share an SM's.
struct StoredScheduler {
    int64_t own_partial[kWarpSize], group_partial_end;
    int own_begin[kWarpSize], first_sequence, group_end, prompts, classes_left, number;

    template <typename Scheduler>
    FLASH_DEVICE Scheduler load() const {
        const int lane = threadIdx.x % kWarpSize;
        Scheduler scheduler;
        scheduler.items.prompts = prompts;
        scheduler.items.groups.first_sequence = first_sequence;
        scheduler.items.groups.group_end = group_end;
        scheduler.items.groups.group_partial_end = group_partial_end;
        scheduler.items.groups.own_begin = own_begin[lane];
        scheduler.items.groups.own_partial = own_partial[lane];
        scheduler.classes_left = classes_left;
        scheduler.number = number;
        return scheduler;
    }

    template <typename Scheduler>
    FLASH_DEVICE void store(const Scheduler &scheduler) {
        const int lane = threadIdx.x % kWarpSize;
        __syncwarp();  // all lanes have loaded
        own_begin[lane] = scheduler.items.groups.own_begin;
        own_partial[lane] = scheduler.items.groups.own_partial;
        if (lane == 0) {
            prompts = scheduler.items.prompts;
            first_sequence = scheduler.items.groups.first_sequence;
            group_end = scheduler.items.groups.group_end;
            group_partial_end = scheduler.items.groups.group_partial_end;
            classes_left = scheduler.classes_left;
            number = scheduler.number;
        }
        __syncwarp();  // all lanes see it
    }
};

// Looks for the next item, by one warp; `first`: there was none before. A function of its own, so that what
// it takes costs the others no registers.
template <typename Kernel>
__device__ __noinline__ void find_planned_item(const ForwardKernelArgs &args, StoredScheduler &stored,
                                               PlannedItem &item, bool first) {
    PlannedSchedulerOf<Kernel> scheduler;
    if (first) {
        scheduler.start(args);
    } else {
        scheduler = stored.load<PlannedSchedulerOf<Kernel>>();
    }
    PlannedItem next{};
    if (!scheduler.next(args, next)) next.end_kv_block = kNoItem;
    stored.store(scheduler);
    if (threadIdx.x % kWarpSize == 0) item = next;
}

template <typename Kernel>
FLASH_DEVICE void run_planned_items(const ForwardKernelArgs &args) {
    __shared__ PlannedItem item;
    __shared__ StoredScheduler stored;  // of the warp that looks for items
    const int thread = threadIdx.x;
    wait_for_prerequisites();
#pragma unroll 1
    for (bool first = true;; first = false) {
        if (thread < kWarpSize) {
            find_planned_item<Kernel>(args, stored, item, first);
        } else if (first) {  // meanwhile
            clear_planned_rows_of_none(args, args.output, args.grid.n_heads, thread - kWarpSize,
                                       Kernel::n_threads - kWarpSize);
        }
        __syncthreads();  // the item is there
        if (item.end_kv_block == kNoItem) break;
        if (item.has_tiles()) {
            compute_planned_item<Kernel>(args, item);
        } else {
            fill_planned_item<(Kernel::chunk_tiles > 0)>(args.planned, args.output, item, thread,
                                                         Kernel::n_threads);
        }
        __syncthreads();  // nobody reads the item, or shared memory, any more
    }
    launch_dependents();  // the kernel that combines the parts
    if (thread == 0) PlannedSchedulerOf<Kernel>::finish(args);
}

}  // namespace flash::ampere

// What both roles of a thread block know: its keys, the tiles of queries that it visits, and the warp's
// place.
#pragma once

#include "ampere/backward/barriers.cuh"
#include "ampere/backward/copies.cuh"
#include "ampere/backward/kernel_args.cuh"
#include "ampere/backward/query_walk.cuh"
#include "common/backward/gradient_words.cuh"
#include "common/backward/trimmed_tiles.cuh"
#include "common/kept_weights.cuh"

namespace flash::ampere {

// Numbers that live through all products, the same in all threads. The compiler finds places for them; told
// to keep them in uniform registers it spills less, but more where warps are paired.
template <bool kUniform>
struct BlockNumbers {
    static FLASH_DEVICE int kept(int x) {
        if constexpr (kUniform) return uniform(x);
        return x;
    }
    static FLASH_DEVICE Range kept(Range range) { return {kept(range.begin), kept(range.end)}; }
    static FLASH_DEVICE SequenceRows kept(const SequenceRows &rows) {
        return {kept(rows.batch), kept(rows.first_row), kept(rows.n_rows)};
    }
    static FLASH_DEVICE BackwardPlace kept(const BackwardPlace &place) {
        return {kept(place.batch), kept(place.kv_head), kept(place.k_block),
                kept(place.q_seq), kept(place.k_seq),   kept(place.owned_keys)};
    }
};

template <typename Kernel>
struct BlockWork {
    using Numbers = BlockNumbers<!Kernel::paired_warps>;

    const BackwardKernelArgs &args;
    BackwardPlace place;
    VisibleRows<Kernel::traits> mask;
    int first_key;
    Range seeing_rows;  // of the sequence, those that see any key
    Range seen_keys;    // ... keys that any query sees
    Range visited;      // tiles of queries, of each head
    uint32_t smem;
    BackwardBarriers<Kernel> barriers;
    int thread, warp, lane;  // thread and warp: of the role
    int group, half;         // of the warps that share keys; with pairs the warp's half

    FLASH_DEVICE BlockWork(const BackwardKernelArgs &args, const BackwardPlace &place, uint32_t smem,
                           int role_thread)
        : args(args),
          place(Numbers::kept(place)),
          mask{.seq_len_q = this->place.q_seq.n_rows,
               .seq_len_k = this->place.k_seq.n_rows,
               .window_left = Kernel::traits.window ? args.window_left : 0,
               .window_right = Kernel::traits.window ? args.window_right : 0},
          first_key(this->place.k_block * Kernel::B_c),
          seeing_rows(Numbers::kept(mask.seeing_rows())),
          seen_keys(Numbers::kept(mask.seen_keys())),
          smem(smem),
          barriers{smem + Kernel::smem_barriers},
          thread(role_thread),
          warp(uniform(role_thread / kWarpSize)),
          lane(role_thread % kWarpSize),
          group(warp / Kernel::warps_per_group),
          half(warp % Kernel::warps_per_group) {
        const Range rows = mask.rows_of({first_key, min_of(first_key + Kernel::B_c, mask.seq_len_k)});
        visited = {0, 0};
        if (rows.begin < rows.end) {
            visited = {rows.begin / Kernel::B_r, ceil_div(rows.end, Kernel::B_r)};
        }
        // Ordered sums count the blocks that see a tile by the mask of their traits alone.
        if constexpr (trims_tiles<typename Kernel::Mod, false>() && Kernel::cfg.dq_sum != DQSum::ORDERED) {
            const Range keys{first_key, min_of(first_key + Kernel::B_c, mask.seq_len_k)};
            visited = Numbers::kept(trimmed_query_tiles<typename Kernel::Mod, Kernel::B_r>(
                mod_of<typename Kernel::Mod>(args), visited, keys, mask.seq_len_q, this->place.batch));
        }
    }

    FLASH_DEVICE QueryWalk walk() const { return {visited, args.heads_per_kv_head}; }
    FLASH_DEVICE int query_head(const QueryWalk &at) const {
        return place.kv_head * args.heads_per_kv_head + at.head;
    }

    // Which weights of the warp's part of P^T dropout keeps: blocks of 16 keys by 16 queries, those of the
    // same keys one behind the other.
    FLASH_DEVICE auto kept_weights(const QueryWalk &at) const {
        if constexpr (Kernel::drops) {
            constexpr int kBlocks = Kernel::warp_query_tiles;
            const MatrixCoordinate first = accumulator(computed_here(lane), 0);
            const int key = first_key + group * Kernel::warp_keys + first.row;
            const int query = at.tile * Kernel::B_r + half * Kernel::warp_queries + first.column;
            const Dropout &dropout = mod_of<typename Kernel::Mod>(args).captured.dropout;
            return KeptOfKeys<Kernel::m_tiles * kBlocks>(
                HeadDropout(dropout, place.batch, query_head(at)), [&](int block) {
                    return MatrixCoordinate{key + block / kBlocks * kMmaM,
                                            query + block % kBlocks * kMmaTile};
                });
        } else {
            return AllKept{};
        }
    }

    // Row 0 of the sequence in a head of a tensor.
    FLASH_DEVICE static const char *row_0(const void *tensor, const TensorStrides &strides,
                                          const SequenceRows &rows, int head) {
        const int64_t offset =
            rows.batch * strides.batch + head * strides.head + rows.first_row * strides.seq;
        return static_cast<const char *>(tensor) + offset * kElementBytes;
    }

    FLASH_DEVICE void copy_K() const {
        copy_tile<Kernel, typename Kernel::KTile>(
            smem + Kernel::smem_K, row_0(args.K, args.K_strides, place.k_seq, place.kv_head),
            args.K_strides.seq * kElementBytes, first_key, seen_keys, args.d_head / kChunkElements, thread);
        mbarrier_arrive_after_copies(barriers.full_K());
    }
    FLASH_DEVICE void copy_V() const {
        copy_tile<Kernel, typename Kernel::VTile>(
            smem + Kernel::smem_V, row_0(args.V, args.V_strides, place.k_seq, place.kv_head),
            args.V_strides.seq * kElementBytes, first_key, seen_keys, args.d_head_v / kChunkElements, thread);
        mbarrier_arrive_after_copies(barriers.full_V());
    }
    FLASH_DEVICE void copy_Q(const QueryWalk &at, int stage) const {
        const int head = query_head(at), row = at.tile * Kernel::B_r;
        copy_tile<Kernel, typename Kernel::QTile>(smem + Kernel::smem_Q + stage * Kernel::QTile::bytes,
                                                  row_0(args.Q, args.Q_strides, place.q_seq, head),
                                                  args.Q_strides.seq * kElementBytes, row, seeing_rows,
                                                  args.d_head / kChunkElements, thread);
        const int64_t numbers = lse_begin(Kernel::traits.varlen && args.cu_seqlens_q != nullptr, place.q_seq,
                                          args.n_heads, head, args.seq_len_q, args.total_q);
        copy_row_numbers<Kernel>(smem_lse(stage), args.lse_log2 + numbers, row, seeing_rows, thread);
        copy_row_numbers<Kernel>(smem_delta(stage), args.delta + numbers, row, seeing_rows, thread);
        mbarrier_arrive_after_copies(barriers.full_Q(stage));
    }
    FLASH_DEVICE void copy_dO(const QueryWalk &at, int stage) const {
        copy_tile<Kernel, typename Kernel::dOTile>(
            smem + Kernel::smem_dO + stage * Kernel::dOTile::bytes,
            row_0(args.dO, args.dO_strides, place.q_seq, query_head(at)), args.dO_strides.seq * kElementBytes,
            at.tile * Kernel::B_r, seeing_rows, args.d_head_v / kChunkElements, thread);
        mbarrier_arrive_after_copies(barriers.full_dO(stage));
    }

    FLASH_DEVICE uint32_t smem_lse(int stage) const {
        return smem + Kernel::smem_rows + stage * 2 * Kernel::row_bytes;
    }
    FLASH_DEVICE uint32_t smem_delta(int stage) const { return smem_lse(stage) + Kernel::row_bytes; }

    // The sums of dQ of a tile, and how many of its rows, in tiles of 16, there are.
    FLASH_DEVICE float *tile_sums(const QueryWalk &at) const {
        const int64_t first = args.sum_tiles.template first<Kernel::traits.varlen>(
            place.q_seq, args.n_heads, query_head(at), place.batch);
        const int64_t tile = first + at.tile * (Kernel::B_r / kMmaM);
        return args.dQ_sums + tile * (kMmaM * sum_columns());
    }
    FLASH_DEVICE int row_tiles_of(const QueryWalk &at) const {
        return ceil_div(mask.seq_len_q - at.tile * Kernel::B_r, kMmaM);
    }
    FLASH_DEVICE int sum_columns() const { return Kernel::traits.padded_head ? args.d_head : Kernel::d_head; }

    // Element (row, column) of a tile of dQ; row_0 has the rest.
    FLASH_DEVICE char *in_dQ(const QueryWalk &at, int row, int column) const {
        int tile = at.tile;
        asm volatile("" : "+r"(tile));  // worked out each time: kept from one use to the next it is spilled
        const int64_t element = (int64_t(tile) * Kernel::B_r + row) * args.dQ_strides.seq +
                                column * kWordsOfGradient<Kernel::traits.float_query_gradients>;
        return const_cast<char *>(row_0(args.dQ, args.dQ_strides, place.q_seq, query_head(at))) +
               element * kElementBytes;
    }
    // Blocks before this one that see the tile, and whether none comes behind it.
    struct Turn {
        int number;
        bool last;
    };
    FLASH_DEVICE Turn turn_number(const QueryWalk &at) const {
        const int first_row = at.tile * Kernel::B_r;
        const int last_row = min_of(first_row + Kernel::B_r, seeing_rows.end) - 1;
        return {place.k_block - mask.keys_of(first_row).begin / Kernel::B_c,
                place.k_block == (mask.keys_of(last_row).end - 1) / Kernel::B_c};
    }
};

}  // namespace flash::ampere

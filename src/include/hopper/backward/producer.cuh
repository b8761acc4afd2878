// The producer warpgroup: one warp takes items and loads K, V, Q and dO by TMA, one brings LSE and delta, and
// where dQ leaves by bulk reductions, one warp a part adds its tiles to the sums. It gives most of its
// registers to the consumers.
#pragma once

#include "common/softmax_scale.cuh"
#include "hopper/backward/empty_items.cuh"
#include "hopper/backward/kept_sums.cuh"
#include "hopper/backward/load_warp.cuh"
#include "hopper/backward/maps.cuh"
#include "hopper/backward/shared_memory.cuh"

namespace flash::hopper {

// The load warp. All lanes go from item to item; one issues the copies.
template <typename Kernel>
struct BackwardLoadWarp {
    using Items = Scheduler<Kernel, BackwardKernelArgs, BackwardSharedMemory<Kernel>, KeyItems<Kernel>>;

    const BackwardSharedMemory<Kernel> smem;
    const BackwardMaps &maps;
    const BackwardKernelArgs &args;
    const TileLoads<Kernel> loads{args};

    RingPosition<Kernel::k_stages> k_position{1};
    RingPosition<Kernel::v_stages> v_position{1};
    RingPosition<Kernel::q_stages> q_position{1};

    FLASH_DEVICE void run() {
        hand_out_items<Items>(
            args, smem,
            [&](BackwardItem item, bool issues) {
                hand_out(item, issues);
                if constexpr (Kernel::keeps_dq) {
                    while (++item.tile < ceil_div(item.owned_rows, Kernel::B_c)) {
                        set_query_blocks<Kernel>(args, item);
                        hand_out(item, issues);
                    }
                }
            },
            [&] {
                const uint32_t slot = k_position.slot();
                return ItemSlot{smem.item(slot), smem.k_full(slot), smem.k_empty(slot), k_position.phase()};
            });
    }

  private:
    FLASH_DEVICE void hand_out(const BackwardItem &item, bool issues) {
        if (item.n_steps == 0) {
            clear_item<Kernel>(args, item);
        } else if (issues) {
            load_item(item);
        }
    }

    FLASH_DEVICE void load_item(const BackwardItem &item) {
        const uint32_t k_slot = k_position.slot();
        mbarrier_wait(smem.k_empty(k_slot), k_position.phase());  // K and the item before are done with
        write_item(smem.item(k_slot), item);
        mbarrier_arrive_expect(smem.k_full(k_slot), Kernel::k_bytes);
        loads.template keys<Kernel::d_head, Kernel::k_panel_step>(smem.k(k_slot), maps.k, smem.k_full(k_slot),
                                                                  item, item.head, item.tile);
        k_position.advance();
        int head = item.head * args.group, q_block = item.first_block;
#pragma unroll 1
        for (int i = 0; i < item.n_steps; ++i) {
            const uint32_t slot = q_position.slot();
            mbarrier_wait(smem.q_empty(slot), q_position.phase());
            mbarrier_arrive_expect(smem.q_full(slot), Kernel::q_bytes);
            loads.template queries<Kernel::d_head>(smem.q(slot), maps.q, smem.q_full(slot), item, head,
                                                   q_block);
            if (i == 0) load_v(item);
            mbarrier_arrive_expect(smem.do_full(slot), Kernel::do_bytes);
            loads.template queries<Kernel::d_head_v>(smem.dout(slot), maps.dout, smem.do_full(slot), item,
                                                     head, q_block);
            q_position.advance();
            if (++q_block == item.end_block) {
                q_block = item.first_block;
                ++head;
            }
        }
    }

    FLASH_DEVICE void load_v(const BackwardItem &item) {
        const uint32_t slot = v_position.slot();
        mbarrier_wait(smem.v_empty(slot), v_position.phase());
        mbarrier_arrive_expect(smem.v_full(slot), Kernel::v_bytes);
        loads.template keys<Kernel::d_head_v>(smem.v(slot), maps.v, smem.v_full(slot), item, item.head,
                                              item.tile);
        v_position.advance();
    }
};

// Goes through the items as the load warp hands them out, a whole warp.
template <typename Kernel>
struct ItemReader {
    const BackwardSharedMemory<Kernel> smem;
    RingPosition<Kernel::k_stages> position{0};

    // False: there is none.
    FLASH_DEVICE bool next(BackwardItem &item) {
        mbarrier_wait(smem.k_full(position.slot()), position.phase());
        item = read_item(smem.item(position.slot()));
        if (item.n_steps == kEndOfItems) return false;
        __syncwarp();
        if (arrives_for_warp(threadIdx.x % kWarpSize)) mbarrier_arrive(smem.k_empty(position.slot()));
        position.advance();
        return true;
    }
};

// The row warp: LSE, in powers of 2, and delta of one query block after another, and what a mask of the
// user's leaves of it. Plain loads, since rows of a head begin anywhere. An LSE of -inf is of a row that sees
// no key: +inf makes its P 0, as that of rows past the end.
template <typename Kernel>
struct RowWarp {
    static constexpr int kRows = Kernel::B_r / kWarpSize;  // of a lane

    const BackwardSharedMemory<Kernel> smem;
    const BackwardKernelArgs &args;

    FLASH_DEVICE void run() {
        const int lane = threadIdx.x % kWarpSize;
        ItemReader<Kernel> items{smem};
        RingPosition<Kernel::q_stages> position{1};
        BackwardItem item;
        while (items.next(item)) {
            int head = item.head * args.group, q_block = item.first_block;
            float lse[kRows], delta[kRows];
            load(item, head, q_block, lane, lse, delta);
            TileKind kind = kind_of(item, head, q_block, lane);
#pragma unroll 1
            for (int i = 0; i < item.n_steps; ++i) {
                const uint32_t slot = position.slot();
                mbarrier_wait(smem.q_empty(slot), position.phase());
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    store_shared(smem.lse(slot) + (r * kWarpSize + lane) * 4, __float_as_uint(lse[r]));
                    store_shared(smem.delta(slot) + (r * kWarpSize + lane) * 4, __float_as_uint(delta[r]));
                }
                if constexpr (Kernel::hides_scores) {
                    if (lane < Kernel::n_consumers)
                        store_shared(smem.kind(slot, lane), static_cast<uint32_t>(kind));
                }
                __syncwarp();
                if (arrives_for_warp(lane)) mbarrier_arrive(smem.q_full(slot));
                position.advance();
                if (++q_block == item.end_block) {
                    q_block = item.first_block;
                    ++head;
                }
                if (i + 1 < item.n_steps) {
                    load(item, head, q_block, lane, lse, delta);
                    kind = kind_of(item, head, q_block, lane);
                }
            }
        }
    }

  private:
    // Of the keys of consumer warpgroup `lane`.
    FLASH_DEVICE TileKind kind_of(const BackwardItem &item, int head, int q_block, int lane) const {
        if constexpr (Kernel::hides_scores) {
            if (lane < Kernel::n_consumers) {
                constexpr int kRowTiles = Kernel::B_r / kFoundRows;
                static_assert(kFoundKeys == kWarpgroupRows && kRowTiles <= 2);
                const int key_tile = item.tile * (Kernel::B_c / kFoundKeys) + (Kernel::split ? 0 : lane);
                const auto kind = [&](int i) {
                    return known_kind_of_tile(mod_of<typename Kernel::Mod>(args), item.batch, head,
                                              q_block * kRowTiles + i, key_tile, item.seq_len_q,
                                              item.seq_len_k);
                };
                const TileKind first = kind(0);
                if (kRowTiles == 1 || (q_block * kRowTiles + 1) * kFoundRows >= item.seq_len_q) return first;
                return first == kind(1) ? first : TileKind::PARTIAL;
            }
        }
        return TileKind::PARTIAL;
    }

    FLASH_DEVICE void load(const BackwardItem &item, int head, int q_block, int lane, float (&lse)[kRows],
                           float (&delta)[kRows]) const {
        const bool packed = Kernel::traits.varlen && args.cu_seqlens_q != nullptr;
        const SequenceRows rows{item.batch, item.q_row, item.seq_len_q};
        const int64_t begin =
            lse_begin(packed, rows, args.n_heads_kv * args.group, head, args.seq_len_q, args.total_q);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = q_block * Kernel::B_r + r * kWarpSize + lane;
            const bool exists = row < item.seq_len_q;
            const float x = exists ? args.lse[begin + row] * kLog2e - Kernel::p_shift : INFINITY;
            lse[r] = x == -INFINITY ? INFINITY : x;
            delta[r] = exists ? args.delta[begin + row] : 0.f;
        }
    }
};

// Adds the tiles of dQ of one part, which its consumer warpgroup stages, to the sums: of 16 rows each, as
// many as the sequence has rows for, and as many columns as the tensor has. With keeps_dq, whole parts.
template <typename Kernel>
struct DqReducer {
    static constexpr int kThreads = Kernel::warpgroup_threads + kWarpSize;
    static constexpr int kRowTiles = kWarpgroupRows / kMmaM, kColumnTiles = Kernel::dq_columns / kMmaN;
    static constexpr int kStagedBytes = kColumnTiles * kSumTileFloats * 4;  // of 16 rows

    const BackwardSharedMemory<Kernel> smem;
    const BackwardKernelArgs &args;
    const int part;

    FLASH_DEVICE void run() {
        const bool first_lane = threadIdx.x % kWarpSize == 0;
        ItemReader<Kernel> items{smem};
        BackwardItem item;
        named_barrier_arrive(named_barrier::kStageFree + part, kThreads);
        while (items.next(item)) {
            int head_tile = first_dq_tile<Kernel>(args, item);
            int q_block = item.first_block;
#pragma unroll 1
            for (int i = 0; i < item.n_steps; ++i) {
                named_barrier_sync(named_barrier::kStaged + part, kThreads);
                if (first_lane) {
                    if constexpr (Kernel::keeps_dq) {
                        leave(item, head_tile + q_block, q_block);
                    } else {
                        add(head_tile + q_block * Kernel::dq_row_tiles,
                            ceil_div(min(Kernel::B_r, item.seq_len_q - q_block * Kernel::B_r), kMmaM));
                        tma_store_commit();
                        tma_store_wait_read();
                    }
                }
                __syncwarp();
                named_barrier_arrive(named_barrier::kStageFree + part, kThreads);
                if (++q_block == item.end_block) {
                    q_block = item.first_block;
                    head_tile += args.dq_tiles;
                }
            }
        }
        if (first_lane) tma_store_wait();  // shared memory must outlive the additions
    }

  private:
    // With keeps_dq. What is added later, and read, finds the part there.
    FLASH_DEVICE void leave(const BackwardItem &item, int tile, int q_block) const {
        const PartOfSum part_of = part_of_sum<Kernel>(args, item, q_block);
        if (part_of.last) return;  // the consumers have it
        float *sums = kept_sums<Kernel>(args, tile, part);
        if (part_of.first) {
            bulk_store(sums, smem.dq(part), Kernel::dq_part_floats * 4);
        } else {
            bulk_add_floats(sums, smem.dq(part), Kernel::dq_part_floats * 4);
        }
        tma_store_commit();
        tma_store_wait();
    }

    // `tile`: the block's first; n_tiles: so many of it exist.
    FLASH_DEVICE void add(int tile, int n_tiles) const {
        const int columns = Kernel::traits.padded_head ? args.d_head : Kernel::d_head;
        const int first_row_tile = Kernel::dq_parts_are_rows ? part * kRowTiles : 0;
        const int first_column_tile = Kernel::dq_parts_are_rows ? 0 : part * kColumnTiles;
        const int row_tiles = min(n_tiles - first_row_tile, kRowTiles);
        const int row_floats = kMmaM * columns;
        float *sums =
            args.dq_sums + int64_t{tile + first_row_tile} * row_floats + first_column_tile * kSumTileFloats;
        if (row_tiles <= 0) return;
        if constexpr (Kernel::dq_parts_are_rows && !Kernel::traits.padded_head) {  // all in one piece
            bulk_add_floats(sums, smem.dq(part), row_tiles * kStagedBytes);
        } else {
            const int column_tiles = min(columns / kMmaN - first_column_tile, kColumnTiles);
            if (column_tiles <= 0) return;
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                if (i >= row_tiles) break;
                bulk_add_floats(sums + i * row_floats, smem.dq(part) + i * kStagedBytes,
                                column_tiles * kSumTileFloats * 4);
            }
        }
    }
};

}  // namespace flash::hopper

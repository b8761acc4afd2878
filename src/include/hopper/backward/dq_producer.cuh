// dQ's own kernel: addresses in shared memory, barriers, and the warp that loads.
#pragma once

#include "hopper/backward/load_warp.cuh"
#include "hopper/backward/maps.cuh"
#include "hopper/backward/query_items.cuh"
#include "tma/rings.cuh"

namespace flash::hopper {

// Every slot has a "full" barrier and an "empty" one; a Q slot also carries dO and its item.
template <typename Kernel>
struct DqSharedMemory {
    static constexpr int kWarpArrivals = Kernel::n_consumer_warps * kArrivalsOfWarp;
    static constexpr int kItemsOffset = 512, kKindsOffset = 704;
    enum Barrier : int {
        kQFull = 0,
        kQEmpty = kQFull + Kernel::q_stages,
        kKFull = kQEmpty + Kernel::q_stages,
        kKEmpty = kKFull + Kernel::k_stages,
        kVFull = kKEmpty + Kernel::k_stages,
        kVEmpty = kVFull + Kernel::v_stages,
        kBarriers = kVEmpty + Kernel::v_stages,
    };
    static_assert(kBarriers * 8 <= kItemsOffset &&
                  kItemsOffset + Kernel::q_stages * kItemBytes <= kKindsOffset);

    uint32_t base;  // a multiple of 1024

    FLASH_DEVICE uint32_t q(uint32_t slot) const { return base + Kernel::smem_q + slot * Kernel::q_bytes; }
    FLASH_DEVICE uint32_t dout(uint32_t slot) const {
        return base + Kernel::smem_do + slot * Kernel::do_bytes;
    }
    FLASH_DEVICE uint32_t k(uint32_t slot) const { return base + Kernel::smem_k + slot * Kernel::k_bytes; }
    FLASH_DEVICE uint32_t v(uint32_t slot) const { return base + Kernel::smem_v + slot * Kernel::v_bytes; }
    FLASH_DEVICE uint32_t item(uint32_t slot) const {
        return base + Kernel::smem_control + kItemsOffset + slot * kItemBytes;
    }
    // With a mask of the user's: what it leaves of a K tile for a consumer warpgroup, a TileKind.
    FLASH_DEVICE uint32_t kind(uint32_t slot, int warpgroup) const {
        return base + Kernel::smem_control + kKindsOffset + (slot * Kernel::n_consumers + warpgroup) * 4;
    }

    FLASH_DEVICE uint32_t q_full(uint32_t slot) const { return barrier(kQFull, slot); }
    FLASH_DEVICE uint32_t q_empty(uint32_t slot) const { return barrier(kQEmpty, slot); }
    FLASH_DEVICE uint32_t k_full(uint32_t slot) const { return barrier(kKFull, slot); }
    FLASH_DEVICE uint32_t k_empty(uint32_t slot) const { return barrier(kKEmpty, slot); }
    FLASH_DEVICE uint32_t v_full(uint32_t slot) const { return barrier(kVFull, slot); }
    FLASH_DEVICE uint32_t v_empty(uint32_t slot) const { return barrier(kVEmpty, slot); }

    // For Scheduler, which sends nothing here.
    FLASH_DEVICE uint32_t mail(uint32_t) const { return 0; }
    FLASH_DEVICE uint32_t mail_full(uint32_t) const { return 0; }

    // Called by all threads before any use.
    FLASH_DEVICE void initialise() const {
        if (threadIdx.x == 0) {
            const auto ring = [&](int full, int empty, int stages) {
                for (int slot = 0; slot < stages; ++slot) {
                    mbarrier_init(barrier(full, slot), 1);
                    mbarrier_init(barrier(empty, slot), kWarpArrivals);
                }
            };
            ring(kQFull, kQEmpty, Kernel::q_stages);
            ring(kKFull, kKEmpty, Kernel::k_stages);
            ring(kVFull, kVEmpty, Kernel::v_stages);
            fence_mbarrier_init();
        }
        __syncthreads();  // no thread touches a barrier before it is initialised
    }

  private:
    FLASH_DEVICE uint32_t barrier(int first, uint32_t slot) const {
        return base + Kernel::smem_control + (first + slot) * 8;
    }
};

// All lanes go from item to item; one issues the copies.
template <typename Kernel>
struct DqLoadWarp {
    using Items = Scheduler<Kernel, BackwardKernelArgs, DqSharedMemory<Kernel>, DqItems<Kernel>>;

    const DqSharedMemory<Kernel> smem;
    const BackwardMaps &maps;
    const BackwardKernelArgs &args;
    const TileLoads<Kernel> loads{args};

    RingPosition<Kernel::q_stages> q_position{1};
    RingPosition<Kernel::k_stages> k_position{1};
    RingPosition<Kernel::v_stages> v_position{1};

    FLASH_DEVICE void run() {
        hand_out_items<Items>(
            args, smem,
            [&](const BackwardItem &item, bool issues) {
                if (item.n_steps == 0) {
                    clear_queries<Kernel>(args, item);
                } else if (issues) {
                    load_item(item);
                }
            },
            [&] {
                const uint32_t slot = q_position.slot();
                return ItemSlot{smem.item(slot), smem.q_full(slot), smem.q_empty(slot), q_position.phase()};
            });
    }

  private:
    FLASH_DEVICE void load_item(const BackwardItem &item) {
        // With one slot Q waits for the whole item before it: the first K goes first.
        if (Kernel::q_stages > 1) load_queries(item);
#pragma unroll 1
        for (int tile = item.first_block; tile < item.end_block; ++tile) {
            const int head = item.head / args.group;
            mbarrier_wait(smem.k_empty(k_position.slot()), k_position.phase());
            write_kinds(item, tile);
            mbarrier_arrive_expect(smem.k_full(k_position.slot()), Kernel::k_bytes);
            loads.template keys<Kernel::d_head>(smem.k(k_position.slot()), maps.k,
                                                smem.k_full(k_position.slot()), item, head, tile);
            k_position.advance();
            if (Kernel::q_stages == 1 && tile == item.first_block) load_queries(item);
            mbarrier_wait(smem.v_empty(v_position.slot()), v_position.phase());
            mbarrier_arrive_expect(smem.v_full(v_position.slot()), Kernel::v_bytes);
            loads.template keys<Kernel::d_head_v>(smem.v(v_position.slot()), maps.v,
                                                  smem.v_full(v_position.slot()), item, head, tile);
            v_position.advance();
        }
    }

    // Before the slot counts as full.
    FLASH_DEVICE void write_kinds(const BackwardItem &item, int tile) const {
        if constexpr (Kernel::hides_scores) {
            const Range keys{tile * Kernel::B_c, min(tile * Kernel::B_c + Kernel::B_c, item.seq_len_k)};
#pragma unroll 1
            for (int warpgroup = 0; warpgroup < Kernel::n_consumers; ++warpgroup) {
                const int first = item.tile * Kernel::B_r + warpgroup * kWarpgroupRows;
                const TileKind kind = known_kind(mod_of<typename Kernel::Mod>(args), item.batch, item.head,
                                                 {first, min(first + kWarpgroupRows, item.seq_len_q)}, keys);
                store_shared(smem.kind(k_position.slot(), warpgroup), static_cast<uint32_t>(kind));
            }
        }
    }

    FLASH_DEVICE void load_queries(const BackwardItem &item) {
        const uint32_t slot = q_position.slot();
        mbarrier_wait(smem.q_empty(slot), q_position.phase());
        write_item(smem.item(slot), item);
        mbarrier_arrive_expect(smem.q_full(slot), Kernel::q_bytes + Kernel::do_bytes);
        loads.template queries<Kernel::d_head>(smem.q(slot), maps.q, smem.q_full(slot), item, item.head,
                                               item.tile);
        loads.template queries<Kernel::d_head_v>(smem.dout(slot), maps.dout, smem.q_full(slot), item,
                                                 item.head, item.tile);
        q_position.advance();
    }
};

}  // namespace flash::hopper

// The PTX instructions of bulk tensor copies (TMA), one function each: the copies, the mbarriers that count
// their bytes, and what blocks of a cluster tell each other. Shared memory addresses are 32-bit
// (`smem_address`).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace flash::tma {

// ---------------------------------------------------------------- mbarriers
// Besides arrivals (ptx.cuh), a phase may wait for announced bytes of bulk copies.

// Makes initialised barriers visible to the asynchronous copies of the whole block.
FLASH_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives at the barrier of this address in block `rank` of the cluster.
FLASH_DEVICE void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Stores a word at this address in block `rank` of the cluster and takes its 4 bytes off the barrier there.
FLASH_DEVICE void store_async_at(uint32_t address, uint32_t value, uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote, remote_barrier;\n"
        "mapa.shared::cluster.u32 remote, %0, %3;\n"
        "mapa.shared::cluster.u32 remote_barrier, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [remote], %1, [remote_barrier];\n"
        "}" ::"r"(address),
        "r"(value), "r"(barrier), "r"(rank)
        : "memory");
}

// Waits until the phase of this parity is complete; try_wait may give up early: hence the loop. Written as
// two branches: of ptx.cuh's one, ptxas makes more branches around products here; of these, more registers
// there.
FLASH_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE_%=;\n"
        "bra WAIT_%=;\n"
        "DONE_%=:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives and announces `bytes` of copies that complete on this barrier.
FLASH_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Every thread of the cluster that has not ended: what each did before is visible to all after.
FLASH_DEVICE void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}

// ---------------------------------------------------------------- one lane of a warp
// True for one lane, the same in every call. Called by a whole warp. The compiler knows that there is one:
// behind `threadIdx.x == 0` a copy becomes a loop over the threads that might issue it.
FLASH_DEVICE bool elect_lane() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred is_elected;\n"
        "elect.sync _|is_elected, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, is_elected;\n"
        "}"
        : "=r"(elected)
        :
        : "memory");
    return elected != 0;
}

// ---------------------------------------------------------------- bulk tensor copies
// L2 cache policies: Q is read once, K and V mostly again, by other query blocks.
FLASH_DEVICE uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

FLASH_DEVICE uint64_t evict_normal_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

FLASH_DEVICE uint64_t evict_last_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Global to shared memory: the map's box at (column, row, head, batch). What lies outside the tensor
// arrives as zeros, and the full box counts on the barrier.
FLASH_DEVICE void tma_load(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int column, int row,
                           int head, int batch, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
        : "memory");
}

// The same of a ragged map (tensor_view.cuh): the box at (column, row, end, head, batch).
FLASH_DEVICE void tma_load(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int column, int row,
                           int end, int head, int batch, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(end), "r"(head), "r"(batch), "l"(policy)
        : "memory");
}

// The same as tma_load, to the same address and barrier in both blocks of a cluster of two.
FLASH_DEVICE void tma_load_for_both(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int column,
                                    int row, int head, int batch, uint64_t policy) {
    constexpr uint16_t kBothBlocks = 3;
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(kBothBlocks), "l"(policy)
        : "memory");
}

// Brings a tensor map itself near: the first copy needs not wait for it.
FLASH_DEVICE void prefetch_tensor_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The map's box at (column, row, head, batch) to the L2 cache.
FLASH_DEVICE void tma_prefetch(const CUtensorMap *map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
                 "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Shared to global memory; what lies outside the tensor is not written.
FLASH_DEVICE void tma_store(uint32_t smem, const CUtensorMap *map, int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(smem), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

FLASH_DEVICE void tma_store(uint32_t smem, const CUtensorMap *map, int column, int row, int end, int head,
                            int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
            map),
        "r"(smem), "r"(column), "r"(row), "r"(end), "r"(head), "r"(batch)
        : "memory");
}

// Adds `bytes` of floats in shared memory to those at `gmem`; both are multiples of 16. Counted as a store.
FLASH_DEVICE void bulk_add_floats(float *gmem, uint32_t smem, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
                 "r"(smem), "r"(bytes)
                 : "memory");
}

// The same in place of what is there.
FLASH_DEVICE void bulk_store(void *gmem, uint32_t smem, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem),
                 "r"(bytes)
                 : "memory");
}

FLASH_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All committed stores have read their shared memory: it may be written again.
FLASH_DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// All committed stores are done.
FLASH_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Ordinary shared memory writes of this thread become visible to bulk copies and wgmma.
FLASH_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flash::tma

// How an item passes from the load thread to the consumers and the store thread: in the control block of
// shared memory, beside its Q slot. Visible once the slot's q_full barrier is passed, until the slot is
// freed.
#pragma once

#include "hopper/forward/kernel_args.cuh"
#include "hopper/forward/pipeline.cuh"

namespace flash::hopper {

template <typename Kernel>
FLASH_DEVICE void write_item(const SharedMemory<Kernel> &smem, uint32_t slot, const WorkItem &item) {
    store_shared(smem.item(slot), make_int4(item.q_block, item.head, item.batch, item.end_kv_block));
    if constexpr (Kernel::long_items) {
        store_shared(smem.item(slot) + 16,
                     make_int4(item.first_kv_block, item.seq_len_q, item.seq_len_k, item.q_row));
    }
    if constexpr (Kernel::traits.split) store_shared(smem.item(slot) + 32, static_cast<uint32_t>(item.part));
}

template <typename Kernel>
FLASH_DEVICE WorkItem read_item(const SharedMemory<Kernel> &smem, uint32_t slot) {
    WorkItem item{};
    const int4 first = load_shared_int4(smem.item(slot));
    item.q_block = first.x;
    item.head = first.y;
    item.batch = first.z;
    item.end_kv_block = first.w;
    if constexpr (Kernel::long_items) {
        const int4 second = load_shared_int4(smem.item(slot) + 16);
        item.first_kv_block = second.x;
        item.seq_len_q = second.y;
        item.seq_len_k = second.z;
        item.q_row = second.w;
    }
    if constexpr (Kernel::traits.split) item.part = load_shared_int(smem.item(slot) + 32);
    return item;
}

}  // namespace flash::hopper

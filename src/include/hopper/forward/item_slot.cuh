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

// Planned items, 64 bytes, at an address.
FLASH_DEVICE void write_planned_item(uint32_t address, const PlannedItem &item) {
    store_shared(address, make_int4(item.q_block, item.head, item.batch, item.end_kv_block));
    store_shared(address + 16, make_int4(item.first_kv_block, item.seq_len_q, item.seq_len_k, item.q_row));
    store_shared(address + 32, make_int4(item.part, item.all_queries, item.k_row, 0));
    store_shared(address + 48, make_int4(static_cast<int>(item.partial_row),
                                         static_cast<int>(item.partial_row >> 32), 0, 0));
}

FLASH_DEVICE PlannedItem read_planned_item(uint32_t address) {
    PlannedItem item{};
    const int4 first = load_shared_int4(address), second = load_shared_int4(address + 16);
    const int4 third = load_shared_int4(address + 32), fourth = load_shared_int4(address + 48);
    item.q_block = first.x;
    item.head = first.y;
    item.batch = first.z;
    item.end_kv_block = first.w;
    item.first_kv_block = second.x;
    item.seq_len_q = second.y;
    item.seq_len_k = second.z;
    item.q_row = second.w;
    item.part = third.x;
    item.all_queries = third.y;
    item.k_row = third.z;
    item.partial_row = int64_t(fourth.y) << 32 | static_cast<uint32_t>(fourth.x);
    return item;
}

template <typename Kernel>
FLASH_DEVICE void write_item(const SharedMemory<Kernel> &smem, uint32_t slot, const PlannedItem &item) {
    write_planned_item(smem.item(slot), item);
}

// The item of a slot, as the kernel's items are.
template <typename Kernel>
FLASH_DEVICE ItemOf<Kernel> read_item_of(const SharedMemory<Kernel> &smem, uint32_t slot) {
    if constexpr (Kernel::traits.planned) {
        return read_planned_item(smem.item(slot));
    } else {
        return read_item<Kernel>(smem, slot);
    }
}

}  // namespace flash::hopper

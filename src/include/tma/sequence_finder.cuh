// Sequences of different lengths: which of them an item belongs to. Only the device knows the lengths, so the
// load warp adds them up, 32 sequences at a time, one a lane. The numbers a block takes only grow: each
// sequence is looked at once.
#pragma once

#include "common/ptx.cuh"
#include "common/sequence_rows.cuh"
#include "tma/work_items.cuh"

namespace flash::tma {

// The sequence of an item, of sequences that have their items one after another. All functions are called by
// a whole warp.
struct SequenceGroups {
    static constexpr int kGroup = 32;

    int first_sequence = -kGroup;  // of the group in hand
    int group_end = 0;             // one past the number of its last item
    int own_begin = 0;             // the number of the first item of this lane's sequence

    struct Place {
        int sequence;
        int number;  // of the item, among those of the sequence
    };

    // Takes the group that item `number` is in. False: there is no such item. Sequence `b` has
    // n_items(n_rows(b)) items; n_rows is asked about sequences that exist.
    template <typename CountRows, typename CountItems>
    FLASH_DEVICE bool advance_to(int batch, int number, const CountRows &n_rows, const CountItems &n_items) {
        const int lane = threadIdx.x % kGroup;
        while (number >= group_end) {
            first_sequence += kGroup;
            if (first_sequence >= batch) return false;
            const int sequence = first_sequence + lane;
            const int own_items = n_items(sequence < batch ? n_rows(sequence) : 0);
            int end = own_items;  // of this and all lanes before it
#pragma unroll
            for (int distance = 1; distance < kGroup; distance *= 2) {
                const int before = __shfl_up_sync(kAllLanes, end, distance);
                if (lane >= distance) end += before;
            }
            own_begin = group_end + end - own_items;
            group_end += __shfl_sync(kAllLanes, end, kGroup - 1);
        }
        return true;
    }

    // Of item `number` of the group in hand.
    FLASH_DEVICE Place place(int number) const {
        // The last sequence that begins at or before it: empty ones begin where the next one does.
        const int owner = 31 - __clz(__ballot_sync(kAllLanes, own_begin <= number));
        return {first_sequence + owner, number - __shfl_sync(kAllLanes, own_begin, owner)};
    }
};

// The same of query blocks. Args: the kernel's arguments, with its sequences in cu_seqlens_q, cu_seqlens_k,
// seqused_k, rows_q, rows_k and batch (sequence_rows.cuh).
template <typename Kernel, typename Args>
struct SequenceFinder {
    SequenceGroups groups;

    FLASH_DEVICE bool advance_to(const Args &args, int number) {
        return groups.advance_to(
            args.batch, number, [&](int sequence) { return queries(args, sequence).n_rows; },
            [&](int n_rows) { return ceil_div(n_rows, Kernel::B_r) * args.work.n_heads * parts(args); });
    }

    FLASH_DEVICE WorkItem item(const Args &args, int number) const {
        const auto [sequence, in_sequence] = groups.place(number);
        const SequenceRows q_rows = queries(args, sequence);
        const SequenceRows k_rows =
            sequence_rows(args.cu_seqlens_k, args.seqused_k, args.work.seq_len_k, args.rows_k, sequence);

        WorkShape shape{};
        shape.n_heads = shape.total_heads = args.work.n_heads;
        shape.n_q_blocks = ceil_div(q_rows.n_rows, Kernel::B_r);
        shape.section_heads = args.work.section_heads;
        WorkItem item = work_item<Kernel::B_r, Kernel::B_c, chunk_tiles_of<Kernel>()>(
            shape, args.template mask<Kernel::traits>(q_rows.n_rows, k_rows.n_rows), parts(args),
            in_sequence);
        item.batch = sequence;
        item.seq_len_q = q_rows.n_rows;
        item.seq_len_k = k_rows.n_rows;
        item.q_row = q_rows.first_row;
        item.k_row = k_rows.first_row;
        return item;
    }

  private:
    static FLASH_DEVICE int parts(const Args &args) { return Kernel::traits.split ? args.n_splits : 1; }

    static FLASH_DEVICE SequenceRows queries(const Args &args, int sequence) {
        return sequence_rows(args.cu_seqlens_q, nullptr, args.work.seq_len_q, args.rows_q, sequence);
    }
};

}  // namespace flash::tma

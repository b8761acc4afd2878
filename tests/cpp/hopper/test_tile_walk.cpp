// The tiles of an item as each consumer warpgroup takes them: each once, from the last to the first, with a
// mask wherever it hides a key; chunks of keys begin at fixed places; and warpgroups take turns alike.
#include <cuda_runtime.h>

#include <algorithm>
#include <random>

using std::max;  // as CUDA has them
using std::min;

#include "check.h"
#include "hopper/forward/tile_walk.cuh"

using namespace flash;

namespace {

std::mt19937 random_bits{7};
int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }

template <bool kCausal, bool kWindow, bool kSplit, int kChunk, int kSkipped>
struct Kernel {
    static constexpr ForwardTraits traits{.causal = kCausal, .window = kWindow, .split = kSplit};
    static constexpr int B_r = 256, B_c = 64, n_consumers = 4, chunk_tiles = kChunk;
    static constexpr bool masks_diagonal = kCausal || kWindow, tiles_begin = kWindow || kSplit;
    static constexpr bool passes_tiles = false;
    static constexpr int max_skipped_tiles = kSkipped;
};

template <typename K>
struct Walker : hopper::TileRange<K, Walker<K>> {
    const hopper::ForwardKernelArgs &args;
    hopper::WorkItem item;
    int warpgroup, kv_block = 0;
    struct {
        int end_of_loops;
    } chunks{};
    void go_to_next_tile() { --kv_block; }
};

// What a warpgroup does with an item, and whether it is what its rows ask for. Its turns are returned.
template <typename K>
int walked(const hopper::ForwardKernelArgs &args, const hopper::WorkItem &item, int warpgroup) {
    Walker<K> wg{{}, args, item, warpgroup};
    const Mask<K::traits> mask = wg.mask();
    wg.kv_block = wg.leading_kv_block();
    int turns = item.end_kv_block - 1 - wg.kv_block;  // of skipped tiles
    int expected = wg.kv_block;
    bool leads = true;
    const int first = wg.first_row(), last = std::min(first + 63, args.work.seq_len_q - 1);
    const auto visit = [&](bool masked, bool begins) {
        CHECK(wg.kv_block == expected--);
        const int begin = wg.kv_block * K::B_c, end = begin + K::B_c;
        bool hidden = false;
        for (int row = first; row <= last; ++row) {
            hidden |= mask.visible_begin(row) > begin || mask.visible_end(row) < end;
        }
        CHECK(masked || !hidden);
        // A chunk begins with its last tile, and only there.
        const bool at_fixed_place = K::chunk_tiles > 0 && end % (max(K::chunk_tiles, 1) * K::B_c) == 0;
        CHECK(begins == (at_fixed_place && !leads));
        leads = false;
    };
    // Rows of tiles that are skipped see nothing of them.
    for (int row = first; row <= last; ++row) {
        CHECK(mask.visible_end(row) <= (wg.kv_block + 1) * K::B_c || wg.kv_block + 1 == item.end_kv_block);
    }
    visit(true, false);
    if constexpr (K::chunk_tiles > 0) wg.chunks.end_of_loops = wg.end_of_chunk(wg.kv_block);
    int chunks = 0;
    hopper::further_tiles<K>(
        wg, [&] { ++turns, visit(true, false); }, [&] { ++turns, visit(false, false); },
        [&] {
            CHECK(wg.has_kept_sums(item, wg.kv_block + 1) == (chunks++ > 0));
            wg.chunks.end_of_loops = wg.end_of_chunk(wg.kv_block);
            ++turns;
            visit(wg.needs_mask(wg.kv_block), true);
        });
    CHECK(expected == (K::tiles_begin ? item.first_kv_block : 0) - 1);
    CHECK(wg.has_kept_sums(item, wg.last_block(item)) == (chunks > 0));
    return turns;
}

template <typename K>
void check() {
    for (int i = 0; i < 300; ++i) {
        hopper::ForwardKernelArgs args{};
        const int seq_len_k = between(1, 1500);
        args.work.seq_len_q = between(1, 1500);
        args.work.seq_len_k = seq_len_k;
        args.window_left = between(0, 700);
        args.window_right = between(0, 200);
        const Mask<K::traits> mask{args.work.seq_len_q, seq_len_k, args.window_left, args.window_right};
        for (int q_block = 0; q_block * K::B_r < args.work.seq_len_q; ++q_block) {
            const int n_parts =
                K::traits.split ? ceil_div(seq_len_k, K::B_c * std::max(K::chunk_tiles, 1)) : 1;
            for (int part = 0; part < n_parts; ++part) {
                hopper::WorkItem item{};
                item.q_block = q_block;
                item.part = part;
                tma::set_tiles<K::B_r, K::B_c, K::chunk_tiles>(item, mask, between(0, 3) ? n_parts : 1);
                if (!item.has_tiles()) continue;
                int turns[K::n_consumers];
                for (int w = 0; w < K::n_consumers; ++w) turns[w] = walked<K>(args, item, w);
                for (int w = 1; w < K::n_consumers; ++w) CHECK(turns[w] == turns[0]);
            }
        }
    }
}

}  // namespace

int main() {
    check<Kernel<false, false, false, 4, 0>>();
    check<Kernel<true, false, false, 4, 0>>();
    check<Kernel<true, false, false, 4, 3>>();
    check<Kernel<true, false, false, 1, 3>>();
    check<Kernel<true, false, false, 0, 3>>();
    check<Kernel<false, true, false, 4, 0>>();
    check<Kernel<true, true, false, 3, 0>>();
    check<Kernel<true, false, true, 4, 0>>();
    check<Kernel<false, true, true, 4, 0>>();
    return report();
}

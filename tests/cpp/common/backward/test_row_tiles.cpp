// row_tiles.cuh: no two sequences share a tile, and all tiles are of the workspace.
#include <vector>

#include "check.h"
#include "common/backward/row_tiles.cuh"

using namespace flash;

constexpr int kHeads = 3;

// The tiles of every head of every sequence, each once, and within the count.
static void check_tiles(const RowTiles &tiles, const std::vector<SequenceRows> &sequences) {
    std::vector<int> taken(tiles.of_all_heads(kHeads), 0);
    for (int sequence = 0; sequence < int(sequences.size()); ++sequence) {
        const SequenceRows &rows = sequences[sequence];
        for (int head = 0; head < kHeads; ++head) {
            const int64_t first = tiles.first(rows, kHeads, head, sequence);
            const int64_t end = first + ceil_div(rows.n_rows, tiles.size);
            CHECK(first >= 0 && end <= int64_t(taken.size()));
            for (int64_t tile = first; tile < end; ++tile) CHECK(++taken[tile] == 1);
        }
    }
}

static void check_packed(int before, const std::vector<int> &lengths, int behind) {
    std::vector<SequenceRows> sequences;
    int row = before;
    for (const int length : lengths) {
        sequences.push_back({0, row, length});
        row += length;
    }
    check_tiles(RowTiles::of_packed(int(lengths.size()), row + behind), sequences);
}

int main() {
    for (const int length : {0, 1, 15, 16, 17, 200}) {
        check_tiles(RowTiles::of_sequences(2, length), {{0, 0, length}, {1, 0, length}});
        check_packed(0, {length}, 0);
        check_packed(0, {length, 1, length, 129, 0, length}, 0);
        check_packed(13, {length, 64, 0, 63, length}, 5);
        check_packed(127, {1, length, 127, 255, 1, 1, 1}, 0);
    }
    const RowTiles all = RowTiles::of_packed(4, 64);
    CHECK(all.of_all_heads(2) == 2 * (64 / 16 + 4));  // no more than a tile a sequence beside the rows
    return report();
}

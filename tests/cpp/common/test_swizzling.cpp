// swizzling.cuh: every chunk has a place of its own, fragment addresses agree with the layout, and no
// access that the kernels make has a bank conflict when swizzled; without, those across rows do.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "common/fragments.cuh"
#include "common/swizzling.cuh"

using namespace flash;

// How many times shared memory is accessed beyond the one time that is needed, when these addresses of
// `width` bytes are accessed at once: the most distinct 4-byte words that fall into one bank, less one.
static int conflicts(const std::vector<uint32_t> &addresses, int width) {
    std::vector<std::vector<uint32_t>> words(kSmemBanks);
    for (const uint32_t address : addresses) {
        for (uint32_t word = address / 4; word < (address + width) / 4; ++word) {
            auto &bank = words[word % kSmemBanks];
            if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        }
    }
    size_t most = 1;
    for (const auto &bank : words) most = std::max(most, bank.size());
    return static_cast<int>(most) - 1;
}

template <typename Tile, bool kSwizzled>
static void check_bijective(int d_head) {
    std::vector<int> uses(Tile::bytes / kChunkBytes, 0);
    for (int row = 0; row < Tile::rows; ++row) {
        for (int chunk = 0; chunk < d_head / kChunkElements; ++chunk) {
            const uint32_t offset = Tile::offset(row, chunk);
            if (kSwizzled) CHECK(offset == chunk_offset(Tile::rows, row, chunk));  // TMA's and wgmma's place
            CHECK(offset % kChunkBytes == 0 && offset < static_cast<uint32_t>(Tile::bytes));
            if (offset < static_cast<uint32_t>(Tile::bytes)) ++uses[offset / kChunkBytes];
        }
    }
    CHECK(std::all_of(uses.begin(), uses.end(), [](int n) { return n == 1; }));
}

template <typename Tile>
static void check_fragment_offsets(int d_head) {
    constexpr uint32_t tile_address = 128 * 37;  // tiles lie at multiples of 128
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (const LdmatrixRow at : {ldmatrix_row_QV(lane), ldmatrix_row_K(lane)}) {
            const uint32_t lane_offset = tile_address + Tile::offset(at.row, at.chunk);
            for (int row_tile = 0; row_tile < Tile::rows / kMmaTile; ++row_tile) {
                for (int column_tile = 0; column_tile < d_head / kMmaTile; ++column_tile) {
                    CHECK(Tile::fragment_offset(lane_offset, row_tile, column_tile) ==
                          tile_address + Tile::offset(at.row + 16 * row_tile, at.chunk + 2 * column_tile));
                }
            }
        }
    }
}

// The worst of all ldmatrix of a tile. Each of its four squares is one access of 8 rows.
template <typename Tile>
static int ldmatrix_conflicts(LdmatrixRow (*lane_row)(int), int d_head) {
    int worst = 0;
    for (int row_tile = 0; row_tile < Tile::rows / kMmaTile; ++row_tile) {
        for (int column_tile = 0; column_tile < d_head / kMmaTile; ++column_tile) {
            for (int square = 0; square < 4; ++square) {
                std::vector<uint32_t> addresses;
                for (int lane = 8 * square; lane < 8 * square + 8; ++lane) {
                    const LdmatrixRow at = lane_row(lane);
                    addresses.push_back(
                        Tile::fragment_offset(Tile::offset(at.row, at.chunk), row_tile, column_tile));
                }
                worst = std::max(worst, conflicts(addresses, kChunkBytes));
            }
        }
    }
    return worst;
}

// Copies and O's way out: 16 bytes a thread, 8 threads a row; 8 threads are one access.
template <typename Tile>
static int copy_conflicts(int d_head) {
    int worst = 0;
    for (int row = 0; row < Tile::rows; ++row) {
        for (int panel = 0; panel < d_head / kPanelColumns; ++panel) {
            std::vector<uint32_t> addresses;
            for (int chunk = 0; chunk < Tile::row_chunks; ++chunk) {
                addresses.push_back(Tile::offset(row, panel * Tile::row_chunks + chunk));
            }
            worst = std::max(worst, conflicts(addresses, kChunkBytes));
        }
    }
    return worst;
}

// O's way into shared memory: an accumulator pair, 4 bytes, of each thread of the warp at once.
template <typename Tile>
static int accumulator_store_conflicts(int d_head) {
    int worst = 0;
    for (int first_row = 0; first_row < Tile::rows; first_row += 8) {
        for (int chunk = 0; chunk < d_head / kMmaN; ++chunk) {
            std::vector<uint32_t> addresses;
            for (int lane = 0; lane < kWarpSize; ++lane) {
                const MatrixCoordinate at = accumulator(lane, 0);
                addresses.push_back(Tile::offset(first_row + at.row, chunk) + at.column * kElementBytes);
            }
            worst = std::max(worst, conflicts(addresses, 4));
        }
    }
    return worst;
}

template <int kRows, int kDHead>
static void check_tile() {
    using Swizzled = SmemTile<kRows, kDHead, true>;
    using Plain = SmemTile<kRows, kDHead, false>;
    static_assert(Swizzled::bytes == kRows * kDHead * kElementBytes && Plain::bytes == Swizzled::bytes);

    check_bijective<Swizzled, true>(kDHead);
    check_bijective<Plain, false>(kDHead);
    check_fragment_offsets<Swizzled>(kDHead);
    check_fragment_offsets<Plain>(kDHead);

    CHECK(ldmatrix_conflicts<Swizzled>(ldmatrix_row_QV, kDHead) == 0);
    CHECK(ldmatrix_conflicts<Swizzled>(ldmatrix_row_K, kDHead) == 0);
    CHECK(copy_conflicts<Swizzled>(kDHead) == 0);
    CHECK(accumulator_store_conflicts<Swizzled>(kDHead) == 0);

    CHECK(ldmatrix_conflicts<Plain>(ldmatrix_row_QV, kDHead) == 7);  // 8 rows, all in the same banks
    CHECK(ldmatrix_conflicts<Plain>(ldmatrix_row_K, kDHead) == 7);
    CHECK(copy_conflicts<Plain>(kDHead) == 0);  // along a row nothing collides
    CHECK(accumulator_store_conflicts<Plain>(kDHead) == 7);
}

int main() {
    check_tile<32, 64>();
    check_tile<64, 64>();
    check_tile<128, 64>();
    check_tile<32, 128>();
    check_tile<64, 128>();
    check_tile<128, 128>();
    check_tile<64, 256>();
    return report();
}

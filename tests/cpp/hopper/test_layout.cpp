// Layouts of src/include/hopper/layout.cuh, and of whole tiles in common/swizzling.cuh, on the host, against
// what TMA and wgmma do with addresses:
//   - TMA writes element (row, column) of a (rows, 64) box to byte 128 row + 2 column, with address bits 4-6
//     XORed by bits 7-9;
//   - wgmma computes addresses from its descriptor and applies the same XOR.
// Exits with a message at the first difference.
#include <array>
#include <cstdio>
#include <set>
#include <vector>

#include "hopper/layout.cuh"
#include "require.h"

using namespace flash;
using namespace flash::hopper;

static int accumulator_row(int warp, int lane, int i) { return 16 * warp + accumulator(lane, i).row; }
static int accumulator_column(int lane, int i) { return accumulator(lane, i).column; }

static uint32_t swizzle(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// Where TMA puts element (row, column) of a (rows, d) tile that starts at address 0.
static uint32_t tma_address(int rows, int row, int column) {
    const uint32_t panel = column / 64 * rows * 128;
    return swizzle(panel + row * 128 + column % 64 * 2);
}

static uint32_t start_address(uint64_t descriptor) { return (descriptor & 0x3fff) << 4; }
static uint32_t leading_bytes(uint64_t descriptor) { return (descriptor >> 16 & 0x3fff) << 4; }
static uint32_t stride_bytes(uint64_t descriptor) { return (descriptor >> 32 & 0x3fff) << 4; }

// Address of element (row, k) of one k16 step of an operand stored row by row (Q, K).
static uint32_t k_major_address(uint64_t descriptor, int row, int k) {
    return swizzle(start_address(descriptor) + row / 8 * stride_bytes(descriptor) + row % 8 * 128 + k * 2);
}

// Address of element (k, column) of one k16 step of an operand whose reduction runs along the rows (V).
static uint32_t mn_major_address(uint64_t descriptor, int k, int column) {
    return swizzle(start_address(descriptor) + column / 64 * leading_bytes(descriptor) +
                   k / 8 * stride_bytes(descriptor) + k % 8 * 128 + column % 64 * 2);
}

static void test_chunks_are_where_tma_puts_them() {
    for (const int d : {64, 96, 128, 192, 256}) {
        for (const int rows : {64, 80, 128, 256}) {
            std::set<uint32_t> seen;
            for (int row = 0; row < rows; ++row) {
                for (int chunk = 0; chunk < panel_count(d) * 8; ++chunk) {
                    const uint32_t offset = chunk_offset(rows, row, chunk);
                    REQUIRE(offset == tma_address(rows, row, chunk * 8), "d %d, row %d, chunk %d", d, row,
                            chunk);
                    REQUIRE(offset + 16 <= static_cast<uint32_t>(tile_bytes(rows, d)), "row %d, chunk %d",
                            row, chunk);
                    seen.insert(offset);
                }
            }
            REQUIRE(seen.size() * 16 == static_cast<size_t>(tile_bytes(rows, d)), "rows %d, d %d", rows, d);
        }
    }
}

// ldmatrix and stmatrix move 8 rows of one chunk column at a time: 128 bytes, one of each bank.
static void test_eight_rows_of_a_chunk_column_meet_no_bank_twice() {
    for (int row = 0; row < 128; row += 8) {
        for (int chunk = 0; chunk < 16; ++chunk) {
            std::set<uint32_t> banks;
            for (int i = 0; i < 8; ++i) banks.insert(chunk_offset(128, row + i, chunk) % 128 / 16);
            REQUIRE(banks.size() == 8, "rows from %d, chunk %d", row, chunk);
        }
    }
}

static void test_q_and_k_descriptors_walk_the_tile() {
    for (const int d : {64, 96, 128, 192, 256}) {
        for (const int rows : {64, 80, 128, 192, 256}) {
            for (int first_row = 0; first_row < rows; first_row += 64) {  // the warpgroups' rows of Q
                const uint64_t tile = make_descriptor(descriptor_lower_word(first_row * kPanelRowBytes, 16));
                REQUIRE(tile >> 62 == 1, "128-byte swizzle");
                for (int step = 0; step < d / kMmaDepth; ++step) {
                    for (int row = 0; row < 64 && first_row + row < rows; ++row) {
                        for (int k = 0; k < kMmaDepth; ++k) {
                            REQUIRE(k_major_address(tile + column_step(step, rows), row, k) ==
                                        tma_address(rows, first_row + row, step * kMmaDepth + k),
                                    "d %d, rows %d, step %d, row %d, k %d", d, rows, step, first_row + row,
                                    k);
                        }
                    }
                }
            }
        }
    }
}

// Panels that overlap, as the backward pass has K of 96 columns: of columns 0 to 63 and 48 to 111. Both
// operands of S walk along all columns, each in its own panels, and every part of dQ has the columns of K
// that it is multiplied by at the begin of a panel.
static void test_descriptors_walk_panels_that_overlap() {
    constexpr int kD = 96, kStep = 48, kRows = 128, kPanelBytes = kRows * 128;
    const auto address = [](int panel, int row,
                            int column) {  // where TMA puts a box that begins at kStep * panel
        return swizzle(panel * kPanelBytes + row * 128 + (column - panel * kStep) * 2);
    };
    for (int first_row = 0; first_row < kRows; first_row += kWarpgroupRows) {
        const uint64_t tile = make_descriptor(descriptor_lower_word(first_row * kPanelRowBytes, 16));
        for (int step = 0; step < kD / kMmaDepth; ++step) {
            for (int row = 0; row < kWarpgroupRows; ++row) {
                for (int k = 0; k < kMmaDepth; ++k) {
                    const int column = step * kMmaDepth + k;
                    REQUIRE(k_major_address(tile + column_step(step, kRows, kStep), row, k) ==
                                address(column / kStep, first_row + row, column),
                            "step %d, row %d, k %d", step, first_row + row, k);
                }
            }
        }
    }
    for (int part = 0; part < 2; ++part) {
        const uint64_t tile = make_descriptor(descriptor_lower_word(part * kPanelBytes, 16));
        for (int step = 0; step < kRows / kMmaDepth; ++step) {
            for (int k = 0; k < kMmaDepth; ++k) {
                for (int column = 0; column < kStep; ++column) {
                    REQUIRE(mn_major_address(tile + row_step(step), k, column) ==
                                address(part, step * kMmaDepth + k, part * kStep + column),
                            "part %d, step %d, k %d, column %d", part, step, k, column);
                }
            }
        }
    }
}

static void test_v_descriptors_walk_the_tile() {
    for (const int d : {64, 96, 128, 192, 256}) {
        for (const int rows : {64, 80, 128, 176}) {
            const uint64_t tile = make_descriptor(descriptor_lower_word(0, rows * kPanelRowBytes));
            for (int step = 0; step < rows / kMmaDepth; ++step) {
                for (int k = 0; k < kMmaDepth; ++k) {
                    for (int column = 0; column < d; ++column) {
                        REQUIRE(mn_major_address(tile + row_step(step), k, column) ==
                                    tma_address(rows, step * kMmaDepth + k, column),
                                "d %d, rows %d, step %d, k %d, column %d", d, rows, step, k, column);
                    }
                }
            }
        }
    }
}

// Slots lie as far into shared memory as a block can have it: the lower word holds the sum.
static void test_descriptors_reach_all_of_shared_memory() {
    const uint32_t last = 227 * 1024 - 1024;
    const uint64_t tile =
        make_descriptor(descriptor_lower_word(0, 128 * kPanelRowBytes) + descriptor_step(last));
    REQUIRE(start_address(tile) == last, "%u", start_address(tile));
    REQUIRE(leading_bytes(tile) == 128 * kPanelRowBytes, "%u", leading_bytes(tile));
    REQUIRE(stride_bytes(tile) == kSwizzleBytes, "%u", stride_bytes(tile));
}

static void test_accumulators_cover_the_tile_once() {
    for (const int n : {48, 64, 80, 128, 256}) {
        std::set<std::array<int, 2>> seen;
        for (int warp = 0; warp < 4; ++warp) {
            for (int lane = 0; lane < 32; ++lane) {
                for (int i = 0; i < n / 2; ++i) {
                    const int row = accumulator_row(warp, lane, i), column = accumulator_column(lane, i);
                    REQUIRE(row >= 0 && row < 64 && column >= 0 && column < n, "row %d, column %d", row,
                            column);
                    seen.insert({row, column});
                }
            }
        }
        REQUIRE(seen.size() == static_cast<size_t>(64 * n), "n %d", n);
    }
}

// Register j of the A fragment of a k16 step holds row lane / 4 + 8 (j % 2), columns 2 (lane % 4) + 8 (j / 2)
// and the next (PTX ISA, wgmma register fragments). Packing S in pairs must give exactly that.
static void test_packed_scores_are_the_a_operand() {
    for (int lane = 0; lane < 32; ++lane) {
        for (int step = 0; step < 8; ++step) {
            for (int j = 0; j < 4; ++j) {
                for (int half = 0; half < 2; ++half) {
                    const int i = 2 * (4 * step + j) + half;
                    REQUIRE(accumulator_row(0, lane, i) == lane / 4 + 8 * (j % 2), "lane %d, j %d", lane, j);
                    REQUIRE(accumulator_column(lane, i) == 16 * step + 8 * (j / 2) + 2 * (lane % 4) + half,
                            "lane %d, step %d, j %d", lane, step, j);
                }
            }
        }
    }
}

static void test_row_elements_are_in_column_order() {
    for (int lane = 0; lane < 32; ++lane) {
        for (int r = 0; r < 2; ++r) {
            int last = -1;
            for (int e = 0; e < 64; ++e) {
                const int i = row_element_index(r, e);
                REQUIRE(accumulator_row(0, lane, i) == lane / 4 + 8 * r, "lane %d, element %d", lane, e);
                REQUIRE(accumulator_column(lane, i) > last, "lane %d, element %d", lane, e);
                last = accumulator_column(lane, i);
            }
        }
    }
}

static void test_kept_elements_are_the_columns_below_the_limit() {
    for (int lane = 0; lane < 32; ++lane) {
        for (int n_columns = -70; n_columns <= 300; ++n_columns) {
            for (int e = 0; e < 128; ++e) {
                const bool below = accumulator_column(lane, row_element_index(0, e)) < n_columns;
                REQUIRE(below == (e < kept_elements(lane, n_columns)), "lane %d, columns %d, element %d",
                        lane, n_columns, e);
            }
        }
    }
}

int main() {
    test_chunks_are_where_tma_puts_them();
    test_eight_rows_of_a_chunk_column_meet_no_bank_twice();
    test_q_and_k_descriptors_walk_the_tile();
    test_descriptors_walk_panels_that_overlap();
    test_v_descriptors_walk_the_tile();
    test_descriptors_reach_all_of_shared_memory();
    test_accumulators_cover_the_tile_once();
    test_packed_scores_are_the_a_operand();
    test_row_elements_are_in_column_order();
    test_kept_elements_are_the_columns_below_the_limit();
    std::puts("layout: ok");
}

// Where parts of tiles lie in pages: the rows that a copy of a part brings are the sequence's, and each copy
// has a row that exists.
#include <initializer_list>
#include <numeric>

#include "require.h"
#include "tma/page_part.cuh"

using namespace flash;
using namespace flash::tma;

namespace {

// Parts of the tiles of a sequence. In a ragged map row r of a copy at (row, end) is row + r + end -
// page_rows of its page, there if row + r < page_rows (tensor_view.cuh).
void check_sequence(int page_rows, int tile_rows, int n_keys) {
    const PageSize page_size = PageSize::of(page_rows);
    const int box_rows = std::gcd(page_rows, tile_rows);
    const int n_tiles = (n_keys + tile_rows - 1) / tile_rows;
    for (int first = 0; first < n_tiles * tile_rows; first += box_rows) {
        const PagePart part = page_part(page_size, first, n_keys);
        REQUIRE(part.end >= 1 && part.end <= page_rows && part.row >= 0 && part.row < page_rows,
                "pages of %d, part at %d of %d: (%d, %d)", page_rows, first, n_keys, part.row, part.end);
        for (int r = 0; r < box_rows; ++r) {
            const bool there = part.row + r < page_rows;
            const int found = part.entry * page_rows + part.row + r + part.end - page_rows;
            if (first + r < n_keys) {
                REQUIRE(there && found == first + r, "pages of %d, key %d of %d: %d", page_rows, first + r,
                        n_keys, found);
            } else {  // zeros, or the last key once more
                REQUIRE(!there || found == n_keys - 1, "pages of %d, row %d of %d: %d", page_rows, first + r,
                        n_keys, found);
            }
        }
    }
}

}  // namespace

int main() {
    static_assert(page_part(PageSize::of(64), 80, 1000).entry == 1);
    static_assert(page_part(PageSize::of(64), 80, 1000).row == 16);
    for (const int page_rows : {16, 32, 48, 64, 80, 112, 128, 256, 1008}) {
        for (const int tile_rows : {64, 80, 96, 112, 128}) {
            for (int n_keys = 1; n_keys < 700; ++n_keys) check_sequence(page_rows, tile_rows, n_keys);
        }
    }
    return 0;
}

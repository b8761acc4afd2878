// Parts of a tile of keys in pages, each of which lies in one page: where a copy finds one.
#pragma once

#include "common/page_table.cuh"

namespace flash::tma {

struct PagePart {
    int entry;     // of the sequence's table
    int row, end;  // of a ragged map (tensor_view.cuh) that has pages in the place of batch items
};

// The part that begins at `row` of a sequence of `n_keys`. Rows past the last key are clamped to it and
// masked later: a copy of a box without any existing row touches the map's base, which in a ragged map is not
// the tensor's.
FLASH_HOST_DEVICE constexpr PagePart page_part(const PageSize &page_size, int row, int n_keys) {
    row = min_of(row, n_keys - 1);
    const PagePlace place = page_size.place(row);
    const int end = min_of(page_size.rows, place.row + n_keys - row);
    return {place.entry, page_size.rows - end + place.row, end};
}

}  // namespace flash::tma

// Tiles of K and V whose rows lie in pages (page_table.cuh). Each row is looked up: the rows that a warp
// copies at a time are neighbours, mostly of one page, so that the table is read once a warp and its L1 line
// serves many tiles.
#pragma once

#include <type_traits>

#include "ampere/forward/kernel_args.cuh"
#include "ampere/load_store.cuh"
#include "common/page_table.cuh"

namespace flash::ampere {

// The pages of one sequence.
struct PageTable {
    const int *entries;  // (max_pages)
    PageSize page_size;
    int64_t page_bytes;  // from one page to the next, of K or of V
    uint32_t n_pages;
};

// As TileLoader, of which it takes the place. `matrix` is that of the first page.
template <typename Kernel, typename Tile>
struct PagedTileLoader {
    static constexpr int passes = Tile::rows / Kernel::copy_rows;
    static constexpr bool kPadded = Kernel::traits.padded_head;

    GlobalMatrix matrix;
    PageTable table;
    int first_row;  // of the tile that is loaded next
    uint32_t smem_tile;

    FLASH_DEVICE PagedTileLoader(const GlobalMatrix &first_page, const PageTable &pages, int row,
                                 uint32_t smem)
        : matrix(first_page), table(pages), first_row(row), smem_tile(smem) {}

    // See TileLoader. Rows beyond `valid_rows` are not looked up either.
    template <bool kEdge>
    FLASH_DEVICE void load(int valid_rows, uint32_t slot = 0) {
        const uint32_t thread = computed_here(threadIdx.x);
        const int chunk = thread % Tile::row_chunks;
        const int row = thread / Tile::row_chunks;
        const int n_panels = (matrix.chunks - chunk + Tile::row_chunks - 1) / Tile::row_chunks;
        const uint32_t smem = Tile::offset(row, chunk) + smem_tile + slot;

        PagePlace places[passes];
        int pages[passes];
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            const int in_tile = row + pass * Kernel::copy_rows;
            places[pass] =
                table.page_size.place(first_row + (kEdge ? min_of(in_tile, valid_rows - 1) : in_tile));
            pages[pass] =
                __ldg(table.entries + places[pass].entry);  // all are under way before one is needed
        }
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            const char *gmem = matrix.begin + pages[pass] * table.page_bytes +
                               places[pass].row * matrix.row_bytes + chunk * kChunkBytes;
            const bool exists = static_cast<uint32_t>(pages[pass]) < table.n_pages &&
                                (!kEdge || row + pass * Kernel::copy_rows < valid_rows);
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel) {
                cp_async(smem + panel * Tile::panel_bytes + pass * Kernel::copy_rows * Tile::row_bytes,
                         gmem + panel * Tile::row_bytes, exists && (!kPadded || panel < n_panels));
            }
        }
        first_row -= Tile::rows;
    }

    FLASH_DEVICE void skip(int n_tiles) { first_row -= n_tiles * Tile::rows; }

    // See TileLoader. Rows that are not read are not looked up either.
    FLASH_DEVICE void load_rows(int first, int end, uint32_t slot) {
        const uint32_t thread = computed_here(threadIdx.x);
        const int chunk = thread % Tile::row_chunks;
        const int n_panels = (matrix.chunks - chunk + Tile::row_chunks - 1) / Tile::row_chunks;
#pragma unroll 1
        for (int row = thread / Tile::row_chunks; row < Tile::rows; row += Kernel::copy_rows) {
            const PagePlace place = table.page_size.place(first_row + min_of(max_of(first, row), end - 1));
            const int page = __ldg(table.entries + place.entry);
            const char *gmem = matrix.begin + page * table.page_bytes + place.row * matrix.row_bytes;
            const bool exists = static_cast<uint32_t>(page) < table.n_pages && row >= first && row < end;
            const uint32_t smem = Tile::offset(row, chunk) + smem_tile + slot;
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel) {
                cp_async(smem + panel * Tile::panel_bytes,
                         gmem + chunk * kChunkBytes + panel * Tile::row_bytes,
                         exists && (!kPadded || panel < n_panels));
            }
        }
        first_row -= Tile::rows;
    }
};

template <typename Kernel>
using KVLoader = std::conditional_t<Kernel::traits.paged, PagedTileLoader<Kernel, typename Kernel::KVTile>,
                                    TileLoader<Kernel, typename Kernel::KVTile>>;

// Of one sequence's K or V, `matrix` with these strides, from the tile that begins at `first_row` on.
template <typename Kernel>
FLASH_DEVICE KVLoader<Kernel> kv_loader(const GlobalMatrix &matrix, const ForwardKernelArgs &args,
                                        const TensorStrides &strides, int sequence, int first_row,
                                        uint32_t smem) {
    if constexpr (Kernel::traits.paged) {
        const PageTable table{args.block_table + int64_t(sequence) * args.max_pages, args.page_size,
                              strides.batch * kElementBytes, static_cast<uint32_t>(args.n_pages)};
        return {matrix, table, first_row, smem};
    } else {
        return {matrix, first_row, smem};
    }
}

}  // namespace flash::ampere

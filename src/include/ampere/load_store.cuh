// Tiles between global and shared memory, and fragments from shared memory to registers.
//
// Copies: 8 threads copy the 128 bytes of a panel's row, 16 bytes each, so a block copies
// 4 * n_warps rows of one panel per instruction. A K or V sequence is read from its end to its begin.
#pragma once

#include <utility>

#include "ampere/forward/static_kernel_configuration.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

// One matrix of one head: (seq, d_head), d_head contiguous.
struct GlobalMatrix {
    const char *begin;
    int64_t row_bytes;
    int chunks;  // of a row; read by kernels for padded heads only

    FLASH_DEVICE GlobalMatrix(const void *tensor, const TensorStrides &strides, int batch, int head,
                              int d_head)
        : begin(static_cast<const char *>(tensor) +
                (batch * strides.batch + head * strides.head) * kElementBytes),
          row_bytes(strides.seq * kElementBytes),
          chunks(d_head / kChunkElements) {}

    FLASH_DEVICE void skip_rows(int n_rows) { begin += n_rows * row_bytes; }
};

// Copies tiles of one matrix, last tile first. What a thread needs for its share is worked out for each tile:
// a loader holds nothing but numbers that are the same for the whole warp, hence no register of a thread.
template <typename Kernel, typename Tile>
struct TileLoader {
    static constexpr int passes = Tile::rows / Kernel::copy_rows;
    static constexpr bool kPadded = Kernel::traits.padded_head;

    const char *tile;  // the first row of the tile that is loaded next
    int64_t row_bytes;
    int chunks;  // of a row; read with padded heads only
    uint32_t smem_tile;

    // `first_row`: the matrix row with which the tile that is loaded first begins.
    FLASH_DEVICE TileLoader(const GlobalMatrix &matrix, int first_row, uint32_t smem)
        : tile(matrix.begin + first_row * matrix.row_bytes),
          row_bytes(matrix.row_bytes),
          chunks(matrix.chunks),
          smem_tile(smem) {}

    // Loads a tile, `slot` bytes behind the first place, and steps to the one before it. kEdge: rows from
    // `valid_rows` on lie behind the tensor's end; they are not read, their place is filled with zeros.
    // So is that of columns which a padded head lacks.
    template <bool kEdge>
    FLASH_DEVICE void load(int valid_rows, uint32_t slot = 0) {
        Share share(*this, slot);
        if constexpr (Kernel::cfg.async_copy) {
#pragma unroll
            for (int pass = 0; pass < passes; ++pass, share.next_pass(*this)) {
#pragma unroll
                for (int panel = 0; panel < Tile::panels; ++panel) {
                    if constexpr (kEdge || kPadded) {
                        cp_async(share.smem_of(pass, panel), share.gmem_of(panel),
                                 share.template exists<kEdge>(pass, panel, valid_rows));
                    } else {
                        cp_async(share.smem_of(pass, panel), share.gmem_of(panel));
                    }
                }
            }
        } else {
            load_through_registers<kEdge>(share, valid_rows);
        }
        tile -= Tile::rows * row_bytes;
    }

    // Leaves tiles out.
    FLASH_DEVICE void skip(int n_tiles) { tile -= n_tiles * (Tile::rows * row_bytes); }

    // Loads a tile of which only rows first_row … end_row - 1 are read; the others' places are filled with
    // zeros. Pass by pass: what few tiles need is to cost the others no registers.
    FLASH_DEVICE void load_rows(int first_row, int end_row, uint32_t slot) {
        Share share(*this, slot);
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass, share.next_pass(*this)) {
            const bool is_read = share.row + pass * Kernel::copy_rows >= first_row;
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel) {
                const bool exists = is_read && share.template exists<true>(pass, panel, end_row);
                if constexpr (Kernel::cfg.async_copy) {
                    cp_async(share.smem_of(pass, panel), share.gmem_of(panel), exists);
                } else {
                    const Chunk chunk = exists ? load_global(share.gmem_of(panel)) : Chunk{};
                    store_shared(share.smem_of(pass, panel), chunk);
                }
            }
        }
        tile -= Tile::rows * row_bytes;
    }

  private:
    // One 16-byte chunk of a row in each pass and panel.
    struct Share {
        int row;           // of pass 0
        int n_panels;      // with padded heads: the panels in which the tensor has this thread's chunk
        const char *gmem;  // of the pass that is next
        uint32_t smem;     // of pass 0

        FLASH_DEVICE Share(const TileLoader &loader, uint32_t slot) {
            const uint32_t thread = computed_here(threadIdx.x);
            const uint32_t chunk = thread % Tile::row_chunks;
            row = thread / Tile::row_chunks;
            n_panels = (loader.chunks - int(chunk) + Tile::row_chunks - 1) / Tile::row_chunks;
            gmem = loader.tile + thread / Tile::row_chunks * loader.row_bytes + chunk * kChunkBytes;
            smem = Tile::offset(row, chunk) + loader.smem_tile + slot;
        }

        // The compiler is kept from deriving the addresses of each panel on their own, 64 bits each: they
        // are this pointer and an immediate.
        FLASH_DEVICE void next_pass(const TileLoader &loader) {
            gmem += Kernel::copy_rows * loader.row_bytes;
            asm volatile("" : "+l"(gmem));
        }
        template <bool kEdge>
        FLASH_DEVICE bool exists(int pass, int panel, int valid_rows) const {
            return (!kEdge || row + pass * Kernel::copy_rows < valid_rows) && (!kPadded || panel < n_panels);
        }
        FLASH_DEVICE uint32_t smem_of(int pass, int panel) const {
            return smem + panel * Tile::panel_bytes + pass * Kernel::copy_rows * Tile::row_bytes;
        }
        FLASH_DEVICE const char *gmem_of(int panel) const { return gmem + panel * Tile::row_bytes; }
    };

    // All loads of a few passes are under way before the first store waits for its data.
    template <bool kEdge>
    FLASH_DEVICE void load_through_registers(Share &share, int valid_rows) {
        constexpr int batch = passes % 4 == 0 ? 4 : passes % 2 == 0 ? 2 : 1;
#pragma unroll
        for (int first = 0; first < passes; first += batch) {
            Chunk rmem[batch][Tile::panels];
#pragma unroll
            for (int i = 0; i < batch; ++i, share.next_pass(*this)) {
#pragma unroll
                for (int panel = 0; panel < Tile::panels; ++panel) {
                    rmem[i][panel] = Chunk{};
                    if (share.template exists<kEdge>(first + i, panel, valid_rows)) {
                        rmem[i][panel] = load_global(share.gmem_of(panel));
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
#pragma unroll
                for (int panel = 0; panel < Tile::panels; ++panel) {
                    store_shared(share.smem_of(first + i, panel), rmem[i][panel]);
                }
            }
        }
    }
};

// Waits for the copies this thread has started. Copies through registers are complete as they return.
template <typename Kernel>
FLASH_DEVICE void wait_for_copies() {
    if constexpr (Kernel::cfg.async_copy) cp_async_wait_all();
}

// The fragments of an operand on their way through registers: `kAtATime` tiles along the reduction
// dimension at a time (0: all of them), in one buffer, or in two, of which one is loaded while the
// other is multiplied. `Fragment` is what one tile along the reduction dimension needs. kFirstPlace: the
// machine code does this in this order too; the first of 2 * kTiles places for divide_schedule. kAsCompiled:
// it does it in the order that the compiler finds best.
inline constexpr int kAsCompiled = -1;

template <typename Fragment, int kTiles, int kAtATime, bool kDoubleBuffer, int kFirstPlace>
struct FragmentStream {
    static constexpr bool ordered = kFirstPlace != kAsCompiled;
    static constexpr int group = kAtATime == 0 ? kTiles : kAtATime;
    static constexpr bool double_buffer = kDoubleBuffer && group < kTiles;
    static constexpr int slots = double_buffer ? 2 * group : group;
    static constexpr int registers = slots * sizeof(Fragment) / sizeof(uint32_t);

    Fragment rmem[slots];

    // Called before tile k is multiplied, for k = 0, 1, …; `load(fragment, tile)` loads one tile. `size`: see
    // divide_schedule.
    template <typename Load>
    FLASH_DEVICE void prepare(int k, int size, Load load) {
        if (k % group != 0) return;
        if (double_buffer) {
            if (k == 0) load_group(0, load);
            if (ordered)
                divide_schedule(size, kFirstPlace + k);  // loads of the next group, products of this one
            if (k + group < kTiles) load_group(k + group, load);
        } else {
            if (ordered && k > 0) divide_schedule(size, kFirstPlace + k);  // products of the group before
            load_group(k, load);
            if (ordered) divide_schedule(size, kFirstPlace + kTiles + k);  // loads
        }
    }

    FLASH_DEVICE const Fragment &operator[](int k) const { return rmem[k % slots]; }

  private:
    template <typename Load>
    FLASH_DEVICE void load_group(int first, Load load) {
#pragma unroll
        for (int i = 0; i < group; ++i) load(rmem[(first + i) % slots], first + i);
    }
};

// Calls load(fragment, i) and use(fragment, i) for i = 0 … kSteps - 1, each load kAhead steps before its use.
// Written out as a fold: ptxas gives up unrolling loops as long as those of d_head 256.
template <int kAhead, int kSteps, typename Load, typename Use>
FLASH_DEVICE void stream_fragments(Load load, Use use) {
    constexpr int slots = kAhead + 1;
    uint32_t fragment[slots][4];
    const auto load_step = [&](int i) {
        if (i < kSteps) load(fragment[i % slots], i);
    };
    [&]<int... I>(std::integer_sequence<int, I...>) {
        (load_step(I), ...);
    }(std::make_integer_sequence<int, kAhead>{});
    [&]<int... I>(std::integer_sequence<int, I...>) {
        ((load_step(I + kAhead), use(fragment[I % slots], I)), ...);
    }(std::make_integer_sequence<int, kSteps>{});
}

// Step i of an order of n column tiles in which those at the same place of their panels, whose addresses
// differ by an immediate only, follow each other: 0 4 1 5 2 6 3 7.
FLASH_HOST_DEVICE constexpr int panel_order(int i, int n) {
    constexpr int panel_tiles = 4;
    const int panels = n / panel_tiles;
    return i % panels * panel_tiles + i / panels;
}

// A lane's address in the tiles of a matrix, with one register for the column step it stands at.
template <typename Tile>
struct FragmentAddress {
    uint32_t lane_offset;  // in a tile of 16 rows
    uint32_t smem;         // the matrix; the same for the whole warp, so it costs no register of the thread
    uint32_t column_offset = 0;
    uint32_t step = ~0u;

    // Free where the column tile stands at the same place of its panel as the one before.
    FLASH_DEVICE void step_to(int column_tile) {
        const uint32_t wanted = Tile::column_step(column_tile);
        if (wanted == step) return;
        step = wanted;
        column_offset = wanted == 0 ? lane_offset : xor_in_place(lane_offset, wanted);
    }
    FLASH_DEVICE uint32_t of(int row_tile, int column_tile) const {
        return column_offset + smem + Tile::tile_offset(row_tile, column_tile);
    }
};

}  // namespace flash::ampere

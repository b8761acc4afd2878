// Every score of a warp finds the element of its row and key, however the rows lie, and of a tile in shared
// memory; outside of them 0.
#include "streamed.h"
// behind what stands in for the device
#include "common/streamed_rows.cuh"

namespace {

using Element = flash::mods::Fp16;
constexpr int kRows = 16;

// Rows of `size` elements whose neighbours are `stride` apart, the first at `shift`; only the first `n_rows`
// of the warp's lie within the tensor.
template <int kSquares>
void check(int size, int64_t stride, int64_t row_stride, int shift, int n_rows, int first_key) {
    using Streamed = flash::StreamedRows<Element, kSquares>;
    const auto *start = different_elements<Element>(kRows * row_stride + size * stride) + shift;
    FakeWarp::run(0, [=] {
        const int lane = FakeWarp::lane();
        const auto row_of = [=](int i) {
            return flash::mods::RowOf<Element>{i < n_rows ? start + i * row_stride : start,
                                               i < n_rows ? size : 0};
        };
        const flash::mods::RowOf<Element> rows[2] = {row_of(lane / 4), row_of(lane / 4 + 8)};
        Streamed streamed;
        streamed.read(rows, stride, first_key, lane);
        streamed.arrange(lane);
        check_streamed<kSquares>(streamed, lane, [=](int row, int column) {
            const int key = first_key + column;
            return row < n_rows && key < size ? &start[row * row_stride + key * stride] : nullptr;
        });
    });
}

template <int kSquares>
void check_all() {
    constexpr int kKeys = 8 * kSquares;
    check<kSquares>(3 * kKeys, 1, 3 * kKeys, 0, kRows, kKeys);              // read at once
    check<kSquares>(3 * kKeys, 1, 3 * kKeys, 0, kRows, 2 * kKeys);          // … to the end
    check<kSquares>(2 * kKeys + 3, 1, 2 * kKeys + 8, 0, kRows, 2 * kKeys);  // some keys are outside
    check<kSquares>(kKeys, 1, kKeys, 0, kRows, kKeys);                      // all are
    check<kSquares>(3 * kKeys, 1, 3 * kKeys + 1, 0, kRows, kKeys);          // rows of an odd stride
    check<kSquares>(3 * kKeys, 1, 3 * kKeys, 1, kRows, 0);                  // an odd address
    check<kSquares>(3 * kKeys, 2, 6 * kKeys, 0, kRows, kKeys);              // every other element
    check<kSquares>(3 * kKeys, 0, 8, 0, kRows, kKeys);                      // one for all keys
    check<kSquares>(3 * kKeys, 1, 0, 0, kRows, kKeys);                      // one row for all
    check<kSquares>(3 * kKeys, 1, 3 * kKeys, 0, 5, kKeys);                  // rows outside
    check<kSquares>(3 * kKeys, 17, 1, 0, kRows, kKeys);                     // transposed
    check<kSquares>(1, 1, 1, 0, kRows, 0);
}

// The same of a tile that a copy has left in shared memory, of which the warp has 16 rows.
template <int kSquares>
void check_tile(int warp, int first_square) {
    constexpr int kTileRows = 64, kColumns = 128;
    constexpr uint32_t kTile = 4096;
    const auto *start = different_elements<Element>(kTileRows * kColumns);
    for (int row = 0; row < kTileRows; ++row) {
        for (int column = 0; column < kColumns; column += 2) {
            const Element *const pair = start + row * kColumns + column;
            flash::store_shared(kTile + flash::chunk_offset(kTileRows, row, column / 8) + column % 8 * 2,
                                pair[0].bits | uint32_t(pair[1].bits) << 16);
        }
    }
    FakeWarp::run(0, [=] {
        const int lane = FakeWarp::lane();
        flash::StreamedRows<Element, kSquares> streamed;
        streamed.template read_tile<kTileRows>(kTile, 16 * warp, first_square, lane);
        check_streamed<kSquares>(streamed, lane, [=](int row, int column) {
            return &start[(16 * warp + row) * kColumns + 8 * first_square + column];
        });
    });
}

// Each row's lines once, none behind its end.
void check_prefetch() {
    static std::vector<Element> memory(kRows * 512);
    const auto n_lines = [](int size, int64_t stride, int first_key) {
        flash::n_prefetched = 0;
        FakeWarp::run(0, [=] {
            const auto row_of = [=](int i) {
                return flash::mods::RowOf<Element>{memory.data() + i * 512, size};
            };
            flash::StreamedRows<Element, 16>::prefetch(row_of, stride, first_key, FakeWarp::lane());
        });
        return flash::n_prefetched;
    };
    CHECK(n_lines(512, 1, 128) == 2 * kRows);
    CHECK(n_lines(190, 1, 128) == kRows);
    CHECK(n_lines(128, 1, 128) == 0);
    CHECK(n_lines(512, 2, 128) == 0);
}

}  // namespace

int main() {
    check_all<1>();
    check_all<2>();
    check_all<4>();
    check_all<6>();
    check_all<8>();
    check_all<16>();
    for (int warp = 0; warp < 4; ++warp) {
        check_tile<16>(warp, 0);
        for (int square = 0; square < 16; square += 4) check_tile<4>(warp, square);
    }
    check_prefetch();
    return report();
}

// Every score of a warp whose rows are keys finds the element of its query and key, however the tensor lies;
// outside of it 0.
#include "streamed.h"
// behind what stands in for the device
#include "common/backward/streamed_columns.cuh"

namespace {

using Element = flash::mods::Fp16;
using Row = flash::mods::RowOf<Element>;
constexpr int kKeys = 16;

// A tensor of `n_rows` rows of `size` elements: neighbours are `stride` apart, rows `step`, and the first
// lies at `shift`.
template <int kSquares>
void check(int size, int64_t stride, int64_t step, int shift, int n_rows, int first_query, int first_key) {
    const auto *start = different_elements<Element>((n_rows + 8 * kSquares) * step + size * stride) + shift;
    FakeWarp::run(0, [=] {
        const int lane = FakeWarp::lane();
        const auto find_row = [=](int i) {
            const int query = first_query + i;
            return query < n_rows ? Row{start + query * step, size} : Row{start, 0};
        };
        flash::StreamedColumns<Element, kSquares> streamed;
        streamed.read(find_row, stride, step, first_key, lane);
        streamed.arrange();
        check_streamed<kSquares>(streamed, lane, [=](int row, int column) {
            const int key = first_key + row, query = first_query + column;
            return query < n_rows && key < size ? &start[query * step + key * stride] : nullptr;
        });
    });
}

template <int kSquares>
void check_all() {
    constexpr int kQueries = 8 * kSquares;
    check<kSquares>(48, 1, 48, 0, 3 * kQueries, kQueries, 16);      // read at once
    check<kSquares>(48, 1, 50, 2, 2 * kQueries, kQueries, 32);      // … to the end, at the least alignment
    check<kSquares>(48, 1, 0, 0, 2 * kQueries, kQueries, 16);       // one row for all
    check<kSquares>(35, 1, 36, 0, 2 * kQueries, 0, 32);             // some keys are outside
    check<kSquares>(16, 1, 16, 0, 2 * kQueries, 0, 16);             // all are
    check<kSquares>(48, 1, 48, 0, 2 * kQueries - 1, kQueries, 16);  // the last query is
    check<kSquares>(48, 1, 48, 0, kQueries, kQueries, 16);          // all queries are
    check<kSquares>(48, 1, 49, 0, 2 * kQueries, kQueries, 16);      // rows of an odd stride
    check<kSquares>(48, 1, 48, 1, 2 * kQueries, 0, 0);              // an odd address
    check<kSquares>(48, 2, 96, 0, 2 * kQueries, kQueries, 16);      // every other element
    check<kSquares>(48, 0, 8, 0, 2 * kQueries, kQueries, 16);       // one for all keys
    check<kSquares>(48, 2 * kQueries, 1, 0, 2 * kQueries, kQueries, 16);  // transposed
    check<kSquares>(1, 1, 1, 0, 1, 0, 0);
}

void check_well_lying_rows() {
    using Streamed = flash::StreamedColumns<Element, 2>;
    alignas(4) static Element memory[256];
    const Row row{memory, 48}, none{memory, 0}, odd{memory + 1, 48};
    CHECK(Streamed::lies_well(row, row, 1, 48, 32));
    CHECK(!Streamed::lies_well(row, row, 1, 48, 33));
    CHECK(!Streamed::lies_well(row, none, 1, 48, 16));
    CHECK(!Streamed::lies_well(none, row, 1, 48, 16));
    CHECK(!Streamed::lies_well(odd, row, 1, 48, 16));
    CHECK(!Streamed::lies_well(row, row, 1, 47, 16));
    CHECK(!Streamed::lies_well(row, row, 2, 48, 16));
}

// Each row that is asked for once, none behind its end.
void check_prefetch() {
    static std::vector<Element> memory(64 * 128);
    const auto n_lines = [](int size, int64_t stride, int first_key, int count) {
        flash::n_prefetched = 0;
        FakeWarp::run(0, [=] {
            const auto find_row = [=](int i) { return Row{memory.data() + i * 128, size}; };
            flash::StreamedColumns<Element, 8>::prefetch(find_row, stride, first_key, 16, count,
                                                         FakeWarp::lane());
        });
        return flash::n_prefetched;
    };
    CHECK(n_lines(128, 1, 64, 16) == 16);
    CHECK(n_lines(128, 1, 64, 32) == 32);
    CHECK(n_lines(64, 1, 64, 16) == 0);
    CHECK(n_lines(128, 2, 64, 16) == 0);
}

}  // namespace

int main() {
    check_all<1>();
    check_all<2>();
    check_all<8>();
    check_all<16>();
    check_well_lying_rows();
    check_prefetch();
    return report();
}

// Where the hardware looks for the rows of packed sequences, and that no map reaches beyond its tensor.
#include <algorithm>
#include <numeric>
#include <vector>

#include "require.h"
#include "tma/tensor_view.cuh"

using namespace flash;
using namespace flash::tma;

namespace {

constexpr uintptr_t kTensor = uintptr_t{1} << 40;
constexpr int kRowDimension = 1, kEndDimension = 2;

uintptr_t address(const MapShape &shape, const std::vector<int64_t> &coordinates) {
    uintptr_t at = shape.base + 2 * coordinates[0];
    for (int i = 1; i < shape.rank; ++i) at += coordinates[i] * shape.strides[i - 1];
    return at;
}

// (total, heads, d) packed: sequences of these lengths, of which `longest` is announced.
void check_packed(const std::vector<int64_t> &lengths, int64_t longest, int64_t heads, int64_t d) {
    const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    const TensorView view{
        reinterpret_cast<void *>(kTensor), d, longest, heads, 1, {0, heads * d, d}, 64, DType::BF16, total};
    const MapShape shape = map_shape(view);
    REQUIRE(shape.rank == 5, "rank %d", shape.rank);
    int64_t first = 0;
    for (const int64_t length : lengths) {
        const int64_t end = first + length, row0 = longest - length;
        for (int64_t r = 0; r < 2 * longest; ++r) {
            const bool there =
                uint64_t(row0 + r) < shape.sizes[kRowDimension] && uint64_t(end) < shape.sizes[kEndDimension];
            REQUIRE(there == (r < length), "longest %ld, row %ld of %ld", longest, r, length);
            const uintptr_t wanted = kTensor + 2 * ((first + r) * heads * d + (heads - 1) * d);
            REQUIRE(!there || address(shape, {0, row0 + r, end, heads - 1, 0}) == wanted,
                    "longest %ld, row %ld of the sequence at %ld", longest, r, first);
        }
        first = end;
    }
    std::vector<int64_t> last(5);
    for (int i = 0; i < 5; ++i) last[i] = static_cast<int64_t>(shape.sizes[i]) - 1;
    REQUIRE(address(shape, last) == kTensor + 2 * (total * heads * d - 1), "longest %ld", longest);
}

// (batch, seq, heads, d), a sequence an item; `used` rows of each exist.
void check_batch(int64_t batch, int64_t seq, int64_t seq_stride) {
    constexpr int64_t heads = 2, d = 64;
    const TensorView view{reinterpret_cast<void *>(kTensor), d,  seq,         heads, batch,
                          {1 << 20, seq_stride, d},          64, DType::BF16, seq};
    const MapShape shape = map_shape(view);
    for (int64_t used = 1; used <= seq; ++used) {
        for (int64_t r = 0; r < used; ++r) {
            const uintptr_t wanted = kTensor + 2 * ((batch - 1) * (1 << 20) + (seq > 1 ? r * seq_stride : 0));
            REQUIRE(address(shape, {0, seq - used + r, used, 0, batch - 1}) == wanted, "row %ld of %ld", r,
                    used);
        }
    }
}

// Packed queries of which the heads of a group are the rows of one: (column, head of the group, row, end,
// group).
void check_groups(const std::vector<int64_t> &lengths, int64_t longest, int64_t groups, int64_t group,
                  int64_t d) {
    const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), heads = groups * group;
    const TensorView view{reinterpret_cast<void *>(kTensor),
                          d,
                          longest,
                          groups,
                          1,
                          {0, heads * d, d},
                          16,
                          DType::BF16,
                          total,
                          static_cast<int>(group)};
    const MapShape shape = map_shape(view);
    REQUIRE(shape.rank == 5 && int64_t(shape.sizes[1]) == group, "rank %d", shape.rank);
    int64_t first = 0;
    for (const int64_t length : lengths) {
        const int64_t end = first + length, row0 = longest - length;
        for (int64_t r = 0; r < 2 * longest; ++r) {
            const bool there = uint64_t(row0 + r) < shape.sizes[2] && uint64_t(end) < shape.sizes[3];
            REQUIRE(there == (r < length), "longest %ld, row %ld of %ld", longest, r, length);
            for (int64_t head = 0; there && head < heads; ++head) {
                const uintptr_t wanted = kTensor + 2 * (((first + r) * heads + head) * d + 3);
                REQUIRE(address(shape, {3, head % group, row0 + r, end, head / group}) == wanted,
                        "head %ld of row %ld of the sequence at %ld", head, r, first);
            }
        }
        first = end;
    }
    std::vector<int64_t> last(5);
    for (int i = 0; i < 5; ++i) last[i] = static_cast<int64_t>(shape.sizes[i]) - 1;
    REQUIRE(address(shape, last) == kTensor + 2 * (total * heads * d - 1), "longest %ld", longest);
}

}  // namespace

int main() {
    check_groups({5, 1, 9, 3}, 9, 3, 4, 64);
    check_groups({1, 1, 1}, 1, 8, 4, 128);
    check_groups({2, 7}, 30, 1, 7, 16);
    check_groups({1}, 1, 1, 1, 8);
    check_packed({5, 1, 9, 3}, 9, 3, 64);
    check_packed({5, 1, 9, 3}, 18, 3, 64);  // keys: all rows are announced
    check_packed({1, 1, 1}, 1, 4, 16);      // decoding: one row each
    check_packed({1}, 1, 1, 8);
    check_batch(3, 7, 128);
    check_batch(3, 1, 7);  // a stride that nothing is stepped by, and that no map could have
    const MapShape plain =
        map_shape({reinterpret_cast<void *>(kTensor), 64, 10, 2, 3, {1280, 128, 64}, 64, DType::FP16});
    REQUIRE(plain.rank == 4 && plain.base == kTensor, "rank %d", plain.rank);
    REQUIRE(
        map_shape({reinterpret_cast<void *>(64), 64, 10, 2, 1, {0, 128, 64}, 64, DType::FP16, 10}).base == 0,
        "no address is left before the tensor");
    return 0;
}

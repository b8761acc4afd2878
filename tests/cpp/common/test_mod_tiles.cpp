// Which tiles a mask of the user's lets kernels visit, and what it leaves of each group of their rows: the
// bits that a kernel finds are exact, bounds never wrong.
#include <vector>

#include "check.h"
#include "common/ptx.cuh"
// behind what stands in for the device
#include "common/backward/trimmed_tiles.cuh"

namespace {

using flash::Range;
using flash::TileKind;

// What masks of the tests have in common.
struct AnyMask {
    static constexpr bool kChangesScores = false, kHidesKeys = true, kDrops = false, kMaskHasHead = false;
    struct Once {};
    struct Head {};
};

// Queries and keys of one document see each other: only elements tell.
struct Document : AnyMask {
    static constexpr bool kBoundsTell = false, kBoundsDecide = false;
    struct Captured {
        const int *of;
    };
    struct Row {
        int document;
    };
    using Column = Row;
    static Once once(const Captured &) { return {}; }
    static Head head(const Captured &, Once, int, int) { return {}; }
    static Row row(const Captured &captured, Once, Head, int, int, int q) { return {captured.of[q]}; }
    static Column column(const Captured &captured, Once, Head, int, int, int k) { return {captured.of[k]}; }
    static bool visible(const Captured &, Once, Head, Row row, Column column, float, int, int, int, int) {
        return row.document == column.document;
    }
    static flash::mods::Truth tile(const Captured &, int, int, int, int, int, int) { return {false, true}; }
    static bool sees(const Captured &captured, int q, int k) { return captured.of[q] == captured.of[k]; }
};

// A prefix that all queries see, and a causal mask behind it: bounds tell of all tiles but some at its edge.
struct Prefix : AnyMask {
    static constexpr bool kBoundsTell = true, kBoundsDecide = true;
    struct Captured {
        int length;
    };
    static flash::mods::Truth tile(const Captured &captured, int, int, int first_q, int last_q, int first_k,
                                   int last_k) {
        using R = flash::mods::Range<int>;
        const R length{captured.length, captured.length};
        return flash::mods::either(flash::mods::less(R{first_k, last_k}, length),
                                   flash::mods::at_most(R{first_k, last_k}, R{first_q, last_q}));
    }
    static bool sees(const Captured &captured, int q, int k) { return k < captured.length || q >= k; }
};

template <typename Mod>
TileKind looked_at(const typename Mod::Captured &captured, Range rows, Range keys) {
    bool any = false, all = true;
    for (int q = rows.begin; q < rows.end; ++q) {
        for (int k = keys.begin; k < keys.end; ++k) {
            any = any || Mod::sees(captured, q, k);
            all = all && Mod::sees(captured, q, k);
        }
    }
    return !any ? TileKind::EMPTY : all ? TileKind::FULL : TileKind::PARTIAL;
}

struct Lengths {
    int q, k;
};

// Words as find_tiles.cuh writes them, of one head.
template <typename Mod, int B_r, int B_c, int kGroups>
std::vector<uint32_t> found_words(const typename Mod::Captured &captured, Lengths lengths, int64_t row) {
    const int n_rows = flash::ceil_div(lengths.q, B_r);
    std::vector<uint32_t> words(n_rows * row, 0xffffffff);
    flash::TileFinder<Mod> finder{
        {captured, {words.data(), 0, 0, row}}, words.data(), lengths.q, lengths.k, 1, n_rows, int(row)};
    for (unsigned block = 0; block < words.size(); ++block) {
        blockIdx.x = block;
        for (int warp = flash::kFinderWarps - 1; warp >= 0; --warp) {  // the first one gathers all
            FakeWarp::run(32 * warp, [&] { flash::find_tiles_kernel<Mod, B_r, B_c, kGroups>(finder); });
        }
    }
    return words;
}

// All tiles of all blocks of queries, as a load thread goes over them.
template <typename Mod, int B_r, int B_c, int kGroups>
void check_visits(const typename Mod::Captured &captured, Lengths lengths, bool with_bits) {
    constexpr int kRows = B_r / kGroups;
    const int n_tiles = flash::ceil_div(lengths.k, B_c);
    const int64_t row = flash::ceil_div(n_tiles, flash::TilesOfWord<kGroups>::kTiles);
    std::vector<uint32_t> words;
    if constexpr (!Mod::kBoundsTell) {
        if (with_bits) words = found_words<Mod, B_r, B_c, kGroups>(captured, lengths, row);
    }
    const flash::ModTiles tiles{words.empty() ? nullptr : words.data(), 0, 0, row};
    const bool exact = with_bits || Mod::kBoundsTell;
    for (int q_block = 0; q_block * B_r < lengths.q; ++q_block) {
        const int first_row = q_block * B_r, end_row = std::min(first_row + B_r, lengths.q);
        const auto keys_of = [&](int tile) {
            return Range{tile * B_c, std::min((tile + 1) * B_c, lengths.k)};
        };
        const flash::VisitedTiles<Mod, B_c, kGroups> visited{captured,  tiles,       0,         0,    q_block,
                                                             first_row, end_row - 1, lengths.k, kRows};
        std::vector<int> expected;
        for (int tile = n_tiles - 1; tile >= 0; --tile) {
            const TileKind kind = looked_at<Mod>(captured, {first_row, end_row}, keys_of(tile));
            if (!exact || kind != TileKind::EMPTY) expected.push_back(tile);
        }
        // Queries that see nothing visit the last tile all the same.
        const bool blind = expected.empty();
        if (blind) expected.push_back(n_tiles - 1);
        size_t i = 0;
        for (auto at = visited.first_of(n_tiles, 0); at.kv_block >= 0;
             at = visited.behind(at.kv_block, 0, false)) {
            CHECK(i < expected.size() && at.kv_block == expected[i]);
            for (int group = 0; group < kGroups; ++group) {
                const Range rows{first_row + group * kRows,
                                 std::min(first_row + (group + 1) * kRows, end_row)};
                const TileKind told = at.kinds.of(group);
                if (!exact || blind) {
                    CHECK(told == TileKind::PARTIAL);
                } else if (rows.begin >= rows.end) {
                    CHECK(told == TileKind::EMPTY || looked_at<Mod>(captured, {first_row, end_row},
                                                                    keys_of(at.kv_block)) == TileKind::FULL);
                } else {
                    CHECK(told == looked_at<Mod>(captured, rows, keys_of(at.kv_block)));
                }
            }
            ++i;
        }
        CHECK(i == expected.size());
    }
}

template <int B_r, int B_c, int kGroups>
void check_masks(const std::vector<int> &documents, Lengths lengths) {
    check_visits<Document, B_r, B_c, kGroups>({documents.data()}, lengths, true);
    check_visits<Document, B_r, B_c, kGroups>({documents.data()}, lengths, false);
    for (int length : {0, 1, 100, 400}) check_visits<Prefix, B_r, B_c, kGroups>({length}, lengths, false);
}

// What backward kernels ask, of tiles of 64 queries and keys.
template <typename Mod>
void check_backward(const typename Mod::Captured &captured, Lengths lengths) {
    const int64_t row = flash::ceil_div(flash::ceil_div(lengths.k, 64), flash::kKindsAWord);
    std::vector<uint32_t> words;
    if constexpr (!Mod::kBoundsTell) words = found_words<Mod, 64, 64, 1>(captured, lengths, row);
    const flash::ModOfLaunch<Mod> mod{captured, {words.empty() ? nullptr : words.data(), 0, 0, row}};
    for (int q = 0; q < lengths.q + 64; q += 64) {
        for (int k = 0; k < lengths.k + 64; k += 64) {
            const Range rows{q, std::min(q + 64, lengths.q)}, keys{k, std::min(k + 64, lengths.k)};
            const TileKind kind = rows.begin < rows.end && keys.begin < keys.end
                                      ? looked_at<Mod>(captured, rows, keys)
                                      : TileKind::EMPTY;
            CHECK(flash::known_kind_of_tile(mod, 0, 0, q / 64, k / 64, lengths.q, lengths.k) == kind);
            CHECK(flash::known_kind(mod, 0, 0, rows, keys) == kind);
        }
    }
    // Larger ones, and others than those that were found: never wrong.
    for (int q = 0; q < lengths.q; q += 128) {
        for (int k = 0; k < lengths.k; k += 96) {
            const Range rows{q, std::min(q + 128, lengths.q)}, keys{k, std::min(k + 96, lengths.k)};
            const TileKind told = flash::known_kind(mod, 0, 0, rows, keys);
            CHECK(told == TileKind::PARTIAL || told == looked_at<Mod>(captured, rows, keys));
        }
    }
    for (int k = 0; k < lengths.k; k += 64) {
        const Range keys{k, std::min(k + 64, lengths.k)}, all{0, flash::ceil_div(lengths.q, 64)};
        Range expected = all;
        const auto sees = [&](int tile) {
            const Range rows{tile * 64, std::min(tile * 64 + 64, lengths.q)};
            return looked_at<Mod>(captured, rows, keys) != TileKind::EMPTY;
        };
        while (expected.begin < expected.end && !sees(expected.begin)) ++expected.begin;
        while (expected.begin < expected.end && !sees(expected.end - 1)) --expected.end;
        if (expected.begin == expected.end) expected = {0, 0};
        FakeWarp::run(0, [&] {
            CHECK((flash::trimmed_query_tiles<Mod, 64>(mod, all, keys, lengths.q, 0) == expected));
        });
    }
}

}  // namespace

int main() {
    for (const Lengths lengths : {Lengths{64, 64}, {300, 290}, {517, 400}, {70, 2300}, {700, 130}}) {
        std::vector<int> documents(3000);
        for (int seed = 0; seed < 2; ++seed) {
            uint32_t state = 17 + seed;
            int document = 0;
            for (size_t i = 0; i < documents.size(); ++i) {
                state = state * 1664525 + 1013904223;
                if (state >> 24 < 3 || (seed == 0 && i % 64 == 0)) ++document;
                documents[i] = document;
            }
            check_masks<256, 64, 4>(documents, lengths);
            check_masks<192, 96, 3>(documents, lengths);
            check_masks<128, 128, 2>(documents, lengths);
            check_masks<64, 128, 1>(documents, lengths);
            check_backward<Document>({documents.data()}, lengths);
        }
        for (int length : {0, 1, 100, 400}) check_backward<Prefix>({length}, lengths);
    }
    return report();
}

// Planned work as the device does it, on warps of fibers: sequences of random lengths, of whose rows a plain
// double loop computes each item's share. What comes out, through the workspace and the second kernel or at
// once, must be the attention of each row over all keys that it sees; padding must be cleared; nothing else
// may be written, whatever the lengths are.
#include <cuda_runtime.h>

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "common/planned_combine.cuh"
#include "common/planned_scheduler.cuh"
#include "common/ptx.cuh"  // that of fake_cuda

using namespace flash;

namespace {

constexpr int kB_r = 16, kB_c = 8, kColumns = 32, kGuard = 4096;
std::mt19937 random_bits{11};
int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }

template <ForwardTraits TRAITS, int kChunkTiles>
struct Kernel {
    static constexpr int chunk_tiles = kChunkTiles;
    static constexpr ForwardTraits traits = TRAITS;
    static constexpr int B_c = kB_c;
};

struct Args {
    PlannedLaunch planned;
    PlannedOutput output;
    int window_left, window_right;
    SchedulerCounter *counter;
    // Of rows_of_none.cuh.
    const int *cu_seqlens_q;
    int rows_q;
    int64_t total_q;
    float *lse;
};

struct Problem {
    int batch, heads, heads_kv, total_q, longest_q, capacity;
    std::vector<int> ends_q, used_q, used_k;
    bool counts_q, sinks, o_float32;
    int window_left = 30, window_right = 4;
    std::vector<float> sink;
};

double score(int b, int head, int query, int key) {
    return std::sin(b + 3.1 * head + 0.7 * query + 1.3 * key);
}
double value(int b, int kv_head, int key, int column) {
    return std::cos(b + kv_head + 0.9 * key + 0.3 * column);
}

// The keys that a query sees, of those in a range: softmax sums relative to 1.
struct Share {
    double sum = 0, o[kColumns] = {};
};
template <ForwardTraits TRAITS>
Share share_of(const Problem &p, int b, int head, int query, int n_q, int n_k, int begin, int end) {
    const Mask<TRAITS> mask{n_q, n_k, p.window_left, p.window_right};
    const int first = std::max({begin, 0, TRAITS.window ? mask.visible_begin(query) : 0});
    Share share;
    for (int key = first; key < std::min({end, n_k, mask.visible_end(query)}); ++key) {
        const double weight = std::exp(score(b, head, query, key));
        share.sum += weight;
        for (int c = 0; c < kColumns; ++c)
            share.o[c] += weight * value(b, head / (p.heads / p.heads_kv), key, c);
    }
    return share;
}

float from_bfloat16(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

constexpr float kUnseen = -1e30f;  // the exponent of rows that see nothing

// What a thread block does with an item, one warp after another eight rows.
template <ForwardTraits TRAITS, int kChunkTiles>
void work_on(const Problem &p, const Args &args, const PlannedItem &item) {
    FakeWarp::run(0, [&] {
        constexpr bool kChunks = kChunkTiles > 0;
        if (!item.has_tiles())
            return fill_planned_item<kChunks>(args.planned, args.output, item, threadIdx.x, 32);
        for (int first = 0; first < kB_r; first += 8) {
            const int row = first + threadIdx.x / 4;
            const PlannedRow at(args.planned, item, row);
            Share share;
            if (at.counts) {
                share = share_of<TRAITS>(p, item.batch, at.head, at.query, item.seq_len_q, item.seq_len_k,
                                         item.first_kv_block * kB_c, item.end_kv_block * kB_c);
            }
            store_planned_row<DType::BF16, kColumns, false, TRAITS.sinks, kChunks>(
                args.planned, args.output, item, row, 0.0f, static_cast<float>(share.sum), [&](int chunk) {
                    const int c = chunk * 8 + threadIdx.x % 4 * 2;
                    return make_float2(static_cast<float>(share.o[c]), static_cast<float>(share.o[c + 1]));
                });
        }
    });
}

// `valid`: lengths are such as a caller promises; else only that nothing beside the tensors is written.
template <ForwardTraits TRAITS, int kChunkTiles>
void run(const Problem &p, int fixed, bool dynamic, bool enough_room, bool valid) {
    ForwardProblem problem{};
    const int element = p.o_float32 ? 4 : 2, row_elements = p.heads * kColumns;
    std::vector<char> o(2 * kGuard + int64_t(p.total_q) * row_elements * element, char(0x7b));
    std::vector<float> lse(2 * kGuard + p.heads * p.total_q, 123.0f);
    problem.o = o.data() + kGuard;
    problem.lse = lse.data() + kGuard;
    problem.o_strides = {0, row_elements, kColumns};
    problem.batch = p.batch;
    problem.n_heads = p.heads;
    problem.n_heads_kv = p.heads_kv;
    problem.seq_len_q = p.longest_q;
    problem.seq_len_k = p.capacity;
    problem.d_head_v = kColumns;
    problem.window_left = p.window_left;
    problem.window_right = p.window_right;
    problem.sinks = TRAITS.sinks ? p.sink.data() : nullptr;
    problem.cu_seqlens_q = p.ends_q.data();
    problem.seqused_q = p.counts_q ? p.used_q.data() : nullptr;
    problem.seqused_k = p.used_k.data();
    problem.total_q = p.total_q;
    problem.o_float32 = p.o_float32;
    problem.plan_slots = between(0, 3) ? between(4, 40) : 0;
    problem.plan_shortest = between(1, 3);
    problem.plan_longest = between(1, 6);
    problem.plan_few_queries = between(0, 8);
    problem.plan_fixed = fixed;
    problem.partial_rows = enough_room ? int64_t(p.total_q) * p.heads * 20 : between(0, 200);
    std::vector<float> partial_o(2 * kGuard + problem.partial_rows * kColumns, 321.0f);
    const int of_row = kChunkTiles > 0 ? 2 : 1;  // sum and exponent
    std::vector<float> partial_lse(2 * kGuard + problem.partial_rows * of_row, 321.0f);
    problem.partial_o = partial_o.data() + kGuard;
    problem.partial_lse = partial_lse.data() + kGuard;

    const PlannedLaunch planned =
        planned_launch(problem, kB_r, 2 * kColumns * 2 * (between(0, 1) ? 1 : 300000));
    CHECK(plan_allows(problem, planned.block_queries));
    SchedulerCounter counter{};
    const Args args{planned,
                    planned_output(problem, TRAITS.sinks),
                    p.window_left,
                    p.window_right,
                    dynamic ? &counter : nullptr,
                    problem.cu_seqlens_q,
                    planned.rows_q,
                    problem.total_q,
                    problem.lse};
    // The thread blocks in turn, an item each.
    gridDim.x = between(1, 5);
    using Scheduler = PlannedScheduler<Kernel<TRAITS, kChunkTiles>, Args>;
    std::vector<std::array<Scheduler, 32>> schedulers(gridDim.x);
    std::vector<bool> begun(gridDim.x), ended(gridDim.x);
    for (unsigned n_ended = 0; n_ended < gridDim.x;) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
            if (ended[blockIdx.x]) continue;
            PlannedItem item{};
            bool found = false;
            FakeWarp::run(0, [&] {
                Scheduler &own = schedulers[blockIdx.x][threadIdx.x];
                if (!begun[blockIdx.x]) own.start(args);
                PlannedItem next{};
                const bool is_one = own.next(args, next);
                if (threadIdx.x == 0) {
                    item = next;
                    found = is_one;
                }
            });
            if (!begun[blockIdx.x]) {
                FakeWarp::run(
                    0, [&] { clear_planned_rows_of_none(args, args.output, p.heads, threadIdx.x, 32); });
            }
            begun[blockIdx.x] = true;
            if (found) {
                work_on<TRAITS, kChunkTiles>(p, args, item);
            } else {
                ended[blockIdx.x] = true;
                ++n_ended;
                Scheduler::finish(args);
            }
        }
    }
    CHECK(counter.next == 0 && counter.next_of_class == 0 && counter.finished_blocks == 0);
    const PlannedCombineArgs combine{planned, args.output, p.window_left, p.window_right, kUnseen, 1e30f};
    gridDim.x = between(1, 2);
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (int warp = 0; warp < kPlannedCombineWarps; ++warp) {
            FakeWarp::run(warp * 32,
                          [&] { planned_combine_kernel<DType::BF16, TRAITS, kB_c, kChunkTiles>(combine); });
        }
    }

    const auto untouched = [](const auto &memory, auto expected) {
        return std::all_of(memory.begin(), memory.begin() + kGuard, [&](auto x) { return x == expected; }) &&
               std::all_of(memory.end() - kGuard, memory.end(), [&](auto x) { return x == expected; });
    };
    CHECK(untouched(o, char(0x7b)) && untouched(lse, 123.0f));
    CHECK(untouched(partial_o, 321.0f) && untouched(partial_lse, 321.0f));
    if (!valid || (p.o_float32 && !enough_room)) return;

    for (int row = 0; row < p.total_q; ++row) {
        const int b =
            static_cast<int>(std::upper_bound(p.ends_q.begin(), p.ends_q.end(), row) - p.ends_q.begin()) - 1;
        const bool in_sequence = b < p.batch;
        const int query = in_sequence ? row - p.ends_q[b] : 0;
        const int all = in_sequence ? p.ends_q[b + 1] - p.ends_q[b] : 0;
        const int n_q = in_sequence && p.counts_q ? std::min(all, p.used_q[b]) : all;
        const bool counts = in_sequence && query < n_q;
        for (int head = 0; head < p.heads; ++head) {
            Share share;
            const int n_k = counts ? std::min(p.used_k[b], p.capacity) : 0;
            if (counts) share = share_of<TRAITS>(p, b, head, query, n_q, n_k, 0, n_k);
            const double sink = counts && TRAITS.sinks ? std::exp(double(p.sink[head])) : 0;
            const double total = share.sum + sink;
            const float got_lse = problem.lse[head * p.total_q + row];
            CHECK(total == 0 ? got_lse == -INFINITY : std::abs(got_lse - std::log(total)) < 1e-4);
            for (int c = 0; c < kColumns; ++c) {
                const double wanted = total == 0 ? 0 : share.o[c] / total;
                const int64_t index = int64_t(row) * row_elements + head * kColumns + c;
                const char *memory = static_cast<const char *>(problem.o) + index * element;
                uint16_t narrow;
                float got;
                std::memcpy(&narrow, memory, sizeof narrow);
                std::memcpy(&got, memory, p.o_float32 ? sizeof got : 0);
                if (!p.o_float32) got = from_bfloat16(narrow);
                CHECK(std::abs(got - wanted) < (p.o_float32 ? 1e-5 : 4e-3));
            }
        }
    }
}

Problem random_problem(bool valid) {
    Problem p;
    p.batch = between(1, 3) == 1 ? between(33, 70) : between(1, 6);
    p.heads_kv = between(1, 2);
    p.heads = p.heads_kv * std::vector<int>{1, 2, 3, 4, 7, 20, 32}[between(0, 6)];
    p.capacity = between(1, 120);
    p.counts_q = between(0, 1);
    p.sinks = between(0, 1);
    p.o_float32 = between(0, 3) == 0;
    int end = 0;
    p.longest_q = 1;
    p.ends_q.push_back(0);
    for (int b = 0; b < p.batch; ++b) {
        const int n = std::vector<int>{0, 1, 1, 1, 4, between(0, 40)}[between(0, p.batch > 6 ? 4 : 5)];
        p.longest_q = std::max(p.longest_q, n);
        p.ends_q.push_back(end += n);
        p.used_q.push_back(between(0, 2) ? n : between(0, n + 2));
        p.used_k.push_back(std::vector<int>{0, 1, p.capacity, between(0, p.capacity + 5)}[between(0, 3)]);
    }
    p.total_q = end + between(0, 3);
    for (int head = 0; head < p.heads; ++head) p.sink.push_back(between(-3, 3));
    if (!valid) {
        for (auto *numbers : {&p.ends_q, &p.used_q, &p.used_k}) {
            for (int &x : *numbers) {
                if (between(0, 2) == 0)
                    x = std::vector<int>{-1, -1000000, INT32_MAX, INT32_MIN, 7}[between(0, 4)];
            }
        }
        p.longest_q = between(1, 60);
    }
    return p;
}

template <ForwardTraits TRAITS>
void check(int rounds) {
    for (int i = 0; i < rounds; ++i) {
        const bool valid = between(0, 3) > 0;
        const int fixed = between(0, 2) ? 0 : between(1, 9);
        run<TRAITS, 0>(random_problem(valid), fixed, between(0, 1), between(0, 3) > 0, valid);
        run<TRAITS, 1>(random_problem(valid), fixed, between(0, 1), between(0, 3) > 0, valid);
        run<TRAITS, 2>(random_problem(valid), fixed, between(0, 1), between(0, 3) > 0, valid);
    }
}

}  // namespace

int main() {
    check<ForwardTraits{.varlen = true, .planned = true}>(12);
    check<ForwardTraits{.causal = true, .varlen = true, .planned = true}>(12);
    check<ForwardTraits{.window = true, .sinks = true, .varlen = true, .planned = true}>(12);
    check<ForwardTraits{.causal = true, .sinks = true, .varlen = true, .planned = true}>(12);
    return report();
}

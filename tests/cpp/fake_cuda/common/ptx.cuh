// In the place of the PTX instructions, for host tests: a warp of 32 fibers that meet in its shuffles, and
// what else headers of planned work name. Code runs as on the device, lane by lane between two meetings.
#pragma once

#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define FLASH_DEVICE inline
#define __shared__ static
#define __global__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#include "flash_attention.cuh"

struct FakeIndex {
    unsigned x = 0;
};
inline FakeIndex threadIdx, blockIdx, gridDim;

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <bool kPastL1>
inline void load_word_if(int &to, const int *from) {
    if (from != nullptr) to = *from;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmul_ru(float a, float b) {
    const double exact = double(a) * b;  // 48 bits
    const float nearest = float(exact);
    return nearest < exact ? std::nextafter(nearest, INFINITY) : nearest;
}
inline float __fadd_ru(float a, float b) {
    const float sum = a + b;
    return double(sum) < double(a) + double(b) ? std::nextafter(sum, INFINITY) : sum;
}
inline float __fmul_rd(float a, float b) { return -__fmul_ru(-a, b); }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// One warp at a time.
class FakeWarp {
  public:
    static constexpr int kLanes = 32;

    // Runs `body` on all lanes of the warp whose first thread is `first_thread`.
    static void run(unsigned first_thread, const std::function<void()> &body) {
        FakeWarp warp;
        current_ = &warp;
        warp.body_ = &body;
        for (int lane = 0; lane < kLanes; ++lane) {
            getcontext(&warp.lanes_[lane]);
            warp.stacks_[lane].resize(1 << 17);
            warp.lanes_[lane].uc_stack.ss_sp = warp.stacks_[lane].data();
            warp.lanes_[lane].uc_stack.ss_size = warp.stacks_[lane].size();
            warp.lanes_[lane].uc_link = &warp.outside_;
            makecontext(&warp.lanes_[lane], &FakeWarp::begin, 0);
        }
        for (bool going = true; going;) {
            going = false;
            for (int lane = 0; lane < kLanes; ++lane) {
                if (warp.done_[lane]) continue;
                going = true;
                warp.lane_ = lane;
                threadIdx.x = first_thread + lane;
                swapcontext(&warp.outside_, &warp.lanes_[lane]);
            }
        }
        current_ = nullptr;
    }

    // All lanes' words, once all have come.
    static const std::array<uint64_t, kLanes> &meet(uint64_t word) {
        FakeWarp &warp = *current_;
        const int lane = warp.lane_, turn = warp.turn_;
        warp.given_[lane] = word;
        if (++warp.arrived_ == kLanes) {
            warp.taken_ = warp.given_;
            warp.arrived_ = 0;
            ++warp.turn_;
        }
        while (warp.turn_ == turn) swapcontext(&warp.lanes_[lane], &warp.outside_);
        return warp.taken_;
    }

    static int lane() { return current_->lane_; }

  private:
    static void begin() {
        FakeWarp &warp = *current_;
        const int lane = warp.lane_;
        (*warp.body_)();
        warp.done_[lane] = true;
    }

    inline static FakeWarp *current_ = nullptr;
    const std::function<void()> *body_ = nullptr;
    ucontext_t outside_{}, lanes_[kLanes]{};
    std::vector<char> stacks_[kLanes];
    std::array<uint64_t, kLanes> given_{}, taken_{};
    bool done_[kLanes] = {};
    int lane_ = 0, arrived_ = 0, turn_ = 0;
};

template <typename T>
T fake_shuffle(T value, int source) {
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    word = FakeWarp::meet(word)[source];
    std::memcpy(&value, &word, sizeof value);
    return value;
}
template <typename T>
T __shfl_sync(uint32_t, T value, int source) {
    return fake_shuffle(value, source % FakeWarp::kLanes);
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int distance) {
    const int lane = FakeWarp::lane();
    return fake_shuffle(value, lane >= distance ? lane - distance : lane);
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
    return fake_shuffle(value, FakeWarp::lane() ^ mask);
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
    const auto &votes = FakeWarp::meet(vote);
    uint32_t bits = 0;
    for (int lane = 0; lane < FakeWarp::kLanes; ++lane) bits |= uint32_t(votes[lane] != 0) << lane;
    return bits;
}
inline bool __any_sync(uint32_t all, bool vote) { return __ballot_sync(all, vote) != 0; }
inline bool __all_sync(uint32_t all, bool vote) { return ~__ballot_sync(all, vote) == 0; }
template <typename T>
T __ldg(const T *address) {
    return *address;
}
inline int __float_as_int(float x) {
    int bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline uint32_t __float_as_uint(float x) { return uint32_t(__float_as_int(x)); }
inline float __int_as_float(int bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float __uint_as_float(uint32_t x) { return __int_as_float(int(x)); }
inline int __vimax3_s32(int a, int b, int c) { return a > b ? (a > c ? a : c) : b > c ? b : c; }
inline void __syncwarp() { FakeWarp::meet(0); }
inline void __syncthreads() {}  // of one warp at a time
inline void __threadfence() {}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int atomicAdd(int *address, int value) {
    const int before = *address;
    *address += value;
    return before;
}

namespace flash {

inline constexpr uint32_t kAllLanes = 0xffffffff;

template <typename T>
T computed_here(T x) {
    return x;
}

// An address that is no multiple of the size faults on a device.
template <int n>
void load_words(uint32_t *to, const void *from) {
    if (reinterpret_cast<uintptr_t>(from) % (4 * n) != 0) std::abort();
    std::memcpy(to, from, 4 * n);
}
// movmatrix: element j of row i of the square lies in lane 4 i + j / 2, in the half j % 2 of its word.
inline uint32_t transpose_square(uint32_t word) {
    const auto &words = FakeWarp::meet(word);
    const int row = FakeWarp::lane() / 4, column = 2 * (FakeWarp::lane() % 4);
    const auto element = [&](int i, int j) {
        return uint32_t(words[4 * i + j / 2]) >> 16 * (j % 2) & 0xffff;
    };
    return element(column, row) | element(column + 1, row) << 16;
}

// Shared memory, one word at a time.
inline std::vector<uint32_t> fake_shared_words(1 << 14);
inline void store_shared(uint32_t address, uint32_t value) {
    if (address % 4 != 0) std::abort();
    fake_shared_words.at(address / 4) = value;
}
inline uint32_t load_shared_word(uint32_t address) {
    if (address % 4 != 0) std::abort();
    return fake_shared_words.at(address / 4);
}
// Lane 8 i + j names the address of row j of square i.
inline void ldmatrix(uint32_t (&squares)[4], uint32_t address) {
    const auto rows = FakeWarp::meet(address);
    const int lane = FakeWarp::lane();
    for (int i = 0; i < 4; ++i) {
        squares[i] = load_shared_word(uint32_t(rows[8 * i + lane / 4]) + 4 * (lane % 4));
    }
}

inline int n_prefetched = 0;
inline void prefetch_L2(const void *) { ++n_prefetched; }

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}
inline float exp2_approx(float x) { return std::exp2(x); }

// Two floats as bfloat16, to nearest even.
template <DType kDType>
uint32_t pack(float low, float high) {
    static_assert(kDType == DType::BF16);
    const auto rounded = [](float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return rounded(low) | rounded(high) << 16;
}

}  // namespace flash

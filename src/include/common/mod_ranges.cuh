// Bounds of whole numbers and of truths over a tile of queries and keys: what generated mods find empty and
// full tiles with (flash_helpers/mods/cpp_tiles.py), by the rules of flash_helpers/mods/intervals.py.
//
// Numbers of a type stay within it: the generator writes int only where bounds over all places are of 32
// bits.
#pragma once

#include <cstdint>

#include "common/cuda_utils.cuh"

namespace flash::mods {

template <typename Int>
struct Range {
    Int low, high;
};

// From never (false, false) to always (true, true).
struct Truth {
    bool low, high;
};

FLASH_HOST_DEVICE constexpr Range<int64_t> wide(Range<int> a) { return {a.low, a.high}; }
FLASH_HOST_DEVICE constexpr Range<int64_t> wide(Range<int64_t> a) { return a; }
FLASH_HOST_DEVICE constexpr Range<int> narrow(Range<int64_t> a) { return {int(a.low), int(a.high)}; }
FLASH_HOST_DEVICE constexpr Range<int> narrow(Range<int> a) { return a; }

template <typename T>
FLASH_HOST_DEVICE constexpr T least(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
FLASH_HOST_DEVICE constexpr T greatest(T a, T b) {
    return a > b ? a : b;
}

// ---------------------------------------------------------------------- whole numbers
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> add(Range<Int> a, Range<Int> b) {
    return {a.low + b.low, a.high + b.high};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> sub(Range<Int> a, Range<Int> b) {
    return {a.low - b.high, a.high - b.low};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> negative(Range<Int> a) {
    return {-a.high, -a.low};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> minimum(Range<Int> a, Range<Int> b) {
    return {least(a.low, b.low), least(a.high, b.high)};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> maximum(Range<Int> a, Range<Int> b) {
    return {greatest(a.low, b.low), greatest(a.high, b.high)};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> absolute(Range<Int> a) {
    const Int low = a.low < 0 ? -a.low : a.low, high = a.high < 0 ? -a.high : a.high;
    return {a.low <= 0 && a.high >= 0 ? Int(0) : least(low, high), greatest(low, high)};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> mul(Range<Int> a, Range<Int> b) {
    const Int w = a.low * b.low, x = a.low * b.high, y = a.high * b.low, z = a.high * b.high;
    return {least(least(w, x), least(y, z)), greatest(greatest(w, x), greatest(y, z))};
}
// By a constant above 0.
template <typename Int>
FLASH_HOST_DEVICE constexpr Int floor_quotient(Int a, Int by) {
    return a / by - (a % by < 0);
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> quotient(Range<Int> a, Int by) {
    return {floor_quotient(a.low, by), floor_quotient(a.high, by)};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> rest(Range<Int> a, Int by) {
    const Int first = floor_quotient(a.low, by);
    if (first != floor_quotient(a.high, by)) return {0, Int(by - 1)};
    return {a.low - first * by, a.high - first * by};
}

// ---------------------------------------------------------------------- truths
template <typename Int>
FLASH_HOST_DEVICE constexpr Truth less(Range<Int> a, Range<Int> b) {
    return {a.high < b.low, a.low < b.high};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Truth at_most(Range<Int> a, Range<Int> b) {
    return {a.high <= b.low, a.low <= b.high};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Truth equal(Range<Int> a, Range<Int> b) {
    return {a.low == a.high && b.low == b.high && a.low == b.low, !(a.high < b.low || b.high < a.low)};
}
FLASH_HOST_DEVICE constexpr Truth neither(Truth a) { return {!a.high, !a.low}; }
FLASH_HOST_DEVICE constexpr Truth both(Truth a, Truth b) { return {a.low && b.low, a.high && b.high}; }
FLASH_HOST_DEVICE constexpr Truth either(Truth a, Truth b) { return {a.low || b.low, a.high || b.high}; }
FLASH_HOST_DEVICE constexpr Truth differing(Truth a, Truth b) {
    return {(a.low && !b.high) || (b.low && !a.high), !(a.low && b.low) && (a.high || b.high)};
}
FLASH_HOST_DEVICE constexpr Range<int> number(Truth a) { return {int(a.low), int(a.high)}; }

// ---------------------------------------------------------------------- choices
FLASH_HOST_DEVICE constexpr Truth chosen(Truth condition, Truth a, Truth b) {
    if (condition.low) return a;
    if (!condition.high) return b;
    return {a.low && b.low, a.high || b.high};
}
template <typename Int>
FLASH_HOST_DEVICE constexpr Range<Int> chosen(Truth condition, Range<Int> a, Range<Int> b) {
    if (condition.low) return a;
    if (!condition.high) return b;
    return {least(a.low, b.low), greatest(a.high, b.high)};
}

}  // namespace flash::mods

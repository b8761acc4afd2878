// What the tests of streamed elements share: memory whose neighbours differ, and the comparison.
#pragma once

#include <vector>

#include "check.h"
#include "common/ptx.cuh"
// behind what stands in for the device
#include "common/fragments.cuh"
#include "common/mod_values.cuh"

// So many elements, and some more, from an address that is a multiple of 16 bytes; until the next call.
template <typename Element>
const Element *different_elements(size_t count) {
    static std::vector<Element> memory;
    memory.assign(count + 64, Element{});
    for (size_t i = 0; i < memory.size(); ++i) memory[i].bits = uint16_t(i * 7919 % 30000 + 1);
    const Element *start = memory.data();
    while (reinterpret_cast<uintptr_t>(start) % 16 != 0) ++start;
    return start;
}

// `find(row, column)`: the element of a score of the warp's, nullptr outside of the tensor, where it is 0.
template <int kSquares, typename Streamed, typename Find>
void check_streamed(const Streamed &streamed, int lane, const Find &find) {
    for (int n = 0; n < kSquares; ++n) {
        for (int i = 0; i < 4; ++i) {
            const auto [row, column] = flash::accumulator(lane, 4 * n + i);
            const auto *element = find(row, column);
            const float expected = element == nullptr ? 0.0f : flash::mods::value_of(*element);
            CHECK(streamed.value(i / 2, n, i % 2) == expected);
        }
    }
}

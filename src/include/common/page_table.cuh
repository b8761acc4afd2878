// Keys and values in pages: row r of a sequence is row r % page_size of the page that its table names,
//
//     table (max_pages)     | 7 | 2 | 9 | …          pages (n_pages, page_size, n_heads_kv, d)
//     rows                  0 … page_size - 1 | page_size … | …
//
// Entries behind a sequence's last row may hold anything: they are not read. Others must name a page; where
// they don't, nothing outside of the pages is read, and what the sequence's result is nobody has promised.
#pragma once

#include <cstdint>

#include "common/cuda_utils.cuh"

namespace flash {

// Division by a number that the host knows: rows / divisor by one multiplication. With 2^bits >= divisor,
// multiplier = ceil(2^(31 + bits) / divisor) is too large by less than 2^bits / divisor <= 1 part in 2^31 of
// the quotient, which shows for no dividend below 2^31 (Granlund and Montgomery, 1994).
struct RowDivisor {
    uint32_t multiplier;
    int bits;

    // `divisor`: 1 … 2^30.
    static constexpr RowDivisor of(int divisor) {
        int bits = 0;
        while ((int64_t(1) << bits) < divisor) ++bits;
        const uint64_t dividend = uint64_t(1) << (31 + bits);
        return {static_cast<uint32_t>((dividend + divisor - 1) / divisor), bits};
    }

    // `row`: 0 … 2^31 - 1.
    FLASH_HOST_DEVICE constexpr int divide(int row) const {
        const uint64_t product = uint64_t(2 * static_cast<uint32_t>(row)) * multiplier;
        return static_cast<int>(static_cast<uint32_t>(product >> 32) >> bits);
    }
};

// Division by a number that is known in the launch, of which the remainder is not looked at.
struct KnownDivisor {
    int divisor;
    RowDivisor by;

    static constexpr KnownDivisor of(int divisor) { return {divisor, RowDivisor::of(divisor)}; }

    FLASH_HOST_DEVICE constexpr int down(int x) const { return by.divide(x); }
    FLASH_HOST_DEVICE constexpr int up(int x) const { return by.divide(x + divisor - 1); }
};

struct PagePlace {
    int entry;  // of the table
    int row;    // in the page
};

struct PageSize {
    int rows;
    RowDivisor divisor;

    static constexpr PageSize of(int rows) { return {rows, RowDivisor::of(rows)}; }

    FLASH_HOST_DEVICE constexpr PagePlace place(int row) const {
        const int entry = divisor.divide(row);
        return {entry, row - entry * rows};
    }
};

}  // namespace flash

// The smallest test frame: CHECK(condition) counts and prints failures, main returns their number.
#pragma once

#include <cstdio>

inline int n_failures = 0;

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            ++n_failures;                                                             \
            std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
        }                                                                             \
    } while (false)

// The exit status: 0 when every check held.
inline int report() {
    if (n_failures > 0) std::printf("%d checks failed\n", n_failures);
    return n_failures > 0;
}

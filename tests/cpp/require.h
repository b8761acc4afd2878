// REQUIRE(condition, format, values...): prints where and for which values a condition fails, and ends the
// test.
#pragma once

#include <cstdio>
#include <cstdlib>

#define REQUIRE(condition, ...)                                         \
    do {                                                                \
        if (!(condition)) {                                             \
            std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::printf(__VA_ARGS__);                                   \
            std::printf("\n");                                          \
            std::exit(1);                                               \
        }                                                               \
    } while (false)

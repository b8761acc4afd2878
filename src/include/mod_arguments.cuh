// What the functions of a mod captured, as a launch is told of it: numbers and tensors are arguments of the
// launch, so that functions which differ in them alone share one kernel.
//
// A generated mod (flash_helpers/mods/cpp.py) makes its own struct of it: `Mod::captured(arguments)`.
#pragma once

#include <cstdint>

namespace flash {

inline constexpr int kMaxCapturedDims = 5;

// Which member counts follows from the type that the mod has for the number.
union CapturedNumber {
    int64_t whole;
    double real;
};

// Of a tensor of n dimensions the first n strides, in elements, and sizes count.
struct CapturedTensor {
    const void *data;
    int64_t strides[kMaxCapturedDims];
    int sizes[kMaxCapturedDims];
};

inline constexpr int kKindsAWord = 16;

// What is known of the mask's tiles before a launch: 2 bits a tile (flash_helpers.mods.tiles.Tile), of a row
// of tiles kKindsAWord in a word. A kernel may divide the rows of a tile into groups, each with bits of its
// own (common/mod_tiles.cuh). words: nullptr where it is not known. Strides are in words; 0: the mask
// does not depend on it.
struct ModTiles {
    const uint32_t *words;
    int64_t batch_stride, head_stride, row_stride;
};

// As many of each as the kernel's ModSignature says.
struct ModArguments {
    const CapturedNumber *numbers;
    const CapturedTensor *tensors;
    ModTiles tiles;
};

// By what a kernel makes known which mod it was compiled with. A digest of 0: with none.
struct ModSignature {
    uint64_t digest = 0;
    int n_numbers = 0;
    int n_tensors = 0;

    constexpr bool operator==(const ModSignature &) const = default;
};

}  // namespace flash

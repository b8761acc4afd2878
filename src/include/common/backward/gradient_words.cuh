// Gradients whose elements have 16 bits or are float32: their strides in words of 16 bits, which code for the
// former counts.
#pragma once

#include "backward.cuh"

namespace flash {

// Of an element.
template <bool kFloats>
inline constexpr int kWordsOfGradient = kFloats ? 2 : 1;

inline TensorStrides in_words(const TensorStrides &strides, int words) {
    return {words * strides.batch, words * strides.seq, words * strides.head};
}

}  // namespace flash

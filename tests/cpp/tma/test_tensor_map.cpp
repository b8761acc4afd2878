// A thread that has run nothing on its device has no context, and the driver encodes nothing for it.
#include "require.h"
#include "tma/tensor_map.cuh"

using namespace flash;
using namespace flash::tma;

namespace {

bool has_context = false, refuses = false;
int n_encoded = 0, n_given = 0;
CUtensorMapL2promotion asked_for;

CUresult fake_encode(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                     const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                     CUtensorMapSwizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill) {
    asked_for = promotion;
    if (!has_context || refuses) return CUDA_ERROR_INVALID_CONTEXT;
    map->opaque[0] = ++n_encoded;
    return CUDA_SUCCESS;
}

TensorView view_at(uintptr_t base) {
    return {reinterpret_cast<void *>(base), 64, 128, 2, 1, {16384, 128, 64}, 64, DType::BF16};
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    *function = reinterpret_cast<void *>(&fake_encode);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 3;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    REQUIRE(device == 3, "device %d", device);
    ++n_given;
    has_context = true;
    return cudaSuccess;
}

int main() {
    CUtensorMap map{};
    REQUIRE(find_or_encode(view_at(1 << 20), map) == cudaSuccess, "a thread without a context");
    REQUIRE(n_given == 1 && n_encoded == 1 && map.opaque[0] == 1, "it is given one, once");
    REQUIRE(find_or_encode(view_at(2 << 20), map) == cudaSuccess, "with a context");
    REQUIRE(find_or_encode(view_at(1 << 20), map) == cudaSuccess, "the same tensor again");
    REQUIRE(n_given == 1 && n_encoded == 2, "nothing more is asked for");
    refuses = true;
    REQUIRE(find_or_encode(view_at(3 << 20), map) == cudaErrorInvalidValue, "what cannot be encoded");
    refuses = false;
    REQUIRE(find_or_encode(view_at(3 << 20), map) == cudaSuccess, "is not remembered");

    TensorView view = view_at(4 << 20);
    REQUIRE(find_or_encode(view, map) == cudaSuccess && asked_for == CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            "128 bytes at a time");
    const int before = n_encoded;
    view.promotion = 256;
    REQUIRE(find_or_encode(view, map) == cudaSuccess && asked_for == CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            "256, of the same tensor");
    view.promotion = 128;
    REQUIRE(find_or_encode(view, map) == cudaSuccess && n_encoded == before + 1, "both are remembered");
    return 0;
}

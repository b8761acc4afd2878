// The runtime that launches nothing (fake_cuda/launch_rules.hpp) refuses what a GPU would, and says what.
#include <functional>

#include "common/early_launch.cuh"
#include "launch_rules.hpp"
#include "require.h"
#include "tma/tensor_map.cuh"

using namespace flash;
using namespace flash::tma;

namespace {

void kernel() {}
const void *const kKernel = reinterpret_cast<const void *>(&kernel);
void *parameters[] = {nullptr};

// What is refused of a call; "": nothing.
std::string refused(const std::function<cudaError_t()> &call) {
    LaunchRules::refused.clear();
    const cudaError_t error = call();
    REQUIRE((error == cudaSuccess) == LaunchRules::refused.empty(), "error %d says why", error);
    return LaunchRules::refused;
}

std::string refused_launch(unsigned blocks, int threads, int smem_bytes) {
    return refused(
        [&] { return launch_kernel<false>(kKernel, blocks, threads, smem_bytes, nullptr, parameters); });
}

std::string refused_cluster(unsigned blocks, unsigned of_cluster) {
    cudaLaunchAttribute cluster{cudaLaunchAttributeClusterDimension, {{of_cluster, 1, 1}, 0}};
    cudaLaunchConfig_t config{dim3(blocks), dim3(128), 0, nullptr, &cluster, 1};
    return refused([&] { return cudaLaunchKernelExC(&config, kKernel, parameters); });
}

std::string refused_map(const TensorView &view) {
    CUtensorMap map{};
    return refused([&] { return encode(view, map); });
}

TensorView view(int64_t seq_stride = 128, int box_rows = 64, uintptr_t address = 1 << 20) {
    return {reinterpret_cast<void *>(address), 64, 128, 2, 1, {16384, seq_stride, 64}, box_rows, DType::BF16};
}

}  // namespace

int main() {
    REQUIRE(refused_launch(1, 1024, 48 << 10).empty(), "as much as any kernel may have");
    REQUIRE(refused_launch(0, 128, 0) == "grid.x 0", "no block");
    REQUIRE(refused_launch(1u << 31, 128, 0) == "grid.x 2147483648", "too many blocks");
    REQUIRE(refused_launch(1, 1056, 0) == "block.x 1056", "too many threads");
    REQUIRE(refused_launch(1, 100, 0) == "threads beside whole warps: 100", "part of a warp");
    REQUIRE(refused_launch(1, 128, 100 << 10) == "dynamic shared memory 102400", "memory not asked for");
    const auto ask = [](int bytes) {
        return refused([=] {
            return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        });
    };
    REQUIRE(ask(228 << 10) == "shared memory of a block 233472", "more than there is");
    REQUIRE(ask(227 << 10).empty() && refused_launch(1, 128, 227 << 10).empty(), "memory asked for");
    REQUIRE(refused_cluster(4, 2).empty(), "two clusters");
    REQUIRE(refused_cluster(5, 2) == "blocks of an unfinished cluster 5", "two clusters and a half");
    REQUIRE(refused_map(view()).empty(), "a tensor");
    REQUIRE(refused_map(view(132)) == "stride of a tensor 264", "rows that begin between 16 bytes");
    REQUIRE(refused_map(view(128, 257)) == "size of a box 257", "a box of too many rows");
    REQUIRE(refused_map(view(128, 64, (1 << 20) + 8)) == "address of a tensor 1048584", "not aligned");
    return 0;
}

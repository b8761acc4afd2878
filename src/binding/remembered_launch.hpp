// A launch that can be made again: all of it but the addresses of its tensors.
#pragma once

#include <array>
#include <cstdint>

#include "binding/given_call.hpp"
#include "binding/mod_arguments.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"

namespace flash::binding {

inline constexpr int64_t kNoPointer = INT64_MIN, kKeptPointer = kNoPointer + 1;

template <typename Pass>
struct RememberedLaunch {
    static constexpr int kSlots = Pass::kSlots;
    using Problem = typename Pass::Problem;

    CallLayout layout;
    const Kernel *kernel;
    long device;
    Problem problem;                    // its pointers do not count
    CapturedValues captured;            // of a kernel with a mod; addresses of tensors do not count
    Reference kept;                     // what else the launch reads, such as bits of tiles; or nullptr
    int64_t tiles_offset = kNoPointer;  // of bits that each launch finds, from its workspace
    // Bytes of each pointer from its tensor; kNoPointer: there is none; kKeptPointer: it is the problem's.
    std::array<int64_t, kPointers<Pass>> offsets;
    std::array<Reference, kSlots> makers;  // functions that make tensors which the caller does not give
    Reference label;

    // For Python's garbage collector: visits every object that the launch holds.
    int traverse(visitproc visit, void *arg) const {
        for (const Reference &maker : makers) Py_VISIT(maker.get());
        Py_VISIT(label.get());
        Py_VISIT(kept.get());
        return 0;
    }

    // Takes the pointers of `problem` as offsets from the tensors of their slots. False where one points
    // elsewhere: into a copy that the long way has made, and would have to make again. Offsets of sequences
    // that the caller has not given are what is kept.
    bool take_offsets(const std::array<TensorFacts, kSlots> &tensors, const std::array<bool, kSlots> &there) {
        bool inside = true;
        auto offset = offsets.begin();
        Pass::for_each_pointer(problem, [&](auto *pointer, Slot slot) {
            *offset = kNoPointer;
            if (pointer != nullptr && !there[slot] && kept != nullptr && Pass::is_offsets(slot)) {
                *offset = kKeptPointer;
            } else if (pointer != nullptr) {
                if (there[slot]) {
                    *offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) -
                                                   reinterpret_cast<uintptr_t>(tensors[slot].data));
                }
                inside &= there[slot] && *offset >= 0 && *offset < tensors[slot].span_bytes();
            }
            ++offset;
        });
        return inside;
    }

    // The same for bits of tiles, where nobody keeps them: each launch finds them, in its workspace.
    bool take_tiles(const std::array<TensorFacts, kSlots> &tensors, const std::array<bool, kSlots> &there) {
        const void *const words = captured.tiles();
        if (words == nullptr || kept != nullptr) return true;
        constexpr Slot kWorkspace = Pass::kWorkspace;
        if (!there[kWorkspace]) return false;
        tiles_offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(words) -
                                            reinterpret_cast<uintptr_t>(tensors[kWorkspace].data));
        return tiles_offset >= 0 && tiles_offset < tensors[kWorkspace].span_bytes();
    }

    // The problem on tensors at these addresses.
    Problem problem_at(const std::array<char *, kSlots> &addresses) const {
        Problem result = problem;
        auto offset = offsets.begin();
        Pass::for_each_pointer(result, [&]<typename T>(T *&pointer, Slot slot) {
            if (*offset == kNoPointer) {
                pointer = nullptr;
            } else if (*offset != kKeptPointer) {
                pointer = reinterpret_cast<T *>(addresses[slot] + *offset);
            }
            ++offset;
        });
        return result;
    }
};

}  // namespace flash::binding

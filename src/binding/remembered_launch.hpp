// A launch that can be made again: all of it but the addresses of its tensors.
#pragma once

#include <array>
#include <cstdint>

#include "binding/given_call.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"

namespace flash::binding {

// f(pointer, slot) for each pointer of a problem and the tensor that it points into.
template <typename F>
void for_each_pointer(ForwardProblem &problem, F f) {
    f(problem.q, kQ);
    f(problem.k, kK);
    f(problem.v, kV);
    f(problem.o, kOut);
    f(problem.lse, kLse);
    f(problem.sinks, kSinks);
    f(problem.cu_seqlens_q, kCuSeqlensQ);
    f(problem.cu_seqlens_k, kCuSeqlensK);
    f(problem.seqused_q, kSequsedQ);
    f(problem.seqused_k, kSequsedK);
    f(problem.block_table, kBlockTable);
    f(problem.partial_o, kWorkspace);
    f(problem.partial_lse, kWorkspace);
}
inline constexpr int kPointers = 13;
inline constexpr int64_t kNoPointer = INT64_MIN;

struct RememberedLaunch {
    CallLayout layout;
    const Kernel *kernel;
    long device;
    ForwardProblem problem;  // its pointers do not count
    std::array<int64_t, kPointers>
        offsets;                           // bytes of each pointer from its tensor; kNoPointer: there is none
    std::array<Reference, kSlots> makers;  // functions that make tensors which the caller does not give
    Reference label;

    // For Python's garbage collector: visits every object that the launch holds.
    int traverse(visitproc visit, void *arg) const {
        for (const Reference &maker : makers) Py_VISIT(maker.get());
        Py_VISIT(label.get());
        return 0;
    }

    // Takes the pointers of `problem` as offsets from the tensors of their slots. False where one points
    // elsewhere: into a copy that the long way has made, and would have to make again.
    bool take_offsets(const std::array<TensorFacts, kSlots> &tensors, const std::array<bool, kSlots> &there) {
        bool inside = true;
        auto offset = offsets.begin();
        for_each_pointer(problem, [&](auto *pointer, Slot slot) {
            *offset = kNoPointer;
            if (pointer != nullptr) {
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

    // The problem on tensors at these addresses.
    ForwardProblem problem_at(const std::array<char *, kSlots> &addresses) const {
        ForwardProblem result = problem;
        auto offset = offsets.begin();
        for_each_pointer(result, [&]<typename T>(T *&pointer, Slot slot) {
            pointer = *offset == kNoPointer ? nullptr : reinterpret_cast<T *>(addresses[slot] + *offset);
            ++offset;
        });
        return result;
    }
};

}  // namespace flash::binding

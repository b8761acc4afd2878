// What the two passes of attention are to a table of calls: the tensors of a call, which of them the caller
// gives and which are made, the pointers of a problem, and its launch.
//
// A pass has
//     Problem         what a launch takes; its pointers are new in each call
//     slots           its tensors but those that functions of the user's capture, which come last: those that
//     the caller hands over, in the order of the arguments, then
//                     those that are only made; kGivenSlots of them are given, at least kFewest
//     kMade           what the library makes, unless the caller gives it
//     kTable          the name of the Python type of its tables, and what one takes and gives
#pragma once

#include <array>
#include <utility>

#include "backward.cuh"
#include "binding/kernel_type.hpp"
#include "binding/launch.hpp"
#include "binding/launch_backward.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"
#include "flash_attention.cuh"

namespace flash::binding {

inline constexpr int kMostGivenSlots = 12;  // of any pass
inline constexpr int kMaxCaptured = 8;      // tensors that functions of the user's capture
inline constexpr int kMaxNumbers = 2;       // of a layout
// Where contents of captured tensors count: the stream, and of each tensor a version and an address.
inline constexpr int kMaxContentWords = 1 + 2 * kMaxCaptured;

using Slot = int;

// ---------------------------------------------------------------- both
// The tensors that both passes are given, with the pointers to them: q, k, v and out come first, then what is
// the pass's own, then the tensors of the layout, from kFirstOfLayout on.
template <Slot kFirstOfLayout>
struct SharedSlots {
    static constexpr Slot kQ = 0, kK = 1, kV = 2, kOut = 3, kOwn = 4;
    static constexpr Slot kCuSeqlensQ = kFirstOfLayout, kCuSeqlensK = kFirstOfLayout + 1,
                          kSequsedK = kFirstOfLayout + 2, kBlockTable = kFirstOfLayout + 3,
                          kSequsedQ = kFirstOfLayout + 4, kBehindLayout = kFirstOfLayout + 5;

    // Whether a tensor holds numbers of which the memory may hold the negative.
    static constexpr bool may_be_negated(Slot slot) { return slot < kFirstOfLayout; }

    // Whether a tensor says where packed sequences begin.
    static constexpr bool is_offsets(Slot slot) { return slot == kCuSeqlensQ || slot == kCuSeqlensK; }

    // f(pointer, slot) for each of these pointers of a problem and the tensor that it points into.
    template <typename Problem, typename F>
    static constexpr void for_each_shared_pointer(Problem &problem, F f) {
        f(problem.q, kQ);
        f(problem.k, kK);
        f(problem.v, kV);
        f(problem.o, kOut);
        f(problem.cu_seqlens_q, kCuSeqlensQ);
        f(problem.cu_seqlens_k, kCuSeqlensK);
        f(problem.seqused_k, kSequsedK);
        f(problem.seqused_q, kSequsedQ);
        if constexpr (requires { problem.block_table; }) f(problem.block_table, kBlockTable);
    }
};

// ---------------------------------------------------------------- forward
struct ForwardPass : SharedSlots<5> {
    using Problem = ForwardProblem;

    static constexpr Slot kSinks = kOwn, kLse = kBehindLayout, kWorkspace = kLse + 1, kSlots = kLse + 2;
    static constexpr int kGivenSlots = kLse, kFewest = kOut;
    static constexpr std::array<Slot, 3> kMade{kOut, kLse, kWorkspace};
    static constexpr const char *kMadeNames = "out, lse, workspace";
    static constexpr const char *kTable = "CallTable";
    static constexpr const char *kCall =
        "call(q, k, v, out, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, seqused_q, "
        "*numbers, contents, *captured)\n\n"
        "The result of a call that is known here, or None. The same as calling the table, which takes "
        "longer.";

    // f(pointer, slot) for each pointer of a problem and the tensor that it points into.
    template <typename F>
    static constexpr void for_each_pointer(Problem &problem, F f) {
        for_each_shared_pointer(problem, f);
        f(problem.lse, kLse);
        f(problem.sinks, kSinks);
        f(problem.partial_o, kWorkspace);
        f(problem.partial_lse, kWorkspace);
        f(problem.kept_sums, kWorkspace);
    }

    static const Kernel *kernel_of_launch(PyObject *function) {
        return binding::kernel_of_method(function, as_method(&kernel_launch));
    }

    static Launch read(const Kernel &kernel, PyObject *const *args, Py_ssize_t n_args) {
        return read_launch(kernel, args, n_args);
    }

    static int launch(const Kernel &kernel, const Problem &problem, void *stream) {
        return kernel.launch(problem, stream);
    }

    // What a call gives: out, with the LSE where that is made.
    static Reference result(std::array<Reference, kSlots> &made, PyObject *const *args) {
        Reference out = made[kOut] != nullptr ? std::move(made[kOut]) : share(args[kOut]);
        return made[kLse] == nullptr ? std::move(out) : pack_tuple(out, made[kLse]);
    }
};

// ---------------------------------------------------------------- backward
struct BackwardPass : SharedSlots<7> {
    using Problem = BackwardProblem;

    static constexpr Slot kLse = kOwn, kDout = kOwn + 1, kDlse = kOwn + 2;
    static constexpr Slot kDq = kBehindLayout, kDk = kDq + 1, kDv = kDq + 2, kWorkspace = kDq + 3,
                          kSlots = kDq + 4;
    static constexpr int kGivenSlots = kDq, kFewest = kDlse;
    static constexpr std::array<Slot, 4> kMade{kDq, kDk, kDv, kWorkspace};
    static constexpr const char *kMadeNames = "dq, dk, dv, workspace";
    static constexpr const char *kTable = "BackwardCallTable";
    static constexpr const char *kCall =
        "call(q, k, v, out, lse, dout, dlse, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, seqused_q, "
        "*numbers, contents, *captured)"
        "\n\n(dq, dk, dv, workspace) of a call that is known here, each None where it is not made; or None. "
        "The same as calling the table, which takes longer.";

    template <typename F>
    static constexpr void for_each_pointer(Problem &problem, F f) {
        for_each_shared_pointer(problem, f);
        f(problem.lse, kLse);
        f(problem.dout, kDout);
        f(problem.dlse, kDlse);
        f(problem.dq, kDq);
        f(problem.dk, kDk);
        f(problem.dv, kDv);
        f(problem.delta, kWorkspace);
        f(problem.lse_log2, kWorkspace);
        f(problem.dq_sums, kWorkspace);
        f(problem.counters, kWorkspace);
    }

    static const Kernel *kernel_of_launch(PyObject *function) {
        return binding::kernel_of_method(function, as_method(&kernel_launch_backward));
    }

    static BackwardLaunch read(const Kernel &kernel, PyObject *const *args, Py_ssize_t n_args) {
        return read_launch_backward(kernel, args, n_args);
    }

    static int launch(const Kernel &kernel, const Problem &problem, void *stream) {
        return kernel.launch_backward(problem, stream);
    }

    static Reference result(std::array<Reference, kSlots> &made, PyObject *const *) {
        for (const Slot slot : kMade) {
            if (made[slot] == nullptr) made[slot] = share(Py_None);
        }
        return pack_tuple(made[kDq], made[kDk], made[kDv], made[kWorkspace]);
    }
};

static_assert(ForwardPass::kCuSeqlensQ == ForwardPass::kSinks + 1);
static_assert(BackwardPass::kCuSeqlensQ == BackwardPass::kDlse + 1);
static_assert(ForwardPass::kGivenSlots <= kMostGivenSlots && BackwardPass::kGivenSlots <= kMostGivenSlots);

// How many pointers a problem of a pass has into tensors.
template <typename Pass>
inline constexpr int kPointers = [] {
    typename Pass::Problem problem{};
    int n = 0;
    Pass::for_each_pointer(problem, [&n](auto *, Slot) { ++n; });
    return n;
}();

}  // namespace flash::binding

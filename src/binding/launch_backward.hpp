// The arguments of one launch of a backward kernel: one tuple, generated from its Python declaration, and the
// workspaces.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>

#include "backward.cuh"
#include "binding/fields.hpp"
#include "binding/launch.hpp"
#include "binding/launch_values.hpp"
#include "binding/mod_arguments.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"

namespace flash::binding {

inline constexpr const char *kLaunchBackwardArguments =
    "launch_backward(arguments, stream, delta, lse_log2, dq_sums, counters[, mod])\n\n"
    "arguments: flash_helpers.kernels.arguments.BackwardArguments. The others are addresses: of the stream, "
    "and of the workspaces that `workspaces(arguments)` tells the sizes of; delta is like lse.";
inline constexpr Py_ssize_t kLaunchBackwardArity = 6;
inline constexpr Py_ssize_t kBackwardArgumentCount = std::tuple_size_v<decltype(kBackwardArguments)>;

// The names of the arguments in their order, as a tuple.
inline Reference backward_argument_names() {
    return std::apply([](const auto &...argument) { return pack_tuple(make_text(argument.name)...); },
                      kBackwardArguments);
}

// ---------------------------------------------------------------- one argument
inline void read_argument(const char *name, PyObject *value, int &out) { out = read_int(name, value); }
inline void read_argument(const char *, PyObject *value, int64_t &out) { out = to_int64(value); }
inline void read_argument(const char *, PyObject *value, float &out) { out = to_float(value); }

template <typename T>
void read_argument(const char *, PyObject *value, T *&out) {
    out = read_pointer<T>(value);
}

inline void read_argument(const char *name, PyObject *value, TensorStrides &out) {
    if (!is_tuple_of(4, value)) {
        raise_error(PyExc_TypeError, "launch_backward: %s is no tuple of 4 integers", name);
    }
    out = read_strides(value);
}

// ---------------------------------------------------------------- all of them
inline void check_sizes(const Kernel &kernel, const BackwardProblem &problem) {
    for (const int size : {problem.batch, problem.n_heads, problem.n_heads_kv, problem.seq_len_q,
                           problem.seq_len_k, problem.d_head, problem.d_head_v}) {
        if (size < 0)
            raise_error(PyExc_ValueError, "launch_backward: a size is %d; allowed: 0 or more", size);
    }
    if (problem.n_heads_kv > 0 && problem.n_heads % problem.n_heads_kv != 0) {
        raise_error(PyExc_ValueError, "launch_backward: n_heads %d is no multiple of n_heads_kv %d",
                    problem.n_heads, problem.n_heads_kv);
    }
    if (!fits(problem.d_head, kernel.d_head, kernel) || !fits(problem.d_head_v, kernel.d_head_v, kernel)) {
        raise_error(PyExc_ValueError,
                    "launch_backward: head sizes %d and %d; the kernel is compiled for %d and %d",
                    problem.d_head, problem.d_head_v, kernel.d_head, kernel.d_head_v);
    }
}

inline void check_addresses(const BackwardProblem &problem) {
    const bool holds_queries = problem.batch > 0 && problem.n_heads > 0 && problem.seq_len_q > 0;
    const bool holds_keys = problem.batch > 0 && problem.n_heads_kv > 0 && problem.seq_len_k > 0;
    check_address("q", problem.q, holds_queries);
    check_address("o", problem.o, holds_queries);
    check_address("dout", problem.dout, holds_queries);
    check_address("lse", problem.lse, holds_queries);
    check_address("k", problem.k, holds_keys);
    check_address("v", problem.v, holds_keys);
    check_address("dq", problem.dq, holds_queries && problem.dq != nullptr);
    check_address("dk", problem.dk, holds_keys && problem.dk != nullptr);
    check_address("dv", problem.dv, holds_keys && problem.dv != nullptr);
}

// The problem that a tuple of arguments states, without workspaces.
inline BackwardProblem read_backward_problem(const Kernel &kernel, PyObject *arguments) {
    if (!is_tuple_of(kBackwardArgumentCount, arguments)) {
        raise_error(PyExc_TypeError, "launch_backward: arguments must be a BackwardArguments of %zd values",
                    kBackwardArgumentCount);
    }
    BackwardProblem problem{};
    Py_ssize_t next = 0;
    std::apply(
        [&](const auto &...argument) {
            (read_argument(argument.name, PyTuple_GetItem(arguments, next++), problem.*argument.member), ...);
        },
        kBackwardArguments);
    check_sizes(kernel, problem);
    check_addresses(problem);
    return problem;
}

struct BackwardLaunch {
    BackwardProblem problem;  // whose mod is `captured`, to be pointed to where the launch is made
    void *stream;
    CapturedValues captured;
};

// The arguments of `launch_backward`. Throws PythonError at the first one that is not as it should be.
inline BackwardLaunch read_launch_backward(const Kernel &kernel, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != kLaunchBackwardArity && n_args != kLaunchBackwardArity + 1) {
        raise_error(PyExc_TypeError, "launch_backward: given %zd arguments; wanted %s", n_args,
                    kLaunchBackwardArguments);
    }
    check_mod(kernel, n_args > kLaunchBackwardArity);
    BackwardLaunch launch{read_backward_problem(kernel, args[0]), to_pointer(args[1]), {}};
    if (kernel.mod.digest != 0) launch.captured = CapturedValues(kernel.mod, args[kLaunchBackwardArity]);
    BackwardProblem &problem = launch.problem;
    problem.delta = read_pointer<float>(args[2]);
    problem.lse_log2 = read_pointer<float>(args[3]);
    problem.dq_sums = read_pointer<float>(args[4]);
    problem.counters = read_pointer<int>(args[5]);
    const BackwardWorkspaces bytes = kernel.workspaces(problem);
    check_address("delta", problem.delta, problem.batch > 0 && problem.n_heads > 0 && problem.seq_len_q > 0);
    check_address("lse_log2", problem.lse_log2, bytes.lse_log2 > 0);
    check_address("dq_sums", problem.dq_sums, bytes.dq_sums > 0);
    check_address("counters", problem.counters, bytes.counters > 0);
    return launch;
}

}  // namespace flash::binding

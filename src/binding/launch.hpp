// The arguments of one launch from Python: raw pointers, sizes and strides into a ForwardProblem.
#pragma once

#include <climits>
#include <cstdint>

#include "binding/launch_values.hpp"
#include "binding/mod_arguments.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"
#include "flash_attention.cuh"
#include "generated/launch_features.hpp"

namespace flash::binding {

inline constexpr const char *kLaunchArguments =
    "launch(q, k, v, o, lse, stream, q_shape, k_shape, q_stride, k_stride, v_stride, o_stride, "
    "softmax_scale[, features[, mod]])";
inline constexpr Py_ssize_t kLaunchArity = 13;
inline constexpr int kUnbounded = (1 << 30) - 1;

// ---------------------------------------------------------------- features
// A feature, as the type of its member says.
inline void read_feature(const char *name, PyObject *value, int &member) { member = read_int(name, value); }
inline void read_feature(const char *name, PyObject *value, bool &member) {
    member = read_int(name, value) != 0;
}
inline void read_feature(const char *, PyObject *value, int64_t &member) { member = to_int64(value); }
inline void read_feature(const char *, PyObject *value, float &member) { member = to_float(value); }
template <typename T>
void read_feature(const char *, PyObject *value, T *&member) {
    member = read_pointer<T>(value);
}

// ---------------------------------------------------------------- all of them
// What plain attention does not need, in one tuple: flash_helpers.kernels.launch_features.Features.
inline void read_features(PyObject *features, ForwardProblem &problem) {
    if (!is_tuple_of(kFeatureCount, features)) {
        raise_error(PyExc_TypeError, "launch: features must be the tuple %s", kFeatures);
    }
    int next = 0;
    for_each_feature(problem, [&](const char *name, auto &member) {
        read_feature(name, PyTuple_GetItem(features, next++), member);
    });
    if (problem.block_table == nullptr) return;
    if (problem.page_size < 1 || problem.max_pages < 1 || problem.max_pages > INT_MAX / problem.page_size) {
        raise_error(PyExc_ValueError, "launch: %d pages of %d keys; allowed: 1 to 2^31 - 1 keys in all",
                    problem.max_pages, problem.page_size);
    }
    problem.seq_len_k = problem.max_pages * problem.page_size;
}

// Whether tensors with heads of `given` elements fit a kernel compiled for `compiled`.
inline bool fits(int given, int compiled, const Kernel &kernel) {
    return given == compiled || (kernel.padded_head && given > 0 && given < compiled);
}

struct Launch {
    ForwardProblem problem;  // whose mod is `captured`, to be pointed to where the launch is made
    void *stream;
    CapturedValues captured;
};

// The arguments of `launch`. Throws PythonError at the first one that is not as it should be.
inline Launch read_launch(const Kernel &kernel, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args < kLaunchArity || n_args > kLaunchArity + 2) {
        raise_error(PyExc_TypeError, "launch: given %zd arguments; wanted %s", n_args, kLaunchArguments);
    }
    for (int i = 6; i < 12; ++i) {
        if (is_tuple_of(4, args[i])) continue;
        raise_error(PyExc_TypeError, "launch: argument %d is no tuple of 4 integers; wanted %s", i + 1,
                    kLaunchArguments);
    }
    PyObject *const q_shape = args[6], *const k_shape = args[7];
    const int d_head = read_size(q_shape, 3);
    ForwardProblem problem{
        .q = to_pointer(args[0]),
        .k = to_pointer(args[1]),
        .v = to_pointer(args[2]),
        .o = to_pointer(args[3]),
        .lse = read_pointer<float>(args[4]),
        .q_strides = read_strides(args[8]),
        .k_strides = read_strides(args[9]),
        .v_strides = read_strides(args[10]),
        .o_strides = read_strides(args[11]),
        .batch = read_size(q_shape, 0),
        .n_heads = read_size(q_shape, 2),
        .n_heads_kv = read_size(k_shape, 2),
        .seq_len_q = read_size(q_shape, 1),
        .seq_len_k = read_size(k_shape, 1),
        .d_head = d_head,
        .d_head_v = kernel.d_head_v,
        .softmax_scale = to_float(args[12]),
        .window_left = kUnbounded,
        .window_right = kUnbounded,
    };
    const bool holds_queries = problem.batch > 0 && problem.n_heads > 0 && problem.seq_len_q > 0;
    const bool holds_keys = read_size(k_shape, 0) > 0 && problem.n_heads_kv > 0 && problem.seq_len_k > 0;
    if (n_args > kLaunchArity) read_features(args[13], problem);
    if (problem.block_table != nullptr) problem.n_pages = read_size(k_shape, 0);
    if (!fits(problem.d_head, kernel.d_head, kernel) || !fits(problem.d_head_v, kernel.d_head_v, kernel)) {
        raise_error(PyExc_ValueError, "launch: head sizes %d and %d; the kernel is compiled for %d and %d",
                    problem.d_head, problem.d_head_v, kernel.d_head, kernel.d_head_v);
    }
    check_address("q", problem.q, holds_queries);
    check_address("k", problem.k, holds_keys);
    check_address("v", problem.v, holds_keys);
    check_address("o", problem.o, holds_queries);
    check_mod(kernel, n_args > kLaunchArity + 1);
    Launch launch{problem, to_pointer(args[5]), {}};
    if (kernel.mod.digest != 0) launch.captured = CapturedValues(kernel.mod, args[14]);
    return launch;
}

}  // namespace flash::binding

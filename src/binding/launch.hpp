// The arguments of one launch from Python: raw pointers, sizes and strides into a ForwardProblem.
#pragma once

#include <climits>
#include <cstdint>

#include "binding/python.hpp"
#include "binding/registry.hpp"
#include "flash_attention.cuh"

namespace flash::binding {

inline constexpr const char *kLaunchArguments =
    "launch(q, k, v, o, lse, stream, q_shape, k_shape, q_stride, k_stride, v_stride, o_stride, "
    "softmax_scale[, features])";
inline constexpr Py_ssize_t kLaunchArity = 13;
// What plain attention does not need, in one tuple: flash_attention.backends.cuda.Features.
inline constexpr const char *kFeatures =
    "(d_head_v, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, "
    "total_q, total_k, n_splits, partial_o, partial_lse, block_table, max_pages, page_size)";
inline constexpr Py_ssize_t kFeatureCount = 16;
inline constexpr int kUnbounded = (1 << 30) - 1;

// No system maps memory below: what lies there is the offset of a view whose storage has no memory.
inline constexpr uintptr_t kLowestAddress = 1 << 16;

// ---------------------------------------------------------------- single arguments
inline bool is_tuple_of(Py_ssize_t size, PyObject *value) {
    const Py_ssize_t given = PyTuple_Size(value);
    if (given < 0) PyErr_Clear();  // no tuple at all
    return given == size;
}

inline int read_size(PyObject *shape, int axis) {
    const int64_t size = to_int64(PyTuple_GetItem(shape, axis));
    if (size < 0 || size > INT_MAX) {
        raise_error(PyExc_ValueError, "launch: size %lld of axis %d; allowed: 0 to 2^31 - 1",
                    static_cast<long long>(size), axis);
    }
    return static_cast<int>(size);
}

inline TensorStrides read_strides(PyObject *stride) {
    const auto read = [&](int axis) { return to_int64(PyTuple_GetItem(stride, axis)); };
    return {.batch = read(0), .seq = read(1), .head = read(2)};
}

inline int read_int(const char *name, PyObject *value) {
    const int64_t number = to_int64(value);
    if (number < INT_MIN || number > INT_MAX) {
        raise_error(PyExc_ValueError, "launch: %s is %lld; allowed: 32 bits, -2^31 to 2^31 - 1", name,
                    static_cast<long long>(number));
    }
    return static_cast<int>(number);
}

template <typename T>
T *read_pointer(PyObject *value) {
    return static_cast<T *>(to_pointer(value));
}

// ---------------------------------------------------------------- all of them
inline void read_features(PyObject *features, ForwardProblem &problem) {
    if (!is_tuple_of(kFeatureCount, features)) {
        raise_error(PyExc_TypeError, "launch: features must be the tuple %s", kFeatures);
    }
    int next = 0;
    const auto item = [&] { return PyTuple_GetItem(features, next++); };
    problem.d_head_v = read_int("d_head_v", item());
    problem.window_left = read_int("window_left", item());
    problem.window_right = read_int("window_right", item());
    problem.softcap = to_float(item());
    problem.sinks = read_pointer<const float>(item());
    problem.cu_seqlens_q = read_pointer<const int>(item());
    problem.cu_seqlens_k = read_pointer<const int>(item());
    problem.seqused_k = read_pointer<const int>(item());
    problem.total_q = to_int64(item());
    problem.total_k = to_int64(item());
    problem.n_splits = read_int("n_splits", item());
    problem.partial_o = read_pointer<float>(item());
    problem.partial_lse = read_pointer<float>(item());
    problem.block_table = read_pointer<const int>(item());
    const int64_t max_pages = to_int64(item());
    const int64_t page_size = to_int64(item());
    if (problem.block_table == nullptr) return;
    if (page_size < 1 || max_pages < 1 || max_pages > INT_MAX / page_size) {
        raise_error(PyExc_ValueError, "launch: %lld pages of %lld keys; allowed: 1 to 2^31 - 1 keys in all",
                    static_cast<long long>(max_pages), static_cast<long long>(page_size));
    }
    problem.max_pages = static_cast<int>(max_pages);
    problem.page_size = static_cast<int>(page_size);
    problem.seq_len_k = problem.max_pages * problem.page_size;
}

// Whether tensors with heads of `given` elements fit a kernel compiled for `compiled`.
inline bool fits(int given, int compiled, const Kernel &kernel) {
    return given == compiled || (kernel.padded_head && given > 0 && given < compiled);
}

// A tensor that holds elements has memory.
inline void check_address(const char *name, const void *address, bool holds_elements) {
    if (!holds_elements || reinterpret_cast<uintptr_t>(address) >= kLowestAddress) return;
    raise_error(PyExc_ValueError,
                "launch: %s holds elements and is at address %p, where no memory is; allowed: tensors with "
                "memory of their own. Its storage may have been resized to 0, or it may be a wrapper",
                name, address);
}

struct Launch {
    ForwardProblem problem;
    void *stream;
};

// The arguments of `launch`. Throws PythonError at the first one that is not as it should be.
inline Launch read_launch(const Kernel &kernel, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != kLaunchArity && n_args != kLaunchArity + 1) {
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
    return {problem, to_pointer(args[5])};
}

}  // namespace flash::binding

// One launch from Python: raw pointers, sizes and strides into a ForwardProblem, and the call of the kernel.
#pragma once

#include <pybind11/pybind11.h>

#include <climits>
#include <string>

#include "binding/registry.hpp"
#include "flash_attention.cuh"

namespace flash::binding {

inline PyObject *cuda_error_type = nullptr;  // flash_attention_kernels.CudaError, set when the module is made

// Sets CudaError(text, code).
inline void set_cuda_error(const Kernel &kernel, const char *what, int error) {
    const std::string text =
        std::string(what) + ": " + kernel.error_string(error) + " (cudaError " + std::to_string(error) + ")";
    PyErr_SetObject(cuda_error_type, py::make_tuple(text, error).ptr());
}

// ---------------------------------------------------------------- arguments
// Called for every forward that is not remembered, so it skips pybind11's dispatch: a vector call on a
// function bound to the kernel, with shapes and strides as the tuples that torch hands out.
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
inline constexpr const char *kKernelCapsule = "flash_attention_kernels.Kernel";

inline void *read_pointer(PyObject *value) { return PyLong_AsVoidPtr(value); }

inline bool is_tuple_of_4(PyObject *value) { return PyTuple_Check(value) && PyTuple_GET_SIZE(value) == 4; }

inline int read_size(PyObject *shape, int axis) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, axis));
    if (size < 0 || size > INT_MAX) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError, "launch: size %lld of axis %d; allowed: 0 to 2^31 - 1", size,
                         axis);
        }
        return 0;
    }
    return static_cast<int>(size);
}

inline TensorStrides read_strides(PyObject *stride) {
    const auto read = [&](int axis) { return PyLong_AsLongLong(PyTuple_GET_ITEM(stride, axis)); };
    return {.batch = read(0), .seq = read(1), .head = read(2)};
}

// The features tuple into the problem; false with a Python error where it is no such tuple.
inline bool read_features(PyObject *features, ForwardProblem &problem) {
    if (!PyTuple_Check(features) || PyTuple_GET_SIZE(features) != kFeatureCount) {
        PyErr_Format(PyExc_TypeError, "launch: features must be the tuple %s", kFeatures);
        return false;
    }
    int next = 0;
    const auto item = [&] { return PyTuple_GET_ITEM(features, next++); };
    problem.d_head_v = static_cast<int>(PyLong_AsLong(item()));
    problem.window_left = static_cast<int>(PyLong_AsLong(item()));
    problem.window_right = static_cast<int>(PyLong_AsLong(item()));
    problem.softcap = static_cast<float>(PyFloat_AsDouble(item()));
    problem.sinks = static_cast<const float *>(read_pointer(item()));
    problem.cu_seqlens_q = static_cast<const int *>(read_pointer(item()));
    problem.cu_seqlens_k = static_cast<const int *>(read_pointer(item()));
    problem.seqused_k = static_cast<const int *>(read_pointer(item()));
    problem.total_q = PyLong_AsLongLong(item());
    problem.total_k = PyLong_AsLongLong(item());
    problem.n_splits = static_cast<int>(PyLong_AsLong(item()));
    problem.partial_o = static_cast<float *>(read_pointer(item()));
    problem.partial_lse = static_cast<float *>(read_pointer(item()));
    problem.block_table = static_cast<const int *>(read_pointer(item()));
    const long long max_pages = PyLong_AsLongLong(item());
    const long long page_size = PyLong_AsLongLong(item());
    if (PyErr_Occurred()) return false;
    if (problem.block_table == nullptr) return true;
    if (page_size < 1 || max_pages < 1 || max_pages > INT_MAX / page_size) {
        PyErr_Format(PyExc_ValueError, "launch: %lld pages of %lld keys; allowed: 1 to 2^31 - 1 keys in all",
                     max_pages, page_size);
        return false;
    }
    problem.max_pages = static_cast<int>(max_pages);
    problem.page_size = static_cast<int>(page_size);
    problem.seq_len_k = problem.max_pages * problem.page_size;
    return true;
}

// Whether tensors with heads of `given` elements fit a kernel compiled for `compiled`.
inline bool fits(int given, int compiled, const Kernel &kernel) {
    return given == compiled || (kernel.padded_head && given > 0 && given < compiled);
}

// The arguments of `launch` into problem and stream; false with a Python error where they are others.
inline bool read_launch(const Kernel &kernel, PyObject *const *args, Py_ssize_t n_args,
                        ForwardProblem &problem, void *&stream) {
    if (n_args != kLaunchArity && n_args != kLaunchArity + 1) {
        PyErr_Format(PyExc_TypeError, "launch: given %zd arguments; wanted %s", n_args, kLaunchArguments);
        return false;
    }
    for (int i = 6; i < 12; ++i) {
        if (!is_tuple_of_4(args[i])) {
            PyErr_Format(PyExc_TypeError, "launch: argument %d is no tuple of 4 integers; wanted %s", i + 1,
                         kLaunchArguments);
            return false;
        }
    }
    PyObject *const q_shape = args[6], *const k_shape = args[7];
    const int d_head = read_size(q_shape, 3);
    problem = ForwardProblem{
        .q = read_pointer(args[0]),
        .k = read_pointer(args[1]),
        .v = read_pointer(args[2]),
        .o = read_pointer(args[3]),
        .lse = static_cast<float *>(read_pointer(args[4])),
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
        .softmax_scale = static_cast<float>(PyFloat_AsDouble(args[12])),
        .window_left = kUnbounded,
        .window_right = kUnbounded,
    };
    if (n_args > kLaunchArity && !read_features(args[13], problem)) return false;
    if (problem.block_table != nullptr) problem.n_pages = read_size(k_shape, 0);
    stream = read_pointer(args[5]);
    if (PyErr_Occurred()) return false;
    if (!fits(problem.d_head, kernel.d_head, kernel) || !fits(problem.d_head_v, kernel.d_head_v, kernel)) {
        PyErr_Format(PyExc_ValueError, "launch: head sizes %d and %d; the kernel is compiled for %d and %d",
                     problem.d_head, problem.d_head_v, kernel.d_head, kernel.d_head_v);
        return false;
    }
    return true;
}

// ---------------------------------------------------------------- launch
inline PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    const auto *const kernel = static_cast<const Kernel *>(PyCapsule_GetPointer(self, kKernelCapsule));
    ForwardProblem problem;
    void *stream = nullptr;
    if (!read_launch(*kernel, args, n_args, problem, stream)) return nullptr;
    if (const int error = kernel->launch(problem, stream); error != 0) {
        set_cuda_error(*kernel, "launch", error);
        return nullptr;
    }
    Py_RETURN_NONE;
}

inline PyMethodDef launch_method = {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(launch)),
                                    METH_FASTCALL, kLaunchArguments};

inline py::object bind_launch(const Kernel &kernel) {
    const py::capsule self(&kernel, kKernelCapsule);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&launch_method, self.ptr()));
}

}  // namespace flash::binding

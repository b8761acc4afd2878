// Single values that launches are given by Python: sizes, strides, numbers and addresses.
#pragma once

#include <climits>
#include <cstdint>

#include "binding/python.hpp"
#include "flash_attention.cuh"

namespace flash::binding {

// No system maps memory below: what lies there is the offset of a view whose storage has no memory.
inline constexpr uintptr_t kLowestAddress = 1 << 16;

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

// A tensor that holds elements has memory.
inline void check_address(const char *name, const void *address, bool holds_elements) {
    if (!holds_elements || reinterpret_cast<uintptr_t>(address) >= kLowestAddress) return;
    raise_error(PyExc_ValueError,
                "launch: %s holds elements and is at address %p, where no memory is; allowed: tensors with "
                "memory of their own. Its storage may have been resized to 0, or it may be a wrapper",
                name, address);
}

}  // namespace flash::binding

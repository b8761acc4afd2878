// What a mod's functions captured, from Python: the tuple flash_helpers.kernels.arguments.ModArguments.
#pragma once

#include <cstdint>
#include <vector>

#include "binding/launch_values.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"
#include "mod_arguments.cuh"

namespace flash::binding {

// Owns what a ModArguments points to.
class CapturedValues {
  public:
    CapturedValues() = default;

    // `given`: (numbers, tensors, tiles), a tensor being (address, strides, sizes), tiles None or (address,
    // strides of a batch item, a head and a row). Throws PythonError where they are not as many as the kernel
    // reads.
    CapturedValues(const ModSignature &wanted, PyObject *given) {
        if (!is_tuple_of(3, given) || !is_tuple_of(wanted.n_numbers, PyTuple_GetItem(given, 0)) ||
            !is_tuple_of(wanted.n_tensors, PyTuple_GetItem(given, 1))) {
            raise_error(PyExc_TypeError,
                        "launch: mod is %R; the kernel's mod captures %d numbers and %d tensors, so it must "
                        "be a ModArguments of as many",
                        given, wanted.n_numbers, wanted.n_tensors);
        }
        for (int i = 0; i < wanted.n_numbers; ++i) {
            numbers_.push_back(read_number(PyTuple_GetItem(PyTuple_GetItem(given, 0), i)));
        }
        for (int i = 0; i < wanted.n_tensors; ++i) {
            tensors_.push_back(read_tensor(PyTuple_GetItem(PyTuple_GetItem(given, 1), i)));
        }
        read_tiles(PyTuple_GetItem(given, 2));
    }

    ModArguments arguments() const { return {numbers_.data(), tensors_.data(), tiles_}; }
    const std::vector<CapturedTensor> &tensors() const { return tensors_; }

    const void *tiles() const { return tiles_.words; }
    void move_tiles(const void *words) { tiles_.words = static_cast<const uint32_t *>(words); }

    // The same with the tensors at other addresses, which is as long as they are many.
    template <typename Addresses>
    void move_tensors(const Addresses &addresses) {
        for (std::size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = addresses[i];
    }

  private:
    static CapturedNumber read_number(PyObject *value) {
        CapturedNumber number{};
        if (PyFloat_CheckExact(value)) {
            number.real = PyFloat_AsDouble(value);
        } else if (PyLong_CheckExact(value)) {
            number.whole = to_int64(value);
        } else {
            raise_error(PyExc_TypeError, "launch: a captured number is %R; wanted an int or a float", value);
        }
        return number;
    }

    static CapturedTensor read_tensor(PyObject *value) {
        if (!is_tuple_of(3, value)) {
            raise_error(PyExc_TypeError, "launch: a captured tensor is %R; wanted (address, strides, sizes)",
                        value);
        }
        CapturedTensor tensor{};
        PyObject *const strides = PyTuple_GetItem(value, 1), *const sizes = PyTuple_GetItem(value, 2);
        const Py_ssize_t n_dims = PyTuple_Size(sizes);
        if (n_dims < 0) throw PythonError{};
        if (n_dims > kMaxCapturedDims || !is_tuple_of(n_dims, strides)) {
            raise_error(PyExc_ValueError,
                        "launch: a captured tensor has sizes %R and strides %R; allowed: at most %d of each, "
                        "as many",
                        sizes, strides, kMaxCapturedDims);
        }
        bool holds_elements = true;
        for (Py_ssize_t axis = 0; axis < n_dims; ++axis) {
            tensor.sizes[axis] = read_size(sizes, axis);
            tensor.strides[axis] = to_int64(PyTuple_GetItem(strides, axis));
            holds_elements = holds_elements && tensor.sizes[axis] > 0;
        }
        tensor.data = to_pointer(PyTuple_GetItem(value, 0));
        check_address("a captured tensor", tensor.data, holds_elements);
        return tensor;
    }

    void read_tiles(PyObject *value) {
        if (value == Py_None) return;
        if (!is_tuple_of(4, value)) {
            raise_error(PyExc_TypeError, "launch: tiles are %R; wanted None or (address, three strides)",
                        value);
        }
        tiles_.words = read_pointer<const uint32_t>(PyTuple_GetItem(value, 0));
        tiles_.batch_stride = to_int64(PyTuple_GetItem(value, 1));
        tiles_.head_stride = to_int64(PyTuple_GetItem(value, 2));
        tiles_.row_stride = to_int64(PyTuple_GetItem(value, 3));
        check_address("tiles", tiles_.words, true);
    }

    ModTiles tiles_{};
    std::vector<CapturedNumber> numbers_;
    std::vector<CapturedTensor> tensors_;
};

// Whether a launch says what the kernel's mod captured, where it has one, and nothing where it has none.
inline void check_mod(const Kernel &kernel, bool is_given) {
    if ((kernel.mod.digest != 0) == is_given) return;
    raise_error(PyExc_TypeError, is_given ? "launch: mod is given; the kernel is compiled without one"
                                          : "launch: mod is missing; the kernel is compiled with one");
}

}  // namespace flash::binding

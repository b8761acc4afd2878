// What the binding knows of a caller's tensors: address, type, device, sizes and strides.
//
// Read through DLPack's C exchange API (version 1.3) where the library of the tensors has it: a table of C
// functions, the same for every library and every version of it. Else through the tensors' Python attributes,
// which takes several times as long.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <cstdlib>

#include "binding/python.hpp"

namespace flash::binding {

// ---------------------------------------------------------------- DLPack's binary interface
namespace dlpack {

struct Device {
    int32_t type, index;
};
struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct Tensor {
    void *data;
    Device device;
    int32_t rank;
    DataType dtype;
    int64_t *shape, *strides;  // strides in elements; nullptr: contiguous
    uint64_t byte_offset;
};
struct ExchangeHeader {
    uint32_t major, minor;
    ExchangeHeader *older;
};
struct ExchangeApi {
    ExchangeHeader header;
    void *managed_tensor_allocator, *managed_tensor_from_object, *managed_tensor_to_object;
    int (*tensor_from_object)(void *object, Tensor *out);  // a view that lives as long as the object
    int (*current_work_stream)(int32_t device_type, int32_t device_index, void **out);
};

inline constexpr int32_t kCuda = 2;  // a device type
inline constexpr const char *kCapsule = "dlpack_exchange_api";
inline constexpr uint32_t kMajor = 1;

}  // namespace dlpack

// ---------------------------------------------------------------- tensors
inline constexpr int kMaxRank = 4;

// Below these lies no tensor. A view into storage that was resized away has its offset for an address, which
// looks like memory; GPUs map none in the first 4 GiB, hosts none in the first 64 KiB.
inline constexpr uintptr_t kLowestOnGpu = uintptr_t(1) << 32, kLowestOnHost = uintptr_t(1) << 16;

struct TensorFacts {
    char *data;
    uint64_t dtype;   // equal for equal element types
    uint64_t device;  // equal for equal devices
    int rank, element_bytes;
    bool on_gpu;
    std::array<int64_t, kMaxRank> shape, strides;  // strides in elements

    bool has_memory() const {
        return reinterpret_cast<uintptr_t>(data) >= (on_gpu ? kLowestOnGpu : kLowestOnHost);
    }

    // From the first byte to behind the last one. Only meaningful without negative strides, which torch
    // lacks.
    int64_t span_bytes() const {
        int64_t last = 0;
        for (int i = 0; i < rank; ++i) {
            if (shape[i] == 0) return 0;
            last += (shape[i] - 1) * strides[i];
        }
        return (last + 1) * element_bytes;
    }
};

// Reads tensors of exactly one Python type, and asks their library for what else a launch must know.
class TensorReader {
  public:
    // exchange_api: the type's capsule, or None. is_grad_enabled(), exchange_device(index) -> index before,
    // current_stream(index): Python functions. False with a Python error where the capsule is of another
    // kind.
    bool open(PyObject *tensor_type, PyObject *exchange_api, PyObject *is_grad_enabled,
              PyObject *exchange_device, PyObject *current_stream) {
        const dlpack::ExchangeApi *api = nullptr;
        if (exchange_api != Py_None) {
            api = static_cast<const dlpack::ExchangeApi *>(
                PyCapsule_GetPointer(exchange_api, dlpack::kCapsule));
            if (api == nullptr) return false;
            if (api->header.major != dlpack::kMajor || api->tensor_from_object == nullptr) api = nullptr;
        }
        api_ = api;
        tensor_type_ = share(tensor_type);
        is_grad_enabled_ = share(is_grad_enabled);
        exchange_device_ = share(exchange_device);
        current_stream_ = share(current_stream);
        return true;
    }

    // False, without a Python error, for what is no strided tensor of at most 4 dimensions, has no
    // memory, or wants a gradient: such calls take the long way, whose checks say what is wrong.
    bool read(PyObject *object, TensorFacts &facts) const {
        if (reinterpret_cast<PyObject *>(Py_TYPE(object)) != tensor_type_.get()) return false;
        const bool is_read =
            api_ != nullptr ? read_by_exchange(object, facts) : read_by_attributes(object, facts);
        if (!is_read || !facts.has_memory() || wants_gradient(object)) {
            PyErr_Clear();
            return false;
        }
        return true;
    }

    // Whether what lies in a tensor's memory is the negative of its values, as of the imaginary part of a
    // conjugate view; true also where the question fails. Only tensors of real numbers ever are.
    bool is_negated(PyObject *object) const {
        static PyObject *const kIsNeg = PyUnicode_InternFromString("is_neg");
        const Reference negated(PyObject_CallMethodNoArgs(object, kIsNeg));
        if (!negated) PyErr_Clear();
        return negated.get() != Py_False;
    }

    // The address of a tensor that this library has made itself; nullptr with a Python error.
    char *address_of(PyObject *object) const {
        TensorFacts facts;
        const bool found =
            api_ != nullptr ? read_by_exchange(object, facts) : read_by_attributes(object, facts);
        return found ? facts.data : nullptr;
    }

    // Makes a CUDA device the current one; gives the index of the one before, or -1 with a Python error.
    long exchange_device(long device) const {
        const Reference index(PyLong_FromLong(device));
        const Reference before(index ? PyObject_CallOneArg(exchange_device_.get(), index.get()) : nullptr);
        return before ? PyLong_AsLong(before.get()) : -1;
    }

    // The current CUDA stream of a device. False with a Python error.
    bool current_stream(long device, void *&stream) const {
        if (api_ != nullptr && device >= 0) {
            return api_->current_work_stream(dlpack::kCuda, static_cast<int32_t>(device), &stream) == 0;
        }
        const Reference index(PyLong_FromLong(device));
        const Reference handle(index ? PyObject_CallOneArg(current_stream_.get(), index.get()) : nullptr);
        stream = handle ? PyLong_AsVoidPtr(handle.get()) : nullptr;
        return !PyErr_Occurred();
    }

  private:
    bool read_by_exchange(PyObject *object, TensorFacts &facts) const {
        dlpack::Tensor tensor;
        if (api_->tensor_from_object(object, &tensor) != 0) return false;
        if (tensor.rank > kMaxRank || tensor.strides == nullptr) return false;
        facts.data = static_cast<char *>(tensor.data) + tensor.byte_offset;
        facts.dtype =
            uint64_t(tensor.dtype.code) << 32 | uint64_t(tensor.dtype.bits) << 16 | tensor.dtype.lanes;
        facts.device = uint64_t(static_cast<uint32_t>(tensor.device.type)) << 32 |
                       static_cast<uint32_t>(tensor.device.index);
        facts.on_gpu = tensor.device.type == dlpack::kCuda;
        facts.rank = tensor.rank;
        facts.element_bytes = tensor.dtype.bits * tensor.dtype.lanes / 8;
        for (int i = 0; i < tensor.rank; ++i) {
            facts.shape[i] = tensor.shape[i];
            facts.strides[i] = tensor.strides[i];
        }
        return true;
    }

    bool read_by_attributes(PyObject *object, TensorFacts &facts) const {
        static PyObject *const kData = PyUnicode_InternFromString("data_ptr");
        static PyObject *const kDevice = PyUnicode_InternFromString("get_device");
        static PyObject *const kIsCuda = PyUnicode_InternFromString("is_cuda");
        static PyObject *const kDtype = PyUnicode_InternFromString("dtype");
        static PyObject *const kBytes = PyUnicode_InternFromString("itemsize");
        static PyObject *const kShape = PyUnicode_InternFromString("shape");
        static PyObject *const kStride = PyUnicode_InternFromString("stride");
        const Reference data(PyObject_CallMethodNoArgs(object, kData));
        const Reference device(data ? PyObject_CallMethodNoArgs(object, kDevice) : nullptr);
        const Reference is_cuda(device ? PyObject_GetAttr(object, kIsCuda) : nullptr);
        const Reference dtype(is_cuda ? PyObject_GetAttr(object, kDtype) : nullptr);
        const Reference bytes(dtype ? PyObject_GetAttr(dtype.get(), kBytes) : nullptr);
        const Reference shape(bytes ? PyObject_GetAttr(object, kShape) : nullptr);
        const Reference strides(shape ? PyObject_CallMethodNoArgs(object, kStride) : nullptr);
        if (!strides || !PyTuple_Check(shape.get()) || !PyTuple_Check(strides.get())) return false;
        const Py_ssize_t rank = PyTuple_GET_SIZE(shape.get());
        if (rank > kMaxRank || PyTuple_GET_SIZE(strides.get()) != rank) return false;
        facts.data = static_cast<char *>(PyLong_AsVoidPtr(data.get()));
        facts.dtype = reinterpret_cast<uintptr_t>(dtype.get());  // one object for each type
        facts.device =
            uint64_t(is_cuda.get() == Py_True) << 32 | static_cast<uint32_t>(PyLong_AsLong(device.get()));
        facts.on_gpu = is_cuda.get() == Py_True;
        facts.rank = static_cast<int>(rank);
        facts.element_bytes = static_cast<int>(PyLong_AsLong(bytes.get()));
        for (Py_ssize_t i = 0; i < rank; ++i) {
            facts.shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.get(), i));
            facts.strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.get(), i));
        }
        return !PyErr_Occurred();
    }

    // True also where the question fails.
    bool wants_gradient(PyObject *object) const {
        static PyObject *const kRequiresGrad = PyUnicode_InternFromString("requires_grad");
        const Reference required(PyObject_GetAttr(object, kRequiresGrad));
        if (required.get() == Py_False) return false;
        const Reference enabled(required ? PyObject_CallNoArgs(is_grad_enabled_.get()) : nullptr);
        return enabled.get() != Py_False;
    }

    const dlpack::ExchangeApi *api_ = nullptr;
    Reference tensor_type_, is_grad_enabled_, exchange_device_, current_stream_;
};

// Keeps a CUDA device the current one.
class CurrentDevice {
  public:
    CurrentDevice(const TensorReader &reader, long device)
        : reader_(reader), device_(device), before_(reader.exchange_device(device)) {}
    CurrentDevice(const CurrentDevice &) = delete;
    CurrentDevice &operator=(const CurrentDevice &) = delete;
    ~CurrentDevice() {
        if (before_ == device_ || before_ < 0) return;
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);  // an error on its way stays as it is
        reader_.exchange_device(before_);
        PyErr_Restore(type, value, traceback);
    }

  private:
    const TensorReader &reader_;
    long device_, before_;
};

// The reader of this process, opened by the CUDA backend. Never destroyed: Python may be gone by then.
inline TensorReader &tensor_reader() {
    static auto &reader = *new TensorReader;
    return reader;
}

}  // namespace flash::binding

// What the binding knows of a caller's tensors: address, type, device, sizes and strides.
//
// Read through DLPack's C exchange API (version 1.3) where the library of the tensors has it: a table of C
// functions, the same for every library and every version of it. Else through the tensors' Python attributes,
// which takes several times as long.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "binding/dlpack.hpp"
#include "binding/launch.hpp"
#include "binding/python.hpp"

namespace flash::binding {

inline constexpr int kMaxRank = 5;  // a captured tensor may have

// Tensors of a GPU lie above what 32 bits reach: what lies below is the offset of a view whose storage has no
// memory.
inline constexpr uintptr_t kLowestCudaAddress = uintptr_t(1) << 32;

struct TensorFacts {
    char *data;
    uint64_t dtype;   // equal for equal element types
    uint64_t device;  // equal for equal devices
    bool on_cuda;
    bool is_whole;  // known to hold whole numbers, or truth values
    int rank, element_bytes;
    std::array<int64_t, kMaxRank> shape, strides;  // strides in elements

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

    // Whether memory may be where the tensor says. A storage that was resized to 0 has none.
    bool has_memory() const {
        return reinterpret_cast<uintptr_t>(data) >= (on_cuda ? kLowestCudaAddress : kLowestAddress);
    }
};

// What a library of tensors is asked by: its types, and functions of Python's.
struct TensorLibrary {
    PyObject *type;            // of its tensors
    PyObject *parameter_type;  // a type made of that one, whose objects are such tensors, too
    PyObject *exchange_api;    // the type's capsule, or None
    PyObject *is_grad_enabled, *exchange_device, *current_stream, *is_capturing;
    PyObject *function_modes, *unheard;
};

// Reads tensors of exactly one Python type, or of one made of it, and asks their library for what else a
// launch must know.
class TensorReader {
  public:
    // Throws PythonError where the capsule is of another kind.
    void open(const TensorLibrary &library) {
        const dlpack::ExchangeApi *api = nullptr;
        if (library.exchange_api != Py_None) {
            api = static_cast<const dlpack::ExchangeApi *>(
                PyCapsule_GetPointer(library.exchange_api, dlpack::kCapsule));
            if (api == nullptr) throw PythonError{};
            if (api->header.major != dlpack::kMajor || api->tensor_from_object == nullptr) api = nullptr;
        }
        asked_ = std::make_unique<Asked>(library.type);
        api_ = api;
        tensor_type_ = share(library.type);
        parameter_type_ = share(library.parameter_type);
        is_grad_enabled_ = share(library.is_grad_enabled);
        exchange_device_ = share(library.exchange_device);
        current_stream_ = share(library.current_stream);
        is_capturing_ = share(library.is_capturing);
        function_modes_ = share(library.function_modes);
        unheard_ = share(library.unheard);
    }

    // False, without a Python error, for what is no strided tensor of at most 5 dimensions, is empty, has no
    // memory, or wants a gradient: such calls take the long way, whose checks say what is wrong.
    bool read(PyObject *object, TensorFacts &facts) const {
        return is_of(tensor_type_, object) && read_own(object, facts);
    }

    // The same of a tensor that a function captured, which may be a parameter of a model.
    bool read_captured(PyObject *object, TensorFacts &facts) const {
        return (is_of(tensor_type_, object) || is_of(parameter_type_, object)) && read_own(object, facts);
    }

    // Whether what lies in a tensor's memory is the negative of its values, as of the imaginary part of a
    // conjugate view; true also where the question fails. Only tensors of real numbers ever are, whole ones
    // never.
    bool is_negated(PyObject *object) const {
        const Reference negated = asked_->is_neg.of(object);
        if (negated == nullptr) PyErr_Clear();
        return negated.get() != Py_False;
    }

    // How often a tensor's memory has been written to. False, without a Python error, where it is not
    // counted.
    bool read_version(PyObject *object, uint64_t &version) const {
        const Reference counted = asked_->version.of(object);
        if (counted == nullptr) {
            PyErr_Clear();
            return false;
        }
        version = static_cast<uint64_t>(to_int64(counted.get()));
        return true;
    }

    // Whether the current stream's work is recorded into a graph, to be run later.
    bool is_capturing() const { return checked(PyObject_CallNoArgs(is_capturing_.get())).get() != Py_False; }

    // How many functions of the user's are told of whatever a tensor is asked.
    int64_t function_modes() const {
        return to_int64(checked(PyObject_CallNoArgs(function_modes_.get())).get());
    }

    // A new context manager in which they are not.
    Reference unheard() const { return checked(PyObject_CallNoArgs(unheard_.get())); }

    // The address of a tensor that this library has made itself.
    char *address_of(PyObject *object) const;

    // Makes a CUDA device the current one; gives the index of the one before.
    long exchange_device(long device) const {
        const Reference before = call_with(exchange_device_.get(), make_number(device));
        return static_cast<long>(to_int64(before.get()));
    }

    // The current CUDA stream of a device.
    void *current_stream(long device) const {
        if (api_ == nullptr || api_->current_work_stream == nullptr || device < 0) {
            return to_pointer(call_with(current_stream_.get(), make_number(device)).get());
        }
        void *stream = nullptr;
        if (api_->current_work_stream(dlpack::kCuda, static_cast<int32_t>(device), &stream) != 0) {
            if (PyErr_Occurred()) throw PythonError{};
            raise_error(PyExc_RuntimeError, "the current stream of CUDA device %ld cannot be asked for",
                        device);
        }
        return stream;
    }

  private:
    // An attribute of a type's objects, found once: asking for it by name looks it up each time.
    class Attribute {
      public:
        Attribute(PyObject *type, const char *name)
            : descriptor_(checked(PyObject_GetAttrString(type, name))),
              get_(reinterpret_cast<descrgetfunc>(
                  PyType_GetSlot(Py_TYPE(descriptor_.get()), Py_tp_descr_get))) {
            if (get_ == nullptr)
                raise_error(PyExc_TypeError, "read_tensors: %R.%s is no property", type, name);
        }

        // nullptr with a Python error.
        Reference of(PyObject *object) const {
            PyObject *const type = reinterpret_cast<PyObject *>(Py_TYPE(object));
            return Reference(get_(descriptor_.get(), object, type));
        }

      private:
        Reference descriptor_;
        descrgetfunc get_;
    };

    // A method of a type's objects without arguments, found once.
    class Method {
      public:
        Method(PyObject *type, const char *name) : function_(checked(PyObject_GetAttrString(type, name))) {}

        // nullptr with a Python error.
        Reference of(PyObject *object) const {
            return Reference(PyObject_CallFunctionObjArgs(function_.get(), object, nullptr));
        }

      private:
        Reference function_;
    };

    // What tensors are asked for.
    struct Asked {
        explicit Asked(PyObject *type)
            : data_ptr(type, "data_ptr"),
              get_device(type, "get_device"),
              stride(type, "stride"),
              is_neg(type, "is_neg"),
              is_cuda(type, "is_cuda"),
              dtype(type, "dtype"),
              shape(type, "shape"),
              requires_grad(type, "requires_grad"),
              version(type, "_version") {}

        Method data_ptr, get_device, stride, is_neg;
        Attribute is_cuda, dtype, shape, requires_grad, version;
        Reference itemsize = interned("itemsize");
    };

    static bool is_of(const Reference &type, PyObject *object) {
        return reinterpret_cast<PyObject *>(Py_TYPE(object)) == type.get();
    }

    bool read_own(PyObject *object, TensorFacts &facts) const {
        if (!read_facts(object, facts) || !facts.has_memory() || wants_gradient(object)) {
            PyErr_Clear();
            return false;
        }
        return true;
    }

    // False, perhaps with a Python error, where the object is no strided tensor of at most 5 dimensions.
    bool read_facts(PyObject *object, TensorFacts &facts) const {
        if (api_ != nullptr) return read_by_exchange(object, facts);
        try {
            return read_by_attributes(object, facts);
        } catch (const PythonError &) {
            return false;
        }
    }

    bool read_by_exchange(PyObject *object, TensorFacts &facts) const {
        dlpack::Tensor tensor;
        if (api_->tensor_from_object(object, &tensor) != 0) return false;
        if (tensor.rank > kMaxRank || tensor.strides == nullptr) return false;
        facts.data = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset);
        facts.dtype =
            uint64_t(tensor.dtype.code) << 32 | uint64_t(tensor.dtype.bits) << 16 | tensor.dtype.lanes;
        facts.device = uint64_t(static_cast<uint32_t>(tensor.device.type)) << 32 |
                       static_cast<uint32_t>(tensor.device.index);
        facts.on_cuda = tensor.device.type == dlpack::kCuda;
        facts.is_whole = dlpack::is_whole(tensor.dtype);
        facts.rank = tensor.rank;
        facts.element_bytes = tensor.dtype.bits * tensor.dtype.lanes / 8;
        for (int i = 0; i < tensor.rank; ++i) {
            facts.shape[i] = tensor.shape[i];
            facts.strides[i] = tensor.strides[i];
        }
        return true;
    }

    bool read_by_attributes(PyObject *object, TensorFacts &facts) const {
        const auto get = [&](const auto &asked) { return checked(asked.of(object).release()); };
        const Reference dtype = get(asked_->dtype);
        const Reference shape = get(asked_->shape), strides = get(asked_->stride);
        if (!PyTuple_Check(shape.get()) || !PyTuple_Check(strides.get())) return false;
        const Py_ssize_t rank = PyTuple_Size(shape.get());
        if (rank > kMaxRank || PyTuple_Size(strides.get()) != rank) return false;
        facts.data = static_cast<char *>(to_pointer(get(asked_->data_ptr).get()));
        facts.dtype = reinterpret_cast<uintptr_t>(dtype.get());  // one object for each type
        facts.is_whole = false;                                  // nobody knows
        facts.on_cuda = get(asked_->is_cuda).get() == Py_True;
        facts.device =
            uint64_t(facts.on_cuda) << 32 | static_cast<uint32_t>(to_int64(get(asked_->get_device).get()));
        facts.rank = static_cast<int>(rank);
        const Reference bytes = checked(PyObject_GetAttr(dtype.get(), asked_->itemsize.get()));
        facts.element_bytes = static_cast<int>(to_int64(bytes.get()));
        for (Py_ssize_t i = 0; i < rank; ++i) {
            facts.shape[i] = to_int64(PyTuple_GetItem(shape.get(), i));
            facts.strides[i] = to_int64(PyTuple_GetItem(strides.get(), i));
        }
        return true;
    }

    // True also where the question fails.
    bool wants_gradient(PyObject *object) const {
        const Reference required = asked_->requires_grad.of(object);
        if (required.get() == Py_False) return false;
        if (required == nullptr) return true;
        const Reference enabled(PyObject_CallNoArgs(is_grad_enabled_.get()));
        return enabled.get() != Py_False;
    }

    const dlpack::ExchangeApi *api_ = nullptr;
    std::unique_ptr<const Asked> asked_;
    Reference tensor_type_, parameter_type_, is_grad_enabled_, exchange_device_, current_stream_;
    Reference is_capturing_, function_modes_, unheard_;
};

// While it lives, tensors are asked without a word to function modes: torch.set_default_device makes one, and
// a question that it hears takes as long as all else that is done for a call.
class Unheard {
  public:
    explicit Unheard(const TensorReader &reader) {
        if (reader.function_modes() == 0) return;
        context_ = reader.unheard();
        checked(PyObject_CallMethod(context_.get(), "__enter__", nullptr));
    }
    Unheard(const Unheard &) = delete;
    Unheard &operator=(const Unheard &) = delete;
    ~Unheard() {
        if (context_ == nullptr) return;
        const KeptError kept;
        const Reference left(
            PyObject_CallMethod(context_.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
        if (left == nullptr) PyErr_Clear();
    }

  private:
    Reference context_;
};

inline char *TensorReader::address_of(PyObject *object) const {
    std::optional<Unheard> unheard;
    if (api_ == nullptr) unheard.emplace(*this);
    TensorFacts facts;
    if (!read_facts(object, facts)) {
        if (PyErr_Occurred()) throw PythonError{};
        raise_error(PyExc_TypeError,
                    "a call's maker gave %R, which is no strided tensor of at most %d "
                    "dimensions",
                    object, kMaxRank);
    }
    return facts.data;
}

// Keeps a CUDA device the current one.
class CurrentDevice {
  public:
    CurrentDevice(const TensorReader &reader, long device)
        : reader_(reader), device_(device), before_(reader.exchange_device(device)) {}
    CurrentDevice(const CurrentDevice &) = delete;
    CurrentDevice &operator=(const CurrentDevice &) = delete;
    ~CurrentDevice() {
        if (before_ == device_ || before_ < 0) return;
        const KeptError kept;
        try {
            reader_.exchange_device(before_);
        } catch (const PythonError &) {
        }
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

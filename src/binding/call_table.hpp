// Calls that were checked, chosen and launched before, found again by the layouts of their tensors.
//
// All that the checks, the choice of a kernel and the arguments of its launch depend on is the call's
// options, its tensors' types, devices, sizes, strides and alignment, and a few numbers. Python keeps one
// table for each set of options; a table maps the rest to a launch whose pointers alone are new in each call.
// So a call that has been made before runs no check again but those of what may still differ: whether an
// input wants a gradient, whether an output given by the caller overlaps an input, which device is the
// current one.
//
// `table(q, k, v, out, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
// *numbers)`, any of the last ones left
// out, gives the result, or None: not known here, or not as it was. The caller then goes the long way, which
// also says what is wrong, and `remember`s the call.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "binding/launch.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {

// Tensors of a call: those that the caller hands over, in the order of the arguments, then those that are
// only made.
enum Slot {
    kQ,
    kK,
    kV,
    kOut,
    kSinks,
    kCuSeqlensQ,
    kCuSeqlensK,
    kSequsedK,
    kBlockTable,
    kLse,
    kWorkspace,
    kSlots
};
inline constexpr int kGivenSlots = kLse;
inline constexpr std::array kMade{kOut, kLse, kWorkspace};  // by the library, unless the caller gives an out
inline constexpr int kMaxNumbers = 2;

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
    f(problem.seqused_k, kSequsedK);
    f(problem.block_table, kBlockTable);
    f(problem.partial_o, kWorkspace);
    f(problem.partial_lse, kWorkspace);
}
inline constexpr int kPointers = 12;
inline constexpr int64_t kNoPointer = INT64_MIN;

// ---------------------------------------------------------------- layouts
// What is compared of a call: a word for a tensor that is not there, 3 + 2 rank words for one that is.
class CallLayout {
  public:
    void add(uint64_t word) { words_[size_++] = word; }

    void add(const TensorFacts &facts) {
        constexpr uintptr_t kAlignment = 16;  // bytes; kernels copy chunks of this size
        const bool aligned = reinterpret_cast<uintptr_t>(facts.data) % kAlignment == 0;
        add(uint64_t(1) << 32 | uint64_t(aligned) << 16 | uint64_t(facts.rank));
        add(facts.dtype);
        add(facts.device);
        for (int i = 0; i < facts.rank; ++i) {
            add(static_cast<uint64_t>(facts.shape[i]));
            add(static_cast<uint64_t>(facts.strides[i]));
        }
    }

    uint64_t hash() const {
        uint64_t hash = size_;
        for (int i = 0; i < size_; ++i) {
            hash = (hash ^ words_[i]) * 0x9E3779B97F4A7C15ull;
            hash ^= hash >> 32;
        }
        return hash;
    }

    bool operator==(const CallLayout &other) const {
        return size_ == other.size_ &&
               std::equal(words_.begin(), words_.begin() + size_, other.words_.begin());
    }

  private:
    int size_ = 0;
    std::array<uint64_t, kGivenSlots * (3 + 2 * kMaxRank) + kMaxNumbers> words_;
};

// The arguments of a call, as far as they are tensors and numbers.
struct GivenCall {
    CallLayout layout;
    std::array<TensorFacts, kGivenSlots> tensors;
    std::array<bool, kGivenSlots> is_given{};

    // False without a Python error where it is no call that a table may know.
    bool read(PyObject *const *args, Py_ssize_t n_args) {
        if (n_args < kOut || n_args > kGivenSlots + kMaxNumbers) return false;
        for (Py_ssize_t slot = 0; slot < kGivenSlots; ++slot) {
            if (slot >= n_args || args[slot] == Py_None) {
                layout.add(0);
                continue;
            }
            if (!tensor_reader().read(args[slot], tensors[slot])) return false;
            is_given[slot] = true;
            layout.add(tensors[slot]);
        }
        for (Py_ssize_t i = kGivenSlots; i < n_args; ++i) {
            if (!PyLong_CheckExact(args[i])) return false;
            const long long number = PyLong_AsLongLong(args[i]);
            if (PyErr_Occurred()) {
                PyErr_Clear();
                return false;
            }
            layout.add(static_cast<uint64_t>(number));
        }
        return true;
    }

    // Whether an output given by the caller may share memory with an input. Exact for dense tensors; views
    // that interleave count as overlapping.
    bool out_may_overlap() const {
        if (!is_given[kOut]) return false;
        const char *const begin = tensors[kOut].data, *const end = begin + tensors[kOut].span_bytes();
        for (int slot = 0; slot < kGivenSlots; ++slot) {
            if (slot == kOut || !is_given[slot]) continue;
            const char *const other = tensors[slot].data;
            if (begin < other + tensors[slot].span_bytes() && other < end) return true;
        }
        return false;
    }
};

// ---------------------------------------------------------------- what is remembered
struct RememberedLaunch {
    CallLayout layout;
    const Kernel *kernel;
    long device;
    ForwardProblem problem;  // its pointers do not count
    std::array<int64_t, kPointers>
        offsets;                           // bytes of each pointer from its tensor; kNoPointer: there is none
    std::array<Reference, kSlots> makers;  // functions that make tensors which the caller does not give
    Reference label;

    // Takes the pointers of `problem` as offsets from the tensors of their slots. False where one points
    // elsewhere: into a copy that the long way has made, and would have to make again.
    bool take_offsets(const std::array<TensorFacts, kSlots> &tensors, const std::array<bool, kSlots> &there) {
        bool inside = true;
        auto offset = offsets.begin();
        for_each_pointer(problem, [&](auto *pointer, Slot slot) {
            *offset = kNoPointer;
            if (pointer != nullptr) {
                *offset = reinterpret_cast<const char *>(pointer) - tensors[slot].data;
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

class CallTable {
  public:
    // A new reference to the result or to None; nullptr with a Python error.
    PyObject *call(PyObject *const *args, Py_ssize_t n_args) {
        GivenCall given;
        if (!given.read(args, n_args)) Py_RETURN_NONE;
        // Shared: making tensors may run any Python code, which may forget the launch.
        const std::shared_ptr<const RememberedLaunch> found = find(given.layout);
        if (found == nullptr || given.out_may_overlap()) Py_RETURN_NONE;
        const CurrentDevice guard(tensor_reader(), found->device);
        if (PyErr_Occurred()) return nullptr;
        std::array<char *, kSlots> addresses;
        for (int slot = 0; slot < kGivenSlots; ++slot) addresses[slot] = given.tensors[slot].data;
        std::array<Reference, kSlots> made;
        for (const Slot slot : kMade) {
            if (found->makers[slot] == nullptr) continue;
            made[slot].reset(PyObject_CallNoArgs(found->makers[slot].get()));
            if (made[slot] == nullptr) return nullptr;
            addresses[slot] = tensor_reader().address_of(made[slot].get());
            if (addresses[slot] == nullptr) return nullptr;
        }
        void *stream = nullptr;
        if (!tensor_reader().current_stream(found->device, stream)) return nullptr;
        // A failure is repeated, and explained, by the long way.
        if (found->kernel->launch(found->problem_at(addresses), stream) != 0) Py_RETURN_NONE;
        last_label_ = share(found->label.get());
        Reference out = made[kOut] != nullptr ? std::move(made[kOut]) : share(args[kOut]);
        return made[kLse] == nullptr ? out.release() : PyTuple_Pack(2, out.get(), made[kLse].get());
    }

    std::shared_ptr<const RememberedLaunch> find(const CallLayout &layout) const {
        const auto [begin, end] = launches_.equal_range(layout.hash());
        for (auto entry = begin; entry != end; ++entry) {
            if (entry->second->layout == layout) return entry->second;
        }
        return nullptr;
    }

    void remember(std::shared_ptr<const RememberedLaunch> launch) {
        if (find(launch->layout) != nullptr) return;
        if (launches_.size() >= kMaxLaunches) launches_.clear();
        const uint64_t hash = launch->layout.hash();
        launches_.emplace(hash, std::move(launch));
    }

    std::size_t size() const { return launches_.size(); }

    PyObject *last_label() const { return last_label_.get(); }

  private:
    static constexpr std::size_t kMaxLaunches = 256;
    std::unordered_multimap<uint64_t, std::shared_ptr<const RememberedLaunch>> launches_;
    Reference last_label_;
};

// ---------------------------------------------------------------- the Python type
struct CallTableObject {
    PyObject_HEAD vectorcallfunc call;
    CallTable table;
};

inline CallTable &table_of(PyObject *self) { return reinterpret_cast<CallTableObject *>(self)->table; }

inline PyObject *call_table(PyObject *self, PyObject *const *args, std::size_t n_args, PyObject *keywords) {
    if (keywords != nullptr && PyTuple_GET_SIZE(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "a CallTable takes no keywords");
        return nullptr;
    }
    return table_of(self).call(args, PyVectorcall_NARGS(n_args));
}

inline PyObject *new_call_table(PyTypeObject *type, PyObject *, PyObject *) {
    auto *const self = reinterpret_cast<CallTableObject *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->call = &call_table;
    new (&self->table) CallTable;
    return reinterpret_cast<PyObject *>(self);
}

inline void delete_call_table(PyObject *self) {
    PyTypeObject *const type = Py_TYPE(self);
    table_of(self).~CallTable();
    type->tp_free(self);
    Py_DECREF(type);
}

inline constexpr const char *kRemember =
    "remember(given, made, makers, launch, arguments, device, label)\n\n"
    "Files a launch that has just been made; says whether it can be made again from its tensors.\n\n"
    "given: the call's arguments, as the table is called with them.\n"
    "made: (out, lse, workspace), each a tensor that was made for the call, or None.\n"
    "makers: for each of the three a function without arguments that makes it anew, or None.\n"
    "launch: of a Kernel. arguments: what it was given. device: index of the tensors' device.\n"
    "label: what `last` is to give once this launch is made again.";

inline PyObject *remember(PyObject *self, PyObject *args) {
    PyObject *given_args, *made, *makers, *launch_function, *launch_args, *label;
    long device;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!lO:remember", &PyTuple_Type, &given_args, &PyTuple_Type, &made,
                          &PyTuple_Type, &makers, &launch_function, &PyTuple_Type, &launch_args, &device,
                          &label)) {
        return nullptr;
    }
    if (PyTuple_GET_SIZE(made) != static_cast<Py_ssize_t>(kMade.size()) ||
        PyTuple_GET_SIZE(makers) != static_cast<Py_ssize_t>(kMade.size())) {
        PyErr_SetString(PyExc_TypeError, "remember: made and makers are tuples of 3: out, lse, workspace");
        return nullptr;
    }
    auto launch = std::make_shared<RememberedLaunch>();
    if (!PyCFunction_Check(launch_function) ||
        !PyCapsule_IsValid(PyCFunction_GET_SELF(launch_function), kKernelCapsule)) {
        PyErr_SetString(PyExc_TypeError, "remember: launch is not the launch of a Kernel");
        return nullptr;
    }
    launch->kernel = static_cast<const Kernel *>(
        PyCapsule_GetPointer(PyCFunction_GET_SELF(launch_function), kKernelCapsule));
    void *stream = nullptr;
    if (!read_launch(*launch->kernel, PySequence_Fast_ITEMS(launch_args), PyTuple_GET_SIZE(launch_args),
                     launch->problem, stream)) {
        return nullptr;
    }
    GivenCall given;
    if (!given.read(PySequence_Fast_ITEMS(given_args), PyTuple_GET_SIZE(given_args))) Py_RETURN_FALSE;
    std::array<TensorFacts, kSlots> tensors;
    std::array<bool, kSlots> there{};
    std::copy(given.tensors.begin(), given.tensors.end(), tensors.begin());
    std::copy(given.is_given.begin(), given.is_given.end(), there.begin());
    for (std::size_t i = 0; i < kMade.size(); ++i) {
        PyObject *const tensor = PyTuple_GET_ITEM(made, i);
        if (tensor == Py_None) continue;
        if (there[kMade[i]] || !tensor_reader().read(tensor, tensors[kMade[i]])) Py_RETURN_FALSE;
        there[kMade[i]] = true;
        launch->makers[kMade[i]] = share(PyTuple_GET_ITEM(makers, i));
    }
    if (!launch->take_offsets(tensors, there)) Py_RETURN_FALSE;
    launch->layout = given.layout;
    launch->device = device;
    launch->label = share(label);
    table_of(self).remember(std::move(launch));
    Py_RETURN_TRUE;
}

inline PyObject *last_label(PyObject *self, void *) {
    PyObject *const label = table_of(self).last_label();
    return Py_NewRef(label == nullptr ? Py_None : label);
}

inline Py_ssize_t table_size(PyObject *self) { return static_cast<Py_ssize_t>(table_of(self).size()); }

// A new reference to the type flash_attention_kernels.CallTable; nullptr with a Python error.
inline PyObject *make_call_table_type() {
    static PyMethodDef methods[] = {{"remember", remember, METH_VARARGS, kRemember}, {}};
    static PyGetSetDef properties[] = {
        {"last", last_label, nullptr, "Label of the launch that was made again last, or None.", nullptr}, {}};
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, static_cast<Py_ssize_t>(offsetof(CallTableObject, call)),
         READONLY, nullptr},
        {}};
    static char documentation[] = "Launches by the layouts of their tensors; see src/binding/call_table.hpp.";
    static PyType_Slot slots[] = {
        {Py_tp_doc, documentation},
        {Py_tp_new, reinterpret_cast<void *>(&new_call_table)},
        {Py_tp_dealloc, reinterpret_cast<void *>(&delete_call_table)},
        {Py_tp_call, reinterpret_cast<void *>(&PyVectorcall_Call)},
        {Py_sq_length, reinterpret_cast<void *>(&table_size)},
        {Py_tp_methods, methods},
        {Py_tp_getset, properties},
        {Py_tp_members, members},
        {},
    };
    static PyType_Spec spec = {"flash_attention_kernels.CallTable", sizeof(CallTableObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    return PyType_FromSpec(&spec);
}

}  // namespace flash::binding

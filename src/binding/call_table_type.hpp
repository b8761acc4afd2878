// The Python type flash_attention_kernels.CallTable: calling it looks a call up, `remember` files one.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "binding/call_table.hpp"
#include "binding/given_call.hpp"
#include "binding/launch.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"
#include "binding/remembered_launch.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {

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

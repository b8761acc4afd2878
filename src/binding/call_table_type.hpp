// The Python types flash_attention_kernels.CallTable and BackwardCallTable: calling one looks a call up,
// `remember` files one.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "binding/call_table.hpp"
#include "binding/given_call.hpp"
#include "binding/python.hpp"
#include "binding/remember.hpp"
#include "binding/remembered_passes.hpp"

namespace flash::binding {

template <typename Pass>
struct CallTableObject {
    PyObject_HEAD CallTable<Pass> table;
};

template <typename Pass>
CallTable<Pass> &table_of(PyObject *self) {
    return reinterpret_cast<CallTableObject<Pass> *>(self)->table;
}

// ---------------------------------------------------------------- life
template <typename Pass>
PyObject *new_call_table(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        if (PyTuple_Size(args) != 0 || (keywords != nullptr && PyDict_Size(keywords) != 0)) {
            raise_error(PyExc_TypeError, "a %s is made empty, without arguments", Pass::kTable);
        }
        auto *const self = allocate<CallTableObject<Pass>>(type);
        new (&self->table) CallTable<Pass>;
        return reinterpret_cast<PyObject *>(self);
    });
}

template <typename Pass>
void delete_call_table(PyObject *self) {
    PyObject_GC_UnTrack(self);
    std::destroy_at(&table_of<Pass>(self));
    deallocate(self);
}

template <typename Pass>
int traverse_call_table(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return table_of<Pass>(self).traverse(visit, arg);
}

template <typename Pass>
int clear_call_table(PyObject *self) {
    table_of<Pass>(self).clear();
    return 0;
}

// ---------------------------------------------------------------- use
template <typename Pass>
PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return guarded([&] { return table_of<Pass>(self).call(args, n_args).release(); });
}

template <typename Pass>
PyObject *call_table(PyObject *self, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        if (keywords != nullptr && PyDict_Size(keywords) != 0) {
            raise_error(PyExc_TypeError, "a %s takes no keywords", Pass::kTable);
        }
        const auto items = items_of(args);
        return table_of<Pass>(self).call(items.data(), items.size()).release();
    });
}

template <typename Pass>
PyObject *remember(PyObject *self, PyObject *args) {
    return guarded([&] {
        auto launch = launch_to_remember<Pass>(args);
        const bool is_whole = launch != nullptr;
        if (is_whole) table_of<Pass>(self).remember(std::move(launch));
        return Py_NewRef(is_whole ? Py_True : Py_False);
    });
}

template <typename Pass>
PyObject *last_label(PyObject *self, void *) {
    PyObject *const label = table_of<Pass>(self).last_label();
    return Py_NewRef(label == nullptr ? Py_None : label);
}

template <typename Pass>
Py_ssize_t table_size(PyObject *self) {
    return static_cast<Py_ssize_t>(table_of<Pass>(self).size());
}

// ---------------------------------------------------------------- the type
template <typename Pass>
Reference make_call_table_type() {
    static PyMethodDef methods[] = {
        {"call", as_method(&call<Pass>), METH_FASTCALL, Pass::kCall},
        {"remember", remember<Pass>, METH_VARARGS, kRemember},
        {},
    };
    static PyGetSetDef properties[] = {{"last", last_label<Pass>, nullptr,
                                        "Label of the launch that was made again last, or None.", nullptr},
                                       {}};
    static char documentation[] = "Launches by the layouts of their tensors; see src/binding/call_table.hpp.";
    static PyType_Slot slots[] = {
        {Py_tp_doc, documentation},
        type_slot(Py_tp_new, &new_call_table<Pass>),
        type_slot(Py_tp_dealloc, &delete_call_table<Pass>),
        type_slot(Py_tp_traverse, &traverse_call_table<Pass>),
        type_slot(Py_tp_clear, &clear_call_table<Pass>),
        type_slot(Py_tp_call, &call_table<Pass>),
        type_slot(Py_sq_length, &table_size<Pass>),
        {Py_tp_methods, methods},
        {Py_tp_getset, properties},
        {},
    };
    static const std::string name = std::string("flash_attention_kernels.") + Pass::kTable;
    static PyType_Spec spec = {name.c_str(), sizeof(CallTableObject<Pass>), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    return checked(PyType_FromSpec(&spec));
}

}  // namespace flash::binding

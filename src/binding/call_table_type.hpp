// The Python type flash_attention_kernels.CallTable: calling it looks a call up, `remember` files one.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include "binding/call_table.hpp"
#include "binding/given_call.hpp"
#include "binding/python.hpp"
#include "binding/remember.hpp"

namespace flash::binding {

struct CallTableObject {
    PyObject_HEAD CallTable table;
};

inline CallTable &table_of(PyObject *self) { return reinterpret_cast<CallTableObject *>(self)->table; }

// ---------------------------------------------------------------- life
inline PyObject *new_call_table(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        if (PyTuple_Size(args) != 0 || (keywords != nullptr && PyDict_Size(keywords) != 0)) {
            raise_error(PyExc_TypeError, "a CallTable is made empty, without arguments");
        }
        auto *const self = allocate<CallTableObject>(type);
        new (&self->table) CallTable;
        return reinterpret_cast<PyObject *>(self);
    });
}

inline void delete_call_table(PyObject *self) {
    PyObject_GC_UnTrack(self);
    table_of(self).~CallTable();
    deallocate(self);
}

inline int traverse_call_table(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return table_of(self).traverse(visit, arg);
}

inline int clear_call_table(PyObject *self) {
    table_of(self).clear();
    return 0;
}

// ---------------------------------------------------------------- use
inline constexpr const char *kCall =
    "call(q, k, v, out, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, *numbers)\n\n"
    "The result of a call that is known here, or None. The same as calling the table, which takes longer.";

inline PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return guarded([&] { return table_of(self).call(args, n_args).release(); });
}

inline PyObject *call_table(PyObject *self, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        if (keywords != nullptr && PyDict_Size(keywords) != 0) {
            raise_error(PyExc_TypeError, "a CallTable takes no keywords");
        }
        const auto items = items_of(args);
        return table_of(self).call(items.data(), items.size()).release();
    });
}

inline PyObject *remember(PyObject *self, PyObject *args) {
    return guarded([&] {
        auto launch = launch_to_remember(args);
        const bool is_whole = launch != nullptr;
        if (is_whole) table_of(self).remember(std::move(launch));
        return Py_NewRef(is_whole ? Py_True : Py_False);
    });
}

inline PyObject *last_label(PyObject *self, void *) {
    PyObject *const label = table_of(self).last_label();
    return Py_NewRef(label == nullptr ? Py_None : label);
}

inline Py_ssize_t table_size(PyObject *self) { return static_cast<Py_ssize_t>(table_of(self).size()); }

// ---------------------------------------------------------------- the type
inline Reference make_call_table_type() {
    static PyMethodDef methods[] = {
        {"call", as_method(&call), METH_FASTCALL, kCall},
        {"remember", remember, METH_VARARGS, kRemember},
        {},
    };
    static PyGetSetDef properties[] = {
        {"last", last_label, nullptr, "Label of the launch that was made again last, or None.", nullptr}, {}};
    static char documentation[] = "Launches by the layouts of their tensors; see src/binding/call_table.hpp.";
    static PyType_Slot slots[] = {
        {Py_tp_doc, documentation},
        type_slot(Py_tp_new, &new_call_table),
        type_slot(Py_tp_dealloc, &delete_call_table),
        type_slot(Py_tp_traverse, &traverse_call_table),
        type_slot(Py_tp_clear, &clear_call_table),
        type_slot(Py_tp_call, &call_table),
        type_slot(Py_sq_length, &table_size),
        {Py_tp_methods, methods},
        {Py_tp_getset, properties},
        {},
    };
    static PyType_Spec spec = {"flash_attention_kernels.CallTable", sizeof(CallTableObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    return checked(PyType_FromSpec(&spec));
}

}  // namespace flash::binding

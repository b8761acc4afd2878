// What a function of Python's holds: its code, closure, defaults and globals.
#pragma once

#include <dlfcn.h>

#include "binding/python.hpp"

namespace flash::binding {

// CPython's own functions tell of it at once. Attributes of the same names are looked up each time, and audit
// hooks hear of some of them: packages that many programs import add such a hook, in Python. These functions
// are no part of the limited API, so they are looked for when the program runs.
class FunctionReader {
  public:
    // Throws PythonError, an ImportError, where this Python lacks one of them.
    static const FunctionReader &get() {
        static const auto &reader = *new FunctionReader;  // never destroyed: Python may be gone by then
        return reader;
    }

    bool is_function(PyObject *object) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(object)) == type_.get();
    }

    // Borrowed from the function; nullptr where it has none.
    PyObject *code(PyObject *function) const { return code_(function); }
    PyObject *globals(PyObject *function) const { return globals_(function); }
    PyObject *closure(PyObject *function) const { return closure_(function); }
    PyObject *defaults(PyObject *function) const { return defaults_(function); }
    PyObject *keyword_defaults(PyObject *function) const { return keyword_defaults_(function); }

    // What a variable of a closure holds; nullptr: nothing was assigned to it.
    Reference content(PyObject *cell) const { return Reference(content_(cell)); }

    // Whether attributes were set on an object, or it cannot be asked.
    bool has_attributes(PyObject *object) const {
        const Reference own(PyObject_GetAttr(object, attributes_name_.get()));
        if (own == nullptr) PyErr_Clear();
        return own == nullptr || !PyDict_Check(own.get()) || PyDict_Size(own.get()) != 0;
    }

  private:
    using Get = PyObject *(*)(PyObject *);

    static Get find(const char *name) {
        const auto found = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, name));
        if (found == nullptr) raise_error(PyExc_ImportError, "this Python has no function %s", name);
        return found;
    }

    FunctionReader() {
        const Reference types = checked(PyImport_ImportModule("types"));
        type_ = checked(PyObject_GetAttrString(types.get(), "FunctionType"));
    }

    Reference type_;
    Get code_ = find("PyFunction_GetCode"), globals_ = find("PyFunction_GetGlobals"),
        closure_ = find("PyFunction_GetClosure"), defaults_ = find("PyFunction_GetDefaults"),
        keyword_defaults_ = find("PyFunction_GetKwDefaults"), content_ = find("PyCell_Get");
    Reference attributes_name_ = interned("__dict__");
};

}  // namespace flash::binding

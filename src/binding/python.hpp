// Owning references to Python objects.
#pragma once

#include <Python.h>

#include <memory>

namespace flash::binding {

struct ReleaseReference {
    void operator()(PyObject *object) const { Py_XDECREF(object); }
};

// A reference that is given back when it goes out of scope; nullptr: none.
using Reference = std::unique_ptr<PyObject, ReleaseReference>;

inline Reference share(PyObject *object) {
    Py_XINCREF(object);
    return Reference(object);
}

}  // namespace flash::binding

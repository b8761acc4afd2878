// CPython through its limited API of 3.10, so that one binding loads in that and every later Python.
//
// Python objects are owned by a `Reference`. A Python error travels through C++ as the exception
// `PythonError`, while Python holds what it says; `guarded` turns it back where Python called.
#pragma once

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include <climits>
#include <cstdarg>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>

namespace flash::binding {

// ---------------------------------------------------------------- references
struct ReleaseReference {
    void operator()(PyObject *object) const { Py_XDECREF(object); }
};

// A reference that is given back when it goes out of scope; nullptr: none.
using Reference = std::unique_ptr<PyObject, ReleaseReference>;

inline Reference share(PyObject *object) {
    Py_XINCREF(object);
    return Reference(object);
}

// ---------------------------------------------------------------- errors
struct PythonError {};  // Python holds the error

// Takes a new reference that a function of CPython returned; nullptr says that it failed.
inline Reference checked(PyObject *made) {
    if (made == nullptr) throw PythonError{};
    return Reference(made);
}

inline void check_status(int status) {
    if (status < 0) throw PythonError{};
}

[[noreturn]] inline void raise_error(PyObject *type, const char *format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    PyObject *const text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    // Where a value cannot be shown, its own error stays: PyErr_FormatV hides it before Python 3.11.3.
    if (text != nullptr) PyErr_SetObject(type, text);
    Py_XDECREF(text);
    throw PythonError{};
}

// Text of unknown origin, such as a path in an error of the loader: no byte makes this fail.
inline Reference decode(const char *text) { return checked(PyUnicode_DecodeFSDefault(text)); }

// Runs what Python called. Every exception becomes a Python error and the value that announces one.
template <typename Result = PyObject *, typename F>
Result guarded(F f, Result failed = Result{}) noexcept {
    try {
        return f();
    } catch (const PythonError &) {
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        const Reference text(PyUnicode_DecodeFSDefault(error.what()));
        if (text != nullptr) PyErr_SetObject(PyExc_RuntimeError, text.get());
    }
    return failed;
}

// Keeps the Python error of now, if there is one, while other code runs; errors of that code are dropped.
class KeptError {
  public:
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // what replaces them is not in 3.10
    KeptError() { PyErr_Fetch(&type_, &value_, &traceback_); }
    ~KeptError() { PyErr_Restore(type_, value_, traceback_); }
#pragma GCC diagnostic pop
    KeptError(const KeptError &) = delete;
    KeptError &operator=(const KeptError &) = delete;

  private:
    PyObject *type_, *value_, *traceback_;
};

// ---------------------------------------------------------------- values
inline int64_t to_int64(PyObject *value) {
    const long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) throw PythonError{};
    return number;
}

inline float to_float(PyObject *value) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) throw PythonError{};
    return static_cast<float>(number);
}

inline void *to_pointer(PyObject *value) {
    void *const address = PyLong_AsVoidPtr(value);
    if (address == nullptr && PyErr_Occurred()) throw PythonError{};
    return address;
}

// A new tuple of these objects.
template <typename... Items>
Reference pack_tuple(const Items &...items) {
    return checked(PyTuple_Pack(sizeof...(items), items.get()...));
}

inline Reference make_text(const char *text) { return checked(PyUnicode_FromString(text)); }
inline Reference make_number(long number) { return checked(PyLong_FromLong(number)); }

// A name by which attributes are asked for again and again.
inline Reference interned(const char *name) { return checked(PyUnicode_InternFromString(name)); }

// function(argument). Holds the function, which the call itself may replace.
inline Reference call_with(PyObject *function, const Reference &argument) {
    const Reference held = share(function);
    return checked(PyObject_CallFunctionObjArgs(held.get(), argument.get(), nullptr));
}

// ---------------------------------------------------------------- types
// A function as the tables of methods and types hold it.
template <typename Function>
PyCFunction as_method(Function *function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(function));
}

template <typename Function>
PyType_Slot type_slot(int slot, Function *function) {
    return {slot, reinterpret_cast<void *>(function)};
}

// A new object of a type of ours. What follows its head is zeros.
template <typename Object>
Object *allocate(PyTypeObject *type) {
    const auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    return reinterpret_cast<Object *>(checked(alloc(type, 0)).release());
}

// Gives an object's memory back, and the reference to its type that every object of a heap type holds.
inline void deallocate(PyObject *self) {
    PyTypeObject *const type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

}  // namespace flash::binding

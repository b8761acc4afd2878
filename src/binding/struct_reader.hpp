// Structs that cross from Python to C++ and back, field by field, as `Description` lists them.
#pragma once

#include <algorithm>
#include <climits>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "binding/fields.hpp"
#include "binding/python.hpp"

namespace flash::binding {

inline Reference type_name(PyObject *value) {
    return checked(PyObject_GetAttrString(reinterpret_cast<PyObject *>(Py_TYPE(value)), "__name__"));
}

inline bool has_type_name(PyObject *value, const char *name) {
    const Reference given = type_name(value);
    return PyUnicode_Check(given.get()) && PyUnicode_CompareWithASCIIString(given.get(), name) == 0;
}

// Where a value stands, for messages.
struct Place {
    const char *struct_name, *field;
};

[[noreturn]] inline void wrong_type(const Place &place, PyObject *value, const char *wanted) {
    raise_error(PyExc_TypeError, "%s.%s: given %R of type %S, wanted %s", place.struct_name, place.field,
                value, type_name(value).get(), wanted);
}

// ---------------------------------------------------------------- one value
// Exact types: Python's bool is an int, and a tile count that was given as True is a mistake.
inline void read_value(const Place &place, PyObject *value, bool &out) {
    if (!PyBool_Check(value)) wrong_type(place, value, "bool");
    out = value == Py_True;
}

inline void read_value(const Place &place, PyObject *value, int &out) {
    if (!PyLong_CheckExact(value)) wrong_type(place, value, "int");
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0 || number < INT_MIN || number > INT_MAX) wrong_type(place, value, "int of 32 bits");
    out = static_cast<int>(number);
}

// A Python IntEnum of the same name; its numbers are the enumerators'.
template <typename Enum>
    requires std::is_enum_v<Enum>
void read_value(const Place &place, PyObject *value, Enum &out) {
    constexpr auto description = describe(Enum{});
    if (!PyLong_Check(value) || !has_type_name(value, description.name)) {
        wrong_type(place, value, description.name);
    }
    int overflow = 0;
    const long number = PyLong_AsLongAndOverflow(value, &overflow);
    if (overflow != 0 || std::ranges::find(description.numbers, number) == description.numbers.end()) {
        wrong_type(place, value, description.name);
    }
    out = static_cast<Enum>(number);
}

inline Reference to_python(bool value) { return checked(PyBool_FromLong(value)); }
inline Reference to_python(int value) { return make_number(value); }
template <typename Enum>
    requires std::is_enum_v<Enum>
Reference to_python(Enum value) {
    return make_number(static_cast<int>(value));
}

// ---------------------------------------------------------------- a struct
inline Reference read_attribute(const Place &place, PyObject *object) {
    Reference value(PyObject_GetAttrString(object, place.field));
    if (value != nullptr) return value;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError{};
    PyErr_Clear();
    raise_error(PyExc_AttributeError,
                "%s.%s: given an object of type %S that has no such field; build it with "
                "flash_helpers.kernel_configs",
                place.struct_name, place.field, type_name(object).get());
}

// f(field) for each field of a struct, in the order of its declaration.
template <typename Struct, typename F>
void for_each_field(F f) {
    std::apply([&](const auto &...field) { (f(field), ...); }, Description<Struct>::fields);
}

// Reads a Python object into the C++ struct of the same name.
template <typename Struct>
Struct read_struct(PyObject *object) {
    Struct result{};
    for_each_field<Struct>([&](const auto &field) {
        const Place place{Description<Struct>::name, field.name};
        read_value(place, read_attribute(place, object).get(), result.*field.member);
    });
    return result;
}

// The Python object's configuration as the C++ key of its family.
template <typename Config>
Config py_to_cpp_kernel_config(PyObject *config) {
    return read_struct<Config>(config);
}

template <typename Struct>
Reference to_dict(const Struct &value) {
    Reference result = checked(PyDict_New());
    for_each_field<Struct>([&](const auto &field) {
        check_status(PyDict_SetItemString(result.get(), field.name, to_python(value.*field.member).get()));
    });
    return result;
}

template <typename Struct>
Reference field_names() {
    Reference names = checked(PyList_New(0));
    for_each_field<Struct>(
        [&](const auto &field) { check_status(PyList_Append(names.get(), make_text(field.name).get())); });
    return names;
}

}  // namespace flash::binding

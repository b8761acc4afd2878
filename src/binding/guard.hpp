// Whether a value is as it was: what a function of the user's does follows from its code and from what it
// holds. flash_attention/mods/guards.py says what is compared of a value, in nested tuples that begin with a
// word; they are read once, into nodes that point into them.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "binding/function_reader.hpp"
#include "binding/python.hpp"

namespace flash::binding {

inline constexpr const char *kGuards =
    "('is', value): this very object. ('equals', value): or one of its type that is equal. "
    "('bits', float): a float of the same bits. "
    "('tensor', weakref): the object that it is of, on which no attribute was set. "
    "('items', type, (guard, …)): as many items of a tuple. ('asks', function): the function says so. "
    "('partial', type, guard of func, guard of args, (guard of names, guard of values) of keywords). "
    "('function', code, globals or None, ((name, guard), …), (built-in name, …), (guard of a closure's "
    "variable, …), guard of the defaults or None, (guard of names, guard of values) of defaults by keyword "
    "or "
    "None)";

class Guard {
  public:
    // Throws PythonError where the description is none. It has to live as long as this does.
    explicit Guard(PyObject *told) {
        if (!PyTuple_Check(told) || PyTuple_Size(told) < 2) refuse(told);
        const Words &words = Words::get();
        const auto begins = [&](const Reference &word) {
            return PyObject_RichCompareBool(item(told, 0), word.get(), Py_EQ) == 1;
        };
        value_ = item(told, 1);
        const Py_ssize_t n = PyTuple_Size(told);
        if (begins(words.is) && n == 2)
            kind_ = Kind::IS;
        else if (begins(words.equals) && n == 2)
            kind_ = Kind::EQUALS;
        else if (begins(words.bits) && n == 2 && PyFloat_CheckExact(value_))
            kind_ = Kind::BITS;
        else if (begins(words.tensor) && n == 2)
            kind_ = Kind::TENSOR;
        else if (begins(words.asks) && n == 2)
            kind_ = Kind::ASKS;
        else if (begins(words.items) && n == 3) {
            kind_ = Kind::ITEMS;
            read_all(item(told, 2), parts_);
        } else if (begins(words.function) && n == 8) {
            kind_ = Kind::FUNCTION;
            read_function(told);
        } else if (begins(words.partial) && n == 5) {
            kind_ = Kind::PARTIAL;
            parts_.reserve(2);
            parts_.emplace_back(item(told, 2));
            parts_.emplace_back(item(told, 3));
            read_keywords(item(told, 4));
        } else {
            refuse(told);
        }
    }

    // False, without a Python error, also where a question fails.
    bool holds(PyObject *x) const {
        switch (kind_) {
            case Kind::IS:
                return x == value_;
            case Kind::EQUALS:
                return x == value_ ||
                       (Py_TYPE(x) == Py_TYPE(value_) && said(PyObject_RichCompareBool(x, value_, Py_EQ)));
            case Kind::BITS:
                return x == value_ || (PyFloat_CheckExact(x) && has_bits(x));
            case Kind::TENSOR:
                return referent(value_) == x && !FunctionReader::get().has_attributes(x);
            case Kind::ITEMS:
                return reinterpret_cast<PyObject *>(Py_TYPE(x)) == value_ && items_hold(x);
            case Kind::ASKS:
                return asks(x);
            case Kind::FUNCTION:
                return function_holds(x);
            case Kind::PARTIAL:
                return reinterpret_cast<PyObject *>(Py_TYPE(x)) == value_ && partial_holds(x);
        }
        return false;
    }

    // What a weak reference is of, borrowed; None: it is gone.
    static PyObject *referent(PyObject *weak) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // what replaces it is not in 3.10
        return PyWeakref_GetObject(weak);
#pragma GCC diagnostic pop
    }

  private:
    enum class Kind { IS, EQUALS, BITS, TENSOR, ITEMS, ASKS, FUNCTION, PARTIAL };

    struct Words {
        static const Words &get() {
            static const auto &words = *new Words;
            return words;
        }
        Reference is = interned("is"), equals = interned("equals"), bits = interned("bits"),
                  tensor = interned("tensor"), items = interned("items"), asks = interned("asks"),
                  function = interned("function"), partial = interned("partial"), func = interned("func"),
                  args = interned("args"), keywords = interned("keywords");
    };

    [[noreturn]] static void refuse(PyObject *told) {
        raise_error(PyExc_TypeError, "a guard is %R; allowed: %s", told, kGuards);
    }

    static PyObject *item(PyObject *tuple, Py_ssize_t place) {
        PyObject *const found = PyTuple_GetItem(tuple, place);
        if (found == nullptr) throw PythonError{};
        return found;
    }

    static void read_all(PyObject *told, std::vector<Guard> &guards) {
        if (!PyTuple_Check(told)) refuse(told);
        const Py_ssize_t n = PyTuple_Size(told);
        guards.reserve(n);
        for (Py_ssize_t i = 0; i < n; ++i) guards.emplace_back(item(told, i));
    }

    void read_function(PyObject *told) {
        globals_ = item(told, 2);
        PyObject *const names = item(told, 3), *const built_in = item(told, 4);
        if (!PyTuple_Check(names) || !PyTuple_Check(built_in)) refuse(told);
        for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
            names_.emplace_back(item(item(names, i), 0), Guard(item(item(names, i), 1)));
        }
        for (Py_ssize_t i = 0; i < PyTuple_Size(built_in); ++i) built_in_.push_back(item(built_in, i));
        if (globals_ != Py_None && !PyDict_Check(globals_)) refuse(told);
        if (globals_ == Py_None && !(names_.empty() && built_in_.empty())) refuse(told);
        read_all(item(told, 5), parts_);
        if (item(told, 6) != Py_None) defaults_.emplace_back(item(told, 6));
        if (item(told, 7) != Py_None) read_keywords(item(told, 7));
    }

    void read_keywords(PyObject *told) {
        read_all(told, keywords_);
        if (keywords_.size() != 2) refuse(told);
    }

    static bool said(int answer) {
        if (answer < 0) PyErr_Clear();
        return answer == 1;
    }

    bool has_bits(PyObject *x) const {
        const double given = PyFloat_AsDouble(x), known = PyFloat_AsDouble(value_);
        return std::memcmp(&given, &known, sizeof given) == 0;
    }

    bool items_hold(PyObject *tuple) const {
        if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != static_cast<Py_ssize_t>(parts_.size()))
            return false;
        Py_ssize_t place = 0;
        for (const Guard &part : parts_) {
            if (!part.holds(PyTuple_GetItem(tuple, place++))) return false;
        }
        return true;
    }

    bool asks(PyObject *x) const {
        const Reference answer(PyObject_CallFunctionObjArgs(value_, x, nullptr));
        if (answer == nullptr) PyErr_Clear();
        return answer.get() == Py_True;
    }

    bool function_holds(PyObject *x) const {
        const FunctionReader &reader = FunctionReader::get();
        if (!reader.is_function(x) || reader.code(x) != value_ || reader.has_attributes(x)) return false;
        if (globals_ != Py_None && reader.globals(x) != globals_) return false;
        const Reference defaults = share(reader.defaults(x));
        if ((defaults == nullptr) != defaults_.empty()) return false;
        if (defaults != nullptr && !defaults_[0].holds(defaults.get())) return false;
        return keywords_hold(share(reader.keyword_defaults(x)).get()) && cells_hold(reader.closure(x)) &&
               globals_hold();
    }

    bool partial_holds(PyObject *x) const {
        const auto get = [&](const Reference &name) {
            Reference found(PyObject_GetAttr(x, name.get()));
            if (found == nullptr) PyErr_Clear();
            return found;
        };
        const Words &words = Words::get();
        const Reference function = get(words.func), args = get(words.args), keywords = get(words.keywords);
        return function != nullptr && args != nullptr && keywords != nullptr &&
               parts_[0].holds(function.get()) && parts_[1].holds(args.get()) &&
               keywords_hold(keywords.get());
    }

    bool keywords_hold(PyObject *keywords) const {
        if (keywords == nullptr || keywords_.empty()) return keywords == nullptr && keywords_.empty();
        if (!PyDict_Check(keywords)) return false;
        return holds_listed(keywords_[0], PyDict_Keys(keywords)) &&
               holds_listed(keywords_[1], PyDict_Values(keywords));
    }

    // Of a new list, as a tuple.
    static bool holds_listed(const Guard &guard, PyObject *made) {
        const Reference list(made), items(list == nullptr ? nullptr : PyList_AsTuple(list.get()));
        if (items == nullptr) PyErr_Clear();
        return items != nullptr && guard.holds(items.get());
    }

    bool cells_hold(PyObject *closure) const {
        if (closure == nullptr) return parts_.empty();
        if (PyTuple_Size(closure) != static_cast<Py_ssize_t>(parts_.size())) return false;
        Py_ssize_t place = 0;
        for (const Guard &part : parts_) {
            const Reference content = FunctionReader::get().content(PyTuple_GetItem(closure, place++));
            if (content == nullptr || !part.holds(content.get())) return false;
        }
        return true;
    }

    bool globals_hold() const {
        for (const auto &[name, guard] : names_) {
            const Reference found = share(PyDict_GetItemWithError(globals_, name));
            if (found == nullptr) PyErr_Clear();
            if (found == nullptr || !guard.holds(found.get())) return false;
        }
        for (PyObject *const name : built_in_) {
            if (PyDict_Contains(globals_, name) != 0) {
                PyErr_Clear();
                return false;
            }
        }
        return true;
    }

    Kind kind_;
    PyObject *value_;              // all of these are borrowed from the description
    PyObject *globals_ = nullptr;  // of a function; None: it names none
    std::vector<std::pair<PyObject *, Guard>> names_;
    std::vector<PyObject *> built_in_;
    std::vector<Guard> parts_;     // of a tuple's items, a closure's variables, or a partial's func and args
    std::vector<Guard> defaults_;  // one, or none
    std::vector<Guard> keywords_;  // of the names and of the values, or none
};

}  // namespace flash::binding

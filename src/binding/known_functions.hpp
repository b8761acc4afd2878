// The Python type flash_attention_kernels.KnownFunctions: a recorded pair of functions, and whether two
// functions are they (flash_attention/mods/remembered.py). It is asked in each call with functions.
#pragma once

#include <array>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "binding/guard.hpp"
#include "binding/python.hpp"

namespace flash::binding {

inline constexpr const char *kKnownFunctions =
    "KnownFunctions(of_score, of_mask, key, contents, tensors, bare)\n\n"
    "of_score, of_mask: what is compared of score_mod and of mask_mod; None: there is none.\n"
    "key, bare: given back where two functions are these.\n"
    "contents: a tuple, which comes before the captured tensors; tensors: a tuple of weak references to "
    "them, "
    "or None: they are more than can be compared.";

class KnownFunctions {
  public:
    static constexpr int kParts = 6;

    // `given`: the arguments. Throws PythonError.
    explicit KnownFunctions(PyObject *given) : given_(share(given)) {
        FunctionReader::get();  // where there is none, nothing is asked later
        if (PyTuple_Size(given) != kParts) {
            raise_error(PyExc_TypeError, "%s: given %zd arguments", kKnownFunctions, PyTuple_Size(given));
        }
        if (!PyTuple_Check(part(kContents)) ||
            !(part(kTensors) == Py_None || PyTuple_Check(part(kTensors)))) {
            raise_error(PyExc_TypeError, "%s: contents is %R and tensors is %R", kKnownFunctions,
                        part(kContents), part(kTensors));
        }
        for (const int i : {kScore, kMask}) {
            if (part(i) != Py_None) guards_[i].emplace(part(i));
        }
    }

    // (key, compared, bare), or None: they are not these, or a captured tensor is gone.
    Reference match(PyObject *score_mod, PyObject *mask_mod) const {
        if (given_ == nullptr || !holds(kScore, score_mod) || !holds(kMask, mask_mod)) return share(Py_None);
        Reference compared = part(kTensors) == Py_None ? share(Py_None) : compared_tensors();
        if (compared == nullptr) return share(Py_None);
        return checked(PyTuple_Pack(3, part(kKey), compared.get(), part(kBare)));
    }

    void clear() {
        guards_ = {};
        const Reference held = std::move(given_);
    }

    int traverse(visitproc visit, void *arg) const {
        Py_VISIT(given_.get());
        return 0;
    }

  private:
    enum Part { kScore, kMask, kKey, kContents, kTensors, kBare };

    PyObject *part(int place) const { return PyTuple_GetItem(given_.get(), place); }

    bool holds(Part place, PyObject *function) const {
        return guards_[place] ? guards_[place]->holds(function) : function == Py_None;
    }

    // What a remembered launch compares; nullptr: a tensor is gone.
    Reference compared_tensors() const {
        PyObject *const contents = part(kContents), *const tensors = part(kTensors);
        const Py_ssize_t before = PyTuple_Size(contents), n = PyTuple_Size(tensors);
        Reference compared = checked(PyTuple_New(before + n));
        for (Py_ssize_t i = 0; i < before + n; ++i) {
            PyObject *const item = i < before ? PyTuple_GetItem(contents, i)
                                              : Guard::referent(PyTuple_GetItem(tensors, i - before));
            if (item == nullptr) throw PythonError{};
            if (i >= before && item == Py_None) return nullptr;
            check_status(PyTuple_SetItem(compared.get(), i, share(item).release()));
        }
        return compared;
    }

    Reference given_;
    std::array<std::optional<Guard>, 2> guards_;  // point into it
};

// ---------------------------------------------------------------- the type
struct KnownFunctionsObject {
    PyObject_HEAD KnownFunctions functions;
};

inline KnownFunctions &functions_of(PyObject *self) {
    return reinterpret_cast<KnownFunctionsObject *>(self)->functions;
}

inline PyObject *new_known_functions(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        if (keywords != nullptr && PyDict_Size(keywords) != 0) {
            raise_error(PyExc_TypeError, "%s: it takes no keywords", kKnownFunctions);
        }
        KnownFunctions made(args);
        auto *const self = allocate<KnownFunctionsObject>(type);
        new (&self->functions) KnownFunctions(std::move(made));
        return reinterpret_cast<PyObject *>(self);
    });
}

inline void delete_known_functions(PyObject *self) {
    PyObject_GC_UnTrack(self);
    std::destroy_at(&functions_of(self));
    deallocate(self);
}

inline int traverse_known_functions(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return functions_of(self).traverse(visit, arg);
}

inline int clear_known_functions(PyObject *self) {
    functions_of(self).clear();
    return 0;
}

inline PyObject *match_functions(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return guarded([&] {
        if (n_args != 2)
            raise_error(PyExc_TypeError, "match(score_mod, mask_mod): given %zd arguments", n_args);
        return functions_of(self).match(args[0], args[1]).release();
    });
}

inline Reference make_known_functions_type() {
    static PyMethodDef methods[] = {
        {"match", as_method(&match_functions), METH_FASTCALL,
         "match(score_mod, mask_mod)\n\n(key, (contents …, captured tensors …) or None, bare) where two "
         "functions "
         "are the recorded ones; else None."},
        {},
    };
    static PyType_Slot slots[] = {
        {Py_tp_doc, const_cast<char *>(kKnownFunctions)},
        type_slot(Py_tp_new, &new_known_functions),
        type_slot(Py_tp_dealloc, &delete_known_functions),
        type_slot(Py_tp_traverse, &traverse_known_functions),
        type_slot(Py_tp_clear, &clear_known_functions),
        {Py_tp_methods, methods},
        {},
    };
    static PyType_Spec spec = {"flash_attention_kernels.KnownFunctions", sizeof(KnownFunctionsObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    return checked(PyType_FromSpec(&spec));
}

}  // namespace flash::binding

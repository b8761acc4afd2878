// flash_attention_kernels: the binding between Python and the compiled kernels.
//
// Plain C++ and CPython's limited API: it knows neither torch nor CUDA, so it builds everywhere, and one
// build loads in every Python from 3.10 on. It opens kernel libraries, finds a kernel by its Python
// configuration, and launches it on raw pointers, or on tensors of a call that it remembers (call_table.hpp).
// What the arguments mean is checked in Python before a launch; here only what would let a kernel touch
// memory that is not the tensors'.
#include "flash_attention.cuh"

#include <string>
#include <string_view>

#include "binding/call_table_type.hpp"
#include "binding/fields.hpp"
#include "binding/kernel_type.hpp"
#include "binding/known_functions.hpp"
#include "binding/launch_backward.hpp"
#include "binding/python.hpp"  // first: it chooses the API
#include "binding/registry.hpp"
#include "binding/struct_reader.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {
namespace {

// The arguments of a function by position or by name, as PyArg_ParseTupleAndKeywords reads them.
template <typename... Out>
void parse(PyObject *args, PyObject *keywords, const char *format, const char *const *names, Out... out) {
    if (!PyArg_ParseTupleAndKeywords(args, keywords, format, const_cast<char **>(names), out...)) {
        throw PythonError{};
    }
}

// ---------------------------------------------------------------- look-up
Reference find_kernel(PyObject *config, PyObject *traits, int target, uint64_t mod) {
    Reference found;
    std::string known_names;
    const bool known = any_config([&]<typename Config>() {
        known_names += std::string(known_names.empty() ? "" : ", ") + Description<Config>::name;
        if (!has_type_name(config, Description<Config>::name)) return false;
        const KernelKey<Config> key{py_to_cpp_kernel_config<Config>(config),
                                    read_struct<typename Description<Config>::Traits>(traits), target, mod};
        const auto &kernels = loaded_kernels<Config>();
        const auto entry = kernels.find(key);
        found = entry == kernels.end() ? share(Py_None) : make_kernel(entry->second);
        return true;
    });
    if (!known) {
        raise_error(PyExc_TypeError, "config: given an object of type %S, wanted one of: %s",
                    type_name(config).get(), known_names.c_str());
    }
    return found;
}

PyObject *find(PyObject *, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        static const char *const names[] = {"config", "traits", "target", "mod", nullptr};
        PyObject *config, *traits;
        int target;
        unsigned long long mod = 0;
        parse(args, keywords, "OOi|K:find", names, &config, &traits, &target, &mod);
        return find_kernel(config, traits, target, mod).release();
    });
}

PyObject *registered(PyObject *, PyObject *) {
    return guarded([&] {
        Reference result = checked(PyList_New(0));
        any_config([&]<typename Config>() {
            for (const auto &[key, kernel] : loaded_kernels<Config>()) {
                if (key.mod != 0) continue;
                const Reference entry = pack_tuple(make_text(Description<Config>::name), to_dict(key.config),
                                                   to_dict(key.traits), make_number(key.target));
                check_status(PyList_Append(result.get(), entry.get()));
            }
            return false;
        });
        return result.release();
    });
}

PyObject *config_field_names(PyObject *, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        static const char *const names[] = {"name", nullptr};
        PyObject *name;
        parse(args, keywords, "U:config_field_names", names, &name);
        Reference found;
        const bool known = any_config([&]<typename Config>() {
            if (PyUnicode_CompareWithASCIIString(name, Description<Config>::name) != 0) return false;
            found = field_names<Config>();
            return true;
        });
        if (!known) raise_error(PyExc_ValueError, "no configuration struct is called %R", name);
        return found.release();
    });
}

PyObject *traits_field_names(PyObject *, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        static const char *const names[] = {"name", nullptr};
        const char *name = Description<ForwardTraits>::name;
        parse(args, keywords, "|s:traits_field_names", names, &name);
        if (std::string_view(name) == Description<ForwardTraits>::name) {
            return field_names<ForwardTraits>().release();
        }
        if (std::string_view(name) == Description<BackwardTraits>::name) {
            return field_names<BackwardTraits>().release();
        }
        raise_error(PyExc_ValueError, "no traits struct is called '%s'; known: %s, %s", name,
                    Description<ForwardTraits>::name, Description<BackwardTraits>::name);
    });
}

// ---------------------------------------------------------------- libraries and tensors
PyObject *open_library(PyObject *, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        static const char *const names[] = {"path", nullptr};
        PyObject *encoded = nullptr;
        parse(args, keywords, "O&:load_library", names, &PyUnicode_FSConverter, &encoded);
        const Reference path(encoded);
        const char *const bytes = PyBytes_AsString(path.get());
        if (bytes == nullptr) throw PythonError{};
        return make_number(load_library(bytes)).release();
    });
}

PyObject *read_tensors(PyObject *, PyObject *args, PyObject *keywords) {
    return guarded([&] {
        static const char *const names[] = {
            "type",           "parameter_type", "exchange_api",   "is_grad_enabled", "exchange_device",
            "current_stream", "is_capturing",   "function_modes", "unheard",         nullptr};
        TensorLibrary x;
        parse(args, keywords, "O!O!OOOOOOO:read_tensors", names, &PyType_Type, &x.type, &PyType_Type,
              &x.parameter_type, &x.exchange_api, &x.is_grad_enabled, &x.exchange_device, &x.current_stream,
              &x.is_capturing, &x.function_modes, &x.unheard);
        for (PyObject *const function : {x.is_grad_enabled, x.exchange_device, x.current_stream,
                                         x.is_capturing, x.function_modes, x.unheard}) {
            if (!PyCallable_Check(function)) {
                raise_error(PyExc_TypeError, "read_tensors: given %R, wanted a function", function);
            }
        }
        tensor_reader().open(x);
        return Py_NewRef(Py_None);
    });
}

// ---------------------------------------------------------------- the module
PyMethodDef functions[] = {
    {"load_library", as_method(&open_library), METH_VARARGS | METH_KEYWORDS,
     "load_library(path)\n\nOpens a kernel library and files its kernels; returns how many were new."},
    {"find", as_method(&find), METH_VARARGS | METH_KEYWORDS,
     "find(config, traits, target, mod=0)\n\n"
     "The loaded kernel of exactly this configuration, traits, target and mod, by its digest, or None."},
    {"registered", registered, METH_NOARGS,
     "Every loaded kernel without a mod: (configuration type, fields, traits, target)."},
    {"config_field_names", as_method(&config_field_names), METH_VARARGS | METH_KEYWORDS,
     "config_field_names(name)\n\n"
     "Field names of a configuration struct, in the order of its declaration."},
    {"traits_field_names", as_method(&traits_field_names), METH_VARARGS | METH_KEYWORDS,
     "traits_field_names(name='ForwardTraits')\n\n"
     "Field names of a traits struct, in the order of its declaration."},
    {"read_tensors", as_method(&read_tensors), METH_VARARGS | METH_KEYWORDS,
     "read_tensors(type, parameter_type, exchange_api, is_grad_enabled, exchange_device, current_stream, "
     "is_capturing, function_modes, unheard)\n\n"
     "Which Python types are tensors for a CallTable, and how what it must know is asked for: their DLPack "
     "exchange API (a capsule, or None), and functions of torch. exchange_device(index) gives the index "
     "before, current_stream(index) a number, is_capturing() whether the current stream records a graph, "
     "function_modes() how many modes are told of what a tensor is asked, unheard() a context without them."},
    {},
};

// One state a process, such as the registry: the module is made once and is not for subinterpreters.
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "flash_attention_kernels",
    "Loads compiled attention kernels and launches them. Knows neither torch nor CUDA.",
    -1,
    functions,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

Reference make_module() {
    Reference module = checked(PyModule_Create(&definition));
    const auto add = [&](const char *name, const Reference &value) {
        check_status(PyObject_SetAttrString(module.get(), name, value.get()));
    };
    add("feature_names", make_text(kFeatures));
    add("backward_argument_names", backward_argument_names());
    add("abi_version", make_number(kAbiVersion));
    Reference cuda_error = checked(PyErr_NewExceptionWithDoc(
        "flash_attention_kernels.CudaError", "A CUDA call failed: args are (text, cudaError_t).",
        PyExc_RuntimeError, nullptr));
    Reference kernel = make_kernel_type();
    add("CudaError", cuda_error);
    add("Kernel", kernel);
    add(ForwardPass::kTable, make_call_table_type<ForwardPass>());
    add(BackwardPass::kTable, make_call_table_type<BackwardPass>());
    add("KnownFunctions", make_known_functions_type());
    cuda_error_type = cuda_error.release();
    kernel_type = reinterpret_cast<PyTypeObject *>(kernel.release());
    return module;
}

}  // namespace
}  // namespace flash::binding

PyMODINIT_FUNC PyInit_flash_attention_kernels() {
    return flash::binding::guarded([] { return flash::binding::make_module().release(); });
}

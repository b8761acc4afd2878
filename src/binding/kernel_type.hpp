// The Python types flash_attention_kernels.Kernel, a loaded kernel, and CudaError.
#pragma once

#include <string>
#include <type_traits>

#include "binding/launch.hpp"
#include "binding/launch_backward.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"

namespace flash::binding {

// ---------------------------------------------------------------- CudaError
inline PyObject *cuda_error_type = nullptr;  // set when the module is made

// Raises CudaError(text, code) unless `error` is 0, which is success.
inline void check_cuda(const Kernel &kernel, const char *what, int error) {
    if (error == 0) return;
    const char *const reason = kernel.error_string(error);
    const std::string text = std::string(what) + ": " + (reason == nullptr ? "unknown error" : reason) +
                             " (cudaError " + std::to_string(error) + ")";
    const Reference args = pack_tuple(decode(text.c_str()), make_number(error));
    PyErr_SetObject(cuda_error_type, args.get());
    throw PythonError{};
}

// ---------------------------------------------------------------- Kernel
struct KernelObject {
    PyObject_HEAD const Kernel *kernel;
};

inline PyTypeObject *kernel_type = nullptr;  // set when the module is made

inline const Kernel &kernel_of(PyObject *self) { return *reinterpret_cast<KernelObject *>(self)->kernel; }

inline Reference make_kernel(const Kernel &kernel) {
    auto *const object = allocate<KernelObject>(kernel_type);
    object->kernel = &kernel;
    return Reference(reinterpret_cast<PyObject *>(object));
}

inline PyObject *refuse_new_kernel(PyTypeObject *, PyObject *, PyObject *) {
    PyErr_SetString(PyExc_TypeError, "a Kernel is made by find(config, traits, target) alone");
    return nullptr;
}

template <auto member>
PyObject *kernel_member(PyObject *self, void *) {
    const auto value = kernel_of(self).*member;
    if constexpr (std::is_same_v<decltype(value), const char *const>) {
        return PyUnicode_FromString(value);
    } else {
        return PyLong_FromLong(value);
    }
}

// A method that only kernels of another direction have.
inline void check_direction(const Kernel &kernel, const char *method, bool has_it) {
    if (has_it) return;
    raise_error(PyExc_TypeError, "%s: this is a kernel of the direction '%s', which has no such method",
                method, kernel.direction);
}

// Called for every forward that is not remembered, with shapes and strides as the tuples that torch hands
// out.
inline PyObject *kernel_launch(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return guarded([&] {
        const Kernel &kernel = kernel_of(self);
        check_direction(kernel, "launch", kernel.launch != nullptr);
        Launch launch = read_launch(kernel, args, n_args);
        const ModArguments mod = launch.captured.arguments();
        if (kernel.mod.digest != 0) launch.problem.mod = &mod;
        check_cuda(kernel, "launch", kernel.launch(launch.problem, launch.stream));
        return Py_NewRef(Py_None);
    });
}

inline PyObject *kernel_find_tiles(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return guarded([&] {
        const Kernel &kernel = kernel_of(self);
        if (kernel.find_tiles == nullptr) raise_error(PyExc_TypeError, "find_tiles: the kernel needs none");
        Launch launch = read_launch(kernel, args, n_args);
        const ModArguments mod = launch.captured.arguments();
        launch.problem.mod = &mod;
        check_cuda(kernel, "find_tiles", kernel.find_tiles(launch.problem, launch.stream));
        return Py_NewRef(Py_None);
    });
}

inline PyObject *kernel_launch_backward(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return guarded([&] {
        const Kernel &kernel = kernel_of(self);
        check_direction(kernel, "launch_backward", kernel.launch_backward != nullptr);
        BackwardLaunch launch = read_launch_backward(kernel, args, n_args);
        const ModArguments mod = launch.captured.arguments();
        if (kernel.mod.digest != 0) launch.problem.mod = &mod;
        check_cuda(kernel, "launch_backward", kernel.launch_backward(launch.problem, launch.stream));
        return Py_NewRef(Py_None);
    });
}

inline PyObject *kernel_workspaces(PyObject *self, PyObject *arguments) {
    return guarded([&] {
        const Kernel &kernel = kernel_of(self);
        check_direction(kernel, "workspaces", kernel.workspaces != nullptr);
        const BackwardWorkspaces bytes = kernel.workspaces(read_backward_problem(kernel, arguments));
        return pack_tuple(make_number(bytes.lse_log2), make_number(bytes.dq_sums),
                          make_number(bytes.counters))
            .release();
    });
}

inline PyObject *kernel_load(PyObject *self, PyObject *) {
    return guarded([&] {
        check_cuda(kernel_of(self), "load", kernel_of(self).load());
        return Py_NewRef(Py_None);
    });
}

inline PyObject *kernel_attributes(PyObject *self, PyObject *) {
    return guarded([&] {
        KernelAttributes values{};
        check_cuda(kernel_of(self), "attributes", kernel_of(self).attributes(values));
        Reference result = checked(PyDict_New());
        const auto add = [&](const char *name, int value) {
            check_status(PyDict_SetItemString(result.get(), name, make_number(value).get()));
        };
        add("registers", values.registers);
        add("local_bytes", values.local_bytes);
        add("static_smem_bytes", values.static_smem_bytes);
        add("max_threads_per_block", values.max_threads_per_block);
        add("blocks_per_sm", values.blocks_per_sm);
        return result.release();
    });
}

// The kernel whose bound method a Python function is; nullptr where it is another function.
inline const Kernel *kernel_of_method(PyObject *function, PyCFunction method) {
    if (!PyCFunction_Check(function)) return nullptr;
    if (PyCFunction_GetFunction(function) != method) return nullptr;
    return &kernel_of(PyCFunction_GetSelf(function));
}

inline Reference make_kernel_type() {
    static PyMethodDef methods[] = {
        {"launch", as_method(&kernel_launch), METH_FASTCALL, kLaunchArguments},
        {"find_tiles", as_method(&kernel_find_tiles), METH_FASTCALL,
         "find_tiles(the arguments of launch)\n\nWrites what the mod's mask leaves of each tile into "
         "mod.tiles."},
        {"launch_backward", as_method(&kernel_launch_backward), METH_FASTCALL, kLaunchBackwardArguments},
        {"workspaces", kernel_workspaces, METH_O,
         "workspaces(arguments) -> (lse_log2, dq_sums, counters)\n\n"
         "Bytes of the workspaces that a backward launch of these BackwardArguments needs beside delta."},
        {"load", kernel_load, METH_NOARGS,
         "Prepares the kernel for the current device; once a device, before the first launch."},
        {"attributes", kernel_attributes, METH_NOARGS,
         "Resources as the driver reports them for the current device."},
        {},
    };
    static PyGetSetDef properties[] = {
        {"family", kernel_member<&Kernel::family>, nullptr, nullptr, nullptr},
        {"direction", kernel_member<&Kernel::direction>, nullptr, nullptr, nullptr},
        {"target", kernel_member<&Kernel::target>, nullptr,
         "GPU generation it is compiled for, 80 for sm_80.", nullptr},
        {"needs_tiles",
         [](PyObject *self, void *) { return PyBool_FromLong(kernel_of(self).find_tiles != nullptr); },
         nullptr, "Whether bits of tiles tell more of the mod's mask than its bounds do.", nullptr},
        {"d_head", kernel_member<&Kernel::d_head>, nullptr, nullptr, nullptr},
        {"n_threads", kernel_member<&Kernel::n_threads>, nullptr, "Threads of a block.", nullptr},
        {"smem_bytes", kernel_member<&Kernel::smem_bytes>, nullptr, "Dynamic shared memory of a block.",
         nullptr},
        {},
    };
    static char documentation[] = "A loaded kernel; it lives as long as the process.";
    static PyType_Slot slots[] = {
        {Py_tp_doc, documentation},
        type_slot(Py_tp_new, &refuse_new_kernel),
        type_slot(Py_tp_dealloc, &deallocate),
        {Py_tp_methods, methods},
        {Py_tp_getset, properties},
        {},
    };
    static PyType_Spec spec = {"flash_attention_kernels.Kernel", sizeof(KernelObject), 0, Py_TPFLAGS_DEFAULT,
                               slots};
    return checked(PyType_FromSpec(&spec));
}

}  // namespace flash::binding

// flash_attention_kernels: the binding between Python and the compiled kernels.
//
// Plain C++ and pybind11: it knows neither torch nor CUDA, so it builds and loads everywhere. It
// opens kernel libraries, finds a kernel by its Python configuration, and launches it on raw
// pointers, or on tensors of a call that it remembers (call_table.hpp). What the arguments mean is checked in
// Python before a launch; here only what would let a kernel touch memory that is not the tensors'.
#include "flash_attention.cuh"

#include <pybind11/pybind11.h>

#include "binding/call_table_type.hpp"
#include "binding/fields.hpp"
#include "binding/launch.hpp"
#include "binding/registry.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {
namespace {

void check(const Kernel &kernel, const char *what, int error) {
    if (error == 0) return;
    set_cuda_error(kernel, what, error);
    throw py::error_already_set();
}

// ---------------------------------------------------------------- look-up
const Kernel *find(py::handle config, py::handle traits, int target) {
    const std::string given = type_name(config);
    const Kernel *found = nullptr;
    std::string known_names;
    const bool known = any_config([&]<typename Config>() {
        known_names += std::string(known_names.empty() ? "" : ", ") + Description<Config>::name;
        if (given != Description<Config>::name) return false;
        const KernelKey<Config> key{py_to_cpp_kernel_config<Config>(config),
                                    read_struct<ForwardTraits>(traits), target};
        if (const auto entry = forward_kernels<Config>.find(key); entry != forward_kernels<Config>.end()) {
            found = &entry->second;
        }
        return true;
    });
    if (!known)
        throw py::type_error("config: given an object of type " + given + ", wanted one of: " + known_names);
    return found;
}

py::list registered() {
    py::list result;
    any_config([&]<typename Config>() {
        for (const auto &[key, kernel] : forward_kernels<Config>) {
            result.append(py::make_tuple(Description<Config>::name, to_dict(key.config), to_dict(key.traits),
                                         key.target));
        }
        return false;
    });
    return result;
}

py::list config_field_names(const std::string &name) {
    py::list names;
    const bool known = any_config([&]<typename Config>() {
        if (name != Description<Config>::name) return false;
        names = field_names<Config>();
        return true;
    });
    if (!known) throw py::value_error("no configuration struct is called '" + name + "'");
    return names;
}

py::dict attributes(const Kernel &kernel) {
    KernelAttributes values{};
    check(kernel, "attributes", kernel.attributes(values));
    py::dict result;
    result["registers"] = values.registers;
    result["local_bytes"] = values.local_bytes;
    result["static_smem_bytes"] = values.static_smem_bytes;
    result["max_threads_per_block"] = values.max_threads_per_block;
    result["blocks_per_sm"] = values.blocks_per_sm;
    return result;
}

}  // namespace
}  // namespace flash::binding

PYBIND11_MODULE(flash_attention_kernels, m) {
    using namespace flash::binding;
    m.doc() = "Loads compiled attention kernels and launches them. Knows neither torch nor CUDA.";
    m.attr("feature_names") = kFeatures;
    m.attr("abi_version") = flash::kAbiVersion;
    cuda_error_type = PyErr_NewExceptionWithDoc("flash_attention_kernels.CudaError",
                                                "A CUDA call failed: args are (text, cudaError_t).",
                                                PyExc_RuntimeError, nullptr);
    m.attr("CudaError") = py::reinterpret_borrow<py::object>(cuda_error_type);

    m.attr("CallTable") = py::reinterpret_steal<py::object>(make_call_table_type());
    m.def(
        "read_tensors",
        [](py::type type, py::object exchange_api, py::function is_grad_enabled, py::function exchange_device,
           py::function current_stream) {
            if (!tensor_reader().open(type.ptr(), exchange_api.ptr(), is_grad_enabled.ptr(),
                                      exchange_device.ptr(), current_stream.ptr())) {
                throw py::error_already_set();
            }
        },
        py::arg("type"), py::arg("exchange_api"), py::arg("is_grad_enabled"), py::arg("exchange_device"),
        py::arg("current_stream"),
        "Which Python type is a tensor for a CallTable, and how what it must know is asked for: its DLPack "
        "exchange API (a capsule, or None), and functions of torch.");

    py::class_<Kernel>(m, "Kernel", "A loaded kernel; it lives as long as the process.")
        .def_readonly("family", &Kernel::family)
        .def_readonly("target", &Kernel::target, "GPU generation it is compiled for, 80 for sm_80.")
        .def_readonly("d_head", &Kernel::d_head)
        .def_readonly("n_threads", &Kernel::n_threads, "Threads of a block.")
        .def_readonly("smem_bytes", &Kernel::smem_bytes, "Dynamic shared memory of a block.")
        .def_property_readonly("launch", &bind_launch, kLaunchArguments)
        .def(
            "load", [](const Kernel &kernel) { check(kernel, "load", kernel.load()); },
            "Prepares the kernel for the current device; once a device, before the first launch.")
        .def("attributes", &attributes, "Resources as the driver reports them for the current device.");

    m.def("load_library", &load_library, py::arg("path"),
          "Opens a kernel library and files its kernels; returns how many were new.");
    m.def("find", &find, py::arg("config"), py::arg("traits"), py::arg("target"),
          py::return_value_policy::reference,
          "The loaded kernel of exactly this configuration, traits and target, or None.");
    m.def("registered", &registered, "Every loaded kernel: (configuration type, fields, traits, target).");
    m.def("config_field_names", &config_field_names, py::arg("name"),
          "Field names of a configuration struct, in the order of its declaration.");
    m.def("traits_field_names", &field_names<ForwardTraits>);
}

// flash_attention_kernels: the binding between Python and the compiled kernels.
//
// Plain C++ and pybind11: it knows neither torch nor CUDA, so it builds and loads everywhere. It
// opens kernel libraries, finds a kernel by its Python configuration, and launches it on raw
// pointers. What the arguments mean is checked in Python before a launch; here only what would let
// a kernel touch memory that is not the tensors'.
#include "flash_attention.cuh"

#include <pybind11/pybind11.h>

#include "binding/fields.hpp"
#include "binding/registry.hpp"

namespace flash::binding {
namespace {

PyObject *cuda_error_type = nullptr;  // flash_attention_kernels.CudaError, set when the module is made

// Sets CudaError(text, code).
void set_cuda_error(const Kernel &kernel, const char *what, int error) {
    const std::string text =
        std::string(what) + ": " + kernel.error_string(error) + " (cudaError " + std::to_string(error) + ")";
    PyErr_SetObject(cuda_error_type, py::make_tuple(text, error).ptr());
}

void check(const Kernel &kernel, const char *what, int error) {
    if (error == 0) return;
    set_cuda_error(kernel, what, error);
    throw py::error_already_set();
}

// ---------------------------------------------------------------- launch
// Called for every forward, so it skips pybind11's dispatch: a vector call on a function bound to
// the kernel, with shapes and strides as the tuples that torch hands out.
constexpr const char *kLaunchArguments =
    "launch(q, k, v, o, lse, stream, q_shape, k_shape, q_stride, k_stride, v_stride, o_stride, "
    "softmax_scale[, features])";
constexpr Py_ssize_t kLaunchArity = 13;
// What plain attention does not need, in one tuple: flash_attention.backends.cuda.Features.
constexpr const char *kFeatures =
    "(d_head_v, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, "
    "lse_stride, n_splits, partial_o, partial_lse, block_table, max_pages, page_size)";
constexpr Py_ssize_t kFeatureCount = 15;
constexpr int kUnbounded = (1 << 30) - 1;
constexpr const char *kKernelCapsule = "flash_attention_kernels.Kernel";

void *read_pointer(PyObject *value) { return PyLong_AsVoidPtr(value); }

bool is_tuple_of_4(PyObject *value) { return PyTuple_Check(value) && PyTuple_GET_SIZE(value) == 4; }

int read_size(PyObject *shape, int axis) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, axis));
    if (size < 0 || size > INT_MAX) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError, "launch: size %lld of axis %d; allowed: 0 to 2^31 - 1", size,
                         axis);
        }
        return 0;
    }
    return static_cast<int>(size);
}

TensorStrides read_strides(PyObject *stride) {
    const auto read = [&](int axis) { return PyLong_AsLongLong(PyTuple_GET_ITEM(stride, axis)); };
    return {.batch = read(0), .seq = read(1), .head = read(2)};
}

// The features tuple into the problem; false with a Python error where it is no such tuple.
bool read_features(PyObject *features, ForwardProblem &problem) {
    if (!PyTuple_Check(features) || PyTuple_GET_SIZE(features) != kFeatureCount) {
        PyErr_Format(PyExc_TypeError, "launch: features must be the tuple %s", kFeatures);
        return false;
    }
    int next = 0;
    const auto item = [&] { return PyTuple_GET_ITEM(features, next++); };
    problem.d_head_v = static_cast<int>(PyLong_AsLong(item()));
    problem.window_left = static_cast<int>(PyLong_AsLong(item()));
    problem.window_right = static_cast<int>(PyLong_AsLong(item()));
    problem.softcap = static_cast<float>(PyFloat_AsDouble(item()));
    problem.sinks = static_cast<const float *>(read_pointer(item()));
    problem.cu_seqlens_q = static_cast<const int *>(read_pointer(item()));
    problem.cu_seqlens_k = static_cast<const int *>(read_pointer(item()));
    problem.seqused_k = static_cast<const int *>(read_pointer(item()));
    problem.lse_stride = PyLong_AsLongLong(item());
    problem.n_splits = static_cast<int>(PyLong_AsLong(item()));
    problem.partial_o = static_cast<float *>(read_pointer(item()));
    problem.partial_lse = static_cast<float *>(read_pointer(item()));
    problem.block_table = static_cast<const int *>(read_pointer(item()));
    const long long max_pages = PyLong_AsLongLong(item());
    const long long page_size = PyLong_AsLongLong(item());
    if (PyErr_Occurred()) return false;
    if (problem.block_table == nullptr) return true;
    if (page_size < 1 || max_pages < 1 || max_pages > INT_MAX / page_size) {
        PyErr_Format(PyExc_ValueError, "launch: %lld pages of %lld keys; allowed: 1 to 2^31 - 1 keys in all",
                     max_pages, page_size);
        return false;
    }
    problem.max_pages = static_cast<int>(max_pages);
    problem.page_size = static_cast<int>(page_size);
    problem.seq_len_k = problem.max_pages * problem.page_size;
    return true;
}

// Whether tensors with heads of `given` elements fit a kernel compiled for `compiled`.
bool fits(int given, int compiled, const Kernel &kernel) {
    return given == compiled || (kernel.padded_head && given > 0 && given < compiled);
}

PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    const auto *const kernel = static_cast<const Kernel *>(PyCapsule_GetPointer(self, kKernelCapsule));
    if (n_args != kLaunchArity && n_args != kLaunchArity + 1) {
        return PyErr_Format(PyExc_TypeError, "launch: given %zd arguments; wanted %s", n_args,
                            kLaunchArguments);
    }
    for (int i = 6; i < 12; ++i) {
        if (!is_tuple_of_4(args[i])) {
            return PyErr_Format(PyExc_TypeError, "launch: argument %d is no tuple of 4 integers; wanted %s",
                                i + 1, kLaunchArguments);
        }
    }
    PyObject *const q_shape = args[6], *const k_shape = args[7];
    const int d_head = read_size(q_shape, 3);
    ForwardProblem problem{
        .q = read_pointer(args[0]),
        .k = read_pointer(args[1]),
        .v = read_pointer(args[2]),
        .o = read_pointer(args[3]),
        .lse = static_cast<float *>(read_pointer(args[4])),
        .q_strides = read_strides(args[8]),
        .k_strides = read_strides(args[9]),
        .v_strides = read_strides(args[10]),
        .o_strides = read_strides(args[11]),
        .batch = read_size(q_shape, 0),
        .n_heads = read_size(q_shape, 2),
        .n_heads_kv = read_size(k_shape, 2),
        .seq_len_q = read_size(q_shape, 1),
        .seq_len_k = read_size(k_shape, 1),
        .d_head = d_head,
        .d_head_v = kernel->d_head_v,
        .softmax_scale = static_cast<float>(PyFloat_AsDouble(args[12])),
        .window_left = kUnbounded,
        .window_right = kUnbounded,
    };
    if (n_args > kLaunchArity && !read_features(args[13], problem)) return nullptr;
    if (problem.block_table != nullptr) problem.n_pages = read_size(k_shape, 0);
    void *const stream = read_pointer(args[5]);
    if (PyErr_Occurred()) return nullptr;
    if (!fits(problem.d_head, kernel->d_head, *kernel) ||
        !fits(problem.d_head_v, kernel->d_head_v, *kernel)) {
        return PyErr_Format(PyExc_ValueError,
                            "launch: head sizes %d and %d; the kernel is compiled for %d and %d",
                            problem.d_head, problem.d_head_v, kernel->d_head, kernel->d_head_v);
    }
    if (const int error = kernel->launch(problem, stream); error != 0) {
        set_cuda_error(*kernel, "launch", error);
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyMethodDef launch_method = {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(launch)),
                             METH_FASTCALL, kLaunchArguments};

py::object bind_launch(const Kernel &kernel) {
    const py::capsule self(&kernel, kKernelCapsule);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&launch_method, self.ptr()));
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

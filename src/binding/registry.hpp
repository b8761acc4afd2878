// The registry: which kernels this process has loaded, by (configuration, traits, target).
//
// Kernel libraries stay open until the process ends: a kernel that was handed out stays callable.
#pragma once

#include <dlfcn.h>

#include <compare>
#include <map>
#include <stdexcept>
#include <string>

#include "binding/fields.hpp"
#include "flash_attention.cuh"

namespace flash::binding {

// A record without its family's type: what a launch needs.
struct Kernel {
    const char *family;
    int target;
    int d_head;
    int d_head_v;
    bool padded_head;
    int n_threads;
    int smem_bytes;
    int (*load)();
    int (*launch)(const ForwardProblem &problem, void *stream);
    int (*attributes)(KernelAttributes &out);
    const char *(*error_string)(int error);
};

template <typename Config>
struct KernelKey {
    Config config;
    ForwardTraits traits;
    int target;

    auto operator<=>(const KernelKey &) const = default;
};

// Nodes of a map keep their address: Python holds pointers into it.
template <typename Config>
inline std::map<KernelKey<Config>, Kernel> forward_kernels;

// Head size of V and O; families whose configuration has none of its own use Q's.
template <typename Config>
int d_head_v(const Config &config) {
    if constexpr (requires { config.d_head_v; }) {
        return config.d_head_v;
    } else {
        return config.d_head;
    }
}

template <typename Config>
int file_records(const KernelLibrary &library) {
    int n_new = 0;
    for (int i = 0; i < library.n_kernels; ++i) {
        const auto &record = *static_cast<const ForwardKernelRecord<Config> *>(library.records[i]);
        const Kernel kernel{
            .family = Description<Config>::family,
            .target = record.target,
            .d_head = record.config.d_head,
            .d_head_v = d_head_v(record.config),
            .padded_head = record.traits.padded_head,
            .n_threads = record.n_threads,
            .smem_bytes = record.smem_bytes,
            .load = record.load,
            .launch = record.launch,
            .attributes = record.attributes,
            .error_string = library.error_string,
        };
        n_new +=
            forward_kernels<Config>.try_emplace({record.config, record.traits, record.target}, kernel).second;
    }
    return n_new;
}

// Opens a kernel library and files its kernels; a kernel that is filed already stays as it is.
// Returns how many were new. Throws std::runtime_error where the file is no library of this ABI.
inline int load_library(const std::string &path) {
    void *const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr)
        throw std::runtime_error("cannot load the kernel library: " + std::string(dlerror()));
    const auto refuse = [&](const std::string &reason) {
        dlclose(handle);
        throw std::runtime_error(path + ": " + reason);
    };

    using EntryPoint = const KernelLibrary *(*)();
    const auto entry_point = reinterpret_cast<EntryPoint>(dlsym(handle, kKernelLibrarySymbol));
    if (entry_point == nullptr)
        refuse("no kernel library: it does not export " + std::string(kKernelLibrarySymbol));

    const KernelLibrary &library = *entry_point();
    if (library.abi != kAbiVersion) {
        refuse("built for interface version " + std::to_string(library.abi) +
               ", this binding speaks version " + std::to_string(kAbiVersion) +
               "; remove the file, so that it is built again");
    }
    int n_new = 0;
    const bool known = any_config([&]<typename Config>() {
        if (std::string(library.family) != Description<Config>::family) return false;
        n_new = file_records<Config>(library);
        return true;
    });
    if (!known) refuse("kernel family '" + std::string(library.family) + "' is unknown to this binding");
    return n_new;
}

}  // namespace flash::binding

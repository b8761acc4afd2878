// The registry: which kernels this process has loaded, by (configuration, traits, target, mod).
//
// Kernel libraries stay open until the process ends: a kernel that was handed out stays callable.
#pragma once

#include <dlfcn.h>

#include <compare>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "backward.cuh"
#include "binding/fields.hpp"
#include "flash_attention.cuh"

namespace flash::binding {

// A record without the types of its family and direction: what a launch needs.
struct Kernel {
    const char *family;
    const char *direction;
    int target;
    int d_head;
    int d_head_v;
    bool padded_head;
    ModSignature mod;
    int n_threads;
    int smem_bytes;
    int (*load)();
    int (*launch)(const ForwardProblem &problem, void *stream);            // nullptr: a backward kernel
    int (*find_tiles)(const ForwardProblem &problem, void *stream);        // nullptr: it needs no tiles
    int (*launch_backward)(const BackwardProblem &problem, void *stream);  // nullptr: no backward kernel
    BackwardWorkspaces (*workspaces)(const BackwardProblem &problem);      // likewise
    int (*attributes)(KernelAttributes &out);
    const char *(*error_string)(int error);
};

template <typename Config>
struct KernelKey {
    Config config;
    typename Description<Config>::Traits traits;
    int target;
    uint64_t mod;  // its digest; 0: none

    auto operator<=>(const KernelKey &) const = default;
};

// Whether the kernels of a configuration compute gradients: their record says which problem they take.
template <typename Config>
inline constexpr bool is_backward =
    std::is_same_v<typename Description<Config>::Record, BackwardKernelRecord<Config>>;

// Nodes of a map keep their address: Python holds pointers into it.
template <typename Config>
    requires(!is_backward<Config>)
inline std::map<KernelKey<Config>, Kernel> forward_kernels;

template <typename Config>
    requires(is_backward<Config>)
inline std::map<KernelKey<Config>, Kernel> backward_kernels;

// The loaded kernels of a configuration type, of either direction.
template <typename Config>
std::map<KernelKey<Config>, Kernel> &loaded_kernels() {
    if constexpr (is_backward<Config>) {
        return backward_kernels<Config>;
    } else {
        return forward_kernels<Config>;
    }
}

// Head size of V and O; families whose configuration has none of its own use Q's.
template <typename Config>
int d_head_v(const Config &config) {
    if constexpr (requires { config.d_head_v; }) {
        return config.d_head_v;
    } else {
        return config.d_head;
    }
}

// The record of a library at a place; throws where the library does not hold what a record promises.
template <typename Config>
const typename Description<Config>::Record &record_at(const KernelLibrary &library, int i) {
    const auto *const record = static_cast<const typename Description<Config>::Record *>(library.records[i]);
    bool whole = record != nullptr && record->load != nullptr && record->launch != nullptr &&
                 record->attributes != nullptr && record->mod.n_numbers >= 0 && record->mod.n_tensors >= 0;
    if constexpr (is_backward<Config>) whole = whole && record->workspaces != nullptr;
    if (!whole) {
        throw std::runtime_error("its record " + std::to_string(i) + " of " +
                                 std::to_string(library.n_kernels) + " is empty or lacks a function");
    }
    return *record;
}

// Files the kernels of a library, all or, with an exception, none; returns how many were new.
template <typename Config>
int file_records(const KernelLibrary &library) {
    if (library.n_kernels < 0 ||
        (library.n_kernels > 0 && (library.records == nullptr || library.error_string == nullptr))) {
        throw std::runtime_error("it announces " + std::to_string(library.n_kernels) +
                                 " kernels without records or without texts of errors");
    }
    for (int i = 0; i < library.n_kernels; ++i) record_at<Config>(library, i);
    int n_new = 0;
    for (int i = 0; i < library.n_kernels; ++i) {
        const auto &record = record_at<Config>(library, i);
        Kernel kernel{
            .family = Description<Config>::family,
            .direction = Description<Config>::direction,
            .target = record.target,
            .d_head = record.config.d_head,
            .d_head_v = d_head_v(record.config),
            .padded_head = record.traits.padded_head,
            .mod = record.mod,
            .n_threads = record.n_threads,
            .smem_bytes = record.smem_bytes,
            .load = record.load,
            .attributes = record.attributes,
            .error_string = library.error_string,
        };
        if constexpr (is_backward<Config>) {
            kernel.launch_backward = record.launch;
            kernel.workspaces = record.workspaces;
        } else {
            kernel.launch = record.launch;
            kernel.find_tiles = record.find_tiles;
        }
        n_new += loaded_kernels<Config>()
                     .try_emplace({record.config, record.traits, record.target, record.mod.digest}, kernel)
                     .second;
    }
    return n_new;
}

// Files what an open library presents. Throws std::runtime_error with the reason where it is no library of
// this ABI.
inline int file_library(void *handle) {
    using EntryPoint = const KernelLibrary *(*)();
    const auto entry_point = reinterpret_cast<EntryPoint>(dlsym(handle, kKernelLibrarySymbol));
    const std::string name = kKernelLibrarySymbol;
    if (entry_point == nullptr) throw std::runtime_error("no kernel library: it does not export " + name);
    const KernelLibrary *const library = entry_point();
    if (library == nullptr) throw std::runtime_error("no kernel library: its " + name + "() returns NULL");
    if (library->abi != kAbiVersion) {
        throw std::runtime_error(
            "built for interface version " + std::to_string(library->abi) + ", this binding speaks version " +
            std::to_string(kAbiVersion) +
            "; remove the file, so that it is built again; in a checkout build the binding "
            "again first: python setup.py build_ext --inplace");
    }
    if (library->family == nullptr || library->direction == nullptr) {
        throw std::runtime_error("it names no kernel family or no direction");
    }
    const std::string family = library->family, direction = library->direction;
    int n_new = 0;
    const bool known = any_config([&]<typename Config>() {
        if (family != Description<Config>::family || direction != Description<Config>::direction) {
            return false;
        }
        n_new = file_records<Config>(*library);
        return true;
    });
    if (!known) {
        throw std::runtime_error("kernels of family '" + family + "', direction '" + direction +
                                 "', are unknown to this binding");
    }
    return n_new;
}

// Opens a kernel library and files its kernels; a kernel that is filed already stays as it is.
// Returns how many were new. Throws std::runtime_error where the file is no library of this ABI.
inline int load_library(const std::string &path) {
    void *const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char *const reason = dlerror();
        throw std::runtime_error("cannot load the kernel library: " + (reason == nullptr ? path : reason));
    }
    try {
        return file_library(handle);
    } catch (const std::runtime_error &error) {
        dlclose(handle);
        throw std::runtime_error(path + ": " + error.what());
    }
}

}  // namespace flash::binding

// A launch that was just made, as Python tells of it, into one that can be made again.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding/given_call.hpp"
#include "binding/python.hpp"
#include "binding/registry.hpp"
#include "binding/remembered_launch.hpp"
#include "binding/remembered_passes.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {

inline constexpr const char *kRemember =
    "remember(given, made, makers, launch, arguments, device, label, kept=None)\n\n"
    "Files a launch that has just been made; says whether it can be made again from its tensors.\n\n"
    "given: the call's arguments, as the table is called with them.\n"
    "made: (out, lse, workspace), or (dq, dk, dv, workspace), each a tensor that was made for the call, or "
    "None.\n"
    "makers: for each of these a function without arguments that makes it anew, or None.\n"
    "launch: of a Kernel, or its launch_backward. arguments: what it was given. device: index of the "
    "tensors' device.\n"
    "label: what `last` is to give once this launch is made again. kept: what has to live as long.";

// The items of a tuple, borrowed from it.
inline std::vector<PyObject *> items_of(PyObject *tuple) {
    std::vector<PyObject *> items(PyTuple_Size(tuple));
    for (std::size_t i = 0; i < items.size(); ++i) items[i] = PyTuple_GetItem(tuple, i);
    return items;
}

// What `remember` was given; nullptr where the launch cannot be made again from the call's tensors alone.
template <typename Pass>
std::shared_ptr<const RememberedLaunch<Pass>> launch_to_remember(PyObject *args) {
    constexpr auto &kMade = Pass::kMade;
    PyObject *given_args, *made_args, *maker_args, *function, *launch_args, *label, *kept = nullptr;
    long device;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!lO|O:remember", &PyTuple_Type, &given_args, &PyTuple_Type,
                          &made_args, &PyTuple_Type, &maker_args, &function, &PyTuple_Type, &launch_args,
                          &device, &label, &kept)) {
        throw PythonError{};
    }
    const auto made = items_of(made_args), makers = items_of(maker_args);
    if (made.size() != kMade.size() || makers.size() != kMade.size()) {
        raise_error(PyExc_TypeError, "remember: made and makers are tuples of %zd: %s", kMade.size(),
                    Pass::kMadeNames);
    }
    for (std::size_t i = 0; i < kMade.size(); ++i) {
        if (made[i] == Py_None || PyCallable_Check(makers[i])) continue;
        raise_error(PyExc_TypeError,
                    "remember: makers[%zd] is %R; made[%zd] is given, so it must be a function", i, makers[i],
                    i);
    }
    const Kernel *const kernel = Pass::kernel_of_launch(function);
    if (kernel == nullptr) raise_error(PyExc_TypeError, "remember: launch is not the launch of a Kernel");
    const auto arguments = items_of(launch_args);

    const auto launch = std::make_shared<RememberedLaunch<Pass>>();
    launch->kernel = kernel;
    auto told = Pass::read(*kernel, arguments.data(), arguments.size());
    launch->problem = told.problem;
    launch->captured = std::move(told.captured);
    launch->kept = share(kept);
    launch->device = device;
    launch->label = share(label);

    const auto given_items = items_of(given_args);
    GivenCall<Pass> given;
    if (!given.read(given_items.data(), given_items.size())) return nullptr;
    // A kernel with a mod reads the captured tensors themselves: the launch was told of none that was made
    // for it. Of another kernel they only say what is kept.
    const auto &captured = launch->captured.tensors();
    if (kernel->mod.digest != 0) {
        if (given.n_captured != static_cast<int>(captured.size())) return nullptr;
        for (int i = 0; i < given.n_captured; ++i) {
            if (captured[i].data != given.captured[i]) return nullptr;
        }
    }
    std::array<TensorFacts, Pass::kSlots> tensors;
    std::array<bool, Pass::kSlots> there{};
    std::copy(given.tensors.begin(), given.tensors.end(), tensors.begin());
    std::copy(given.is_given.begin(), given.is_given.end(), there.begin());
    for (std::size_t i = 0; i < kMade.size(); ++i) {
        const Slot slot = kMade[i];
        if (made[i] == Py_None) continue;
        if (there[slot] || !tensor_reader().read(made[i], tensors[slot])) return nullptr;
        there[slot] = true;
        launch->makers[slot] = share(makers[i]);
    }
    if constexpr (std::is_same_v<Pass, ForwardPass>) {
        if (!there[Pass::kOut]) {
            raise_error(PyExc_TypeError, "remember: no out; it is given by the caller or made");
        }
    }
    if (!launch->take_offsets(tensors, there) || !launch->take_tiles(tensors, there)) return nullptr;
    launch->layout = given.layout;
    return launch;
}

}  // namespace flash::binding

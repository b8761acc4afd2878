// A launch that was just made, as Python tells of it, into one that can be made again.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "binding/given_call.hpp"
#include "binding/kernel_type.hpp"
#include "binding/launch.hpp"
#include "binding/python.hpp"
#include "binding/remembered_launch.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {

inline constexpr const char *kRemember =
    "remember(given, made, makers, launch, arguments, device, label)\n\n"
    "Files a launch that has just been made; says whether it can be made again from its tensors.\n\n"
    "given: the call's arguments, as the table is called with them.\n"
    "made: (out, lse, workspace), each a tensor that was made for the call, or None.\n"
    "makers: for each of the three a function without arguments that makes it anew, or None.\n"
    "launch: of a Kernel. arguments: what it was given. device: index of the tensors' device.\n"
    "label: what `last` is to give once this launch is made again.";

// The items of a tuple, borrowed from it.
inline std::vector<PyObject *> items_of(PyObject *tuple) {
    std::vector<PyObject *> items(PyTuple_Size(tuple));
    for (std::size_t i = 0; i < items.size(); ++i) items[i] = PyTuple_GetItem(tuple, i);
    return items;
}

// What `remember` was given; nullptr where the launch cannot be made again from the call's tensors alone.
inline std::shared_ptr<const RememberedLaunch> launch_to_remember(PyObject *args) {
    PyObject *given_args, *made_args, *maker_args, *function, *launch_args, *label;
    long device;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!lO:remember", &PyTuple_Type, &given_args, &PyTuple_Type, &made_args,
                          &PyTuple_Type, &maker_args, &function, &PyTuple_Type, &launch_args, &device,
                          &label)) {
        throw PythonError{};
    }
    const auto made = items_of(made_args), makers = items_of(maker_args);
    if (made.size() != kMade.size() || makers.size() != kMade.size()) {
        raise_error(PyExc_TypeError, "remember: made and makers are tuples of 3: out, lse, workspace");
    }
    for (std::size_t i = 0; i < kMade.size(); ++i) {
        if (made[i] == Py_None || PyCallable_Check(makers[i])) continue;
        raise_error(PyExc_TypeError,
                    "remember: makers[%zd] is %R; made[%zd] is given, so it must be a function", i, makers[i],
                    i);
    }
    const Kernel *const kernel = kernel_of_launch(function);
    if (kernel == nullptr) raise_error(PyExc_TypeError, "remember: launch is not the launch of a Kernel");
    if (kernel->mod.digest != 0) return nullptr;
    const auto arguments = items_of(launch_args);

    const auto launch = std::make_shared<RememberedLaunch>();
    launch->kernel = kernel;
    launch->problem = read_launch(*kernel, arguments.data(), arguments.size()).problem;
    launch->device = device;
    launch->label = share(label);

    const auto given_items = items_of(given_args);
    GivenCall given;
    if (!given.read(given_items.data(), given_items.size())) return nullptr;
    std::array<TensorFacts, kSlots> tensors;
    std::array<bool, kSlots> there{};
    std::copy(given.tensors.begin(), given.tensors.end(), tensors.begin());
    std::copy(given.is_given.begin(), given.is_given.end(), there.begin());
    for (std::size_t i = 0; i < kMade.size(); ++i) {
        const Slot slot = kMade[i];
        if (made[i] == Py_None) continue;
        if (there[slot] || !tensor_reader().read(made[i], tensors[slot])) return nullptr;
        there[slot] = true;
        launch->makers[slot] = share(makers[i]);
    }
    if (!there[kOut]) raise_error(PyExc_TypeError, "remember: no out; it is given by the caller or made");
    if (!launch->take_offsets(tensors, there)) return nullptr;
    launch->layout = given.layout;
    return launch;
}

}  // namespace flash::binding

// Calls that were checked, chosen and launched before, found again by the layouts of their tensors.
//
// All that the checks, the choice of a kernel and the arguments of its launch depend on is the call's
// options, its tensors' types, devices, sizes, strides and alignment, and a few numbers. Python keeps one
// table for each set of options; a table maps the rest to a launch whose pointers alone are new in each call.
// So a call that has been made before runs no check again but those of what may still differ: whether an
// input wants a gradient or has lost its memory, whether an output given by the caller overlaps an input,
// which device is the current one.
//
// `table(q, k, v, out, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, seqused_q, *numbers,
// contents, *captured)`, any of the last ones left out, gives the result, or None: not known here, or not as
// it was. The caller then goes the long way, which also says what is wrong, and `remember`s the call.
// `contents` is a tuple of places among the captured tensors: of these the launch keeps something that was
// found from what is in them (given_call.hpp). A table of the backward pass takes what that pass has
// (remembered_passes.hpp), and gives the gradients.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "binding/given_call.hpp"
#include "binding/python.hpp"
#include "binding/remembered_launch.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {

template <typename Pass>
class CallTable {
    using Launch = RememberedLaunch<Pass>;

  public:
    // The result, or None.
    Reference call(PyObject *const *args, Py_ssize_t n_args) {
        GivenCall<Pass> given;
        if (!given.read(args, n_args)) return share(Py_None);
        // Shared: making tensors may run any Python code, which may forget the launch.
        const std::shared_ptr<const Launch> found = find(given.layout);
        if (found == nullptr || given.written_may_overlap()) return share(Py_None);
        const CurrentDevice guard(tensor_reader(), found->device);
        std::array<char *, Pass::kSlots> addresses;
        for (int slot = 0; slot < Pass::kGivenSlots; ++slot) addresses[slot] = given.tensors[slot].data;
        std::array<Reference, Pass::kSlots> made;
        for (const auto slot : Pass::kMade) {
            if (found->makers[slot] == nullptr) continue;
            made[slot] = checked(PyObject_CallNoArgs(found->makers[slot].get()));
            addresses[slot] = tensor_reader().address_of(made[slot].get());
        }
        void *const stream = tensor_reader().current_stream(found->device);
        // A failure is repeated, and explained, by the long way.
        if (launch(*found, given, addresses, stream) != 0) return share(Py_None);
        last_label_ = share(found->label.get());
        return Pass::result(made, args);
    }

    void remember(std::shared_ptr<const Launch> launch) {
        if (find(launch->layout) != nullptr) return;
        Launches forgotten;
        if (launches_.size() >= kMaxLaunches) forgotten.swap(launches_);
        const uint64_t hash = launch->layout.hash();
        launches_.emplace(hash, std::move(launch));
    }

    // Forgets all. What the launches held is given back last, when the table is whole again: that may run any
    // Python code, which may call this very table.
    void clear() {
        const Launches forgotten = std::exchange(launches_, {});
        const Reference label = std::move(last_label_);
    }

    // For Python's garbage collector: visits every object that the table holds.
    int traverse(visitproc visit, void *arg) const {
        for (const auto &[hash, launch] : launches_) {
            if (const int stop = launch->traverse(visit, arg); stop != 0) return stop;
        }
        Py_VISIT(last_label_.get());
        return 0;
    }

    std::size_t size() const { return launches_.size(); }

    PyObject *last_label() const { return last_label_.get(); }

  private:
    static int launch(const Launch &known, const GivenCall<Pass> &given,
                      const std::array<char *, Pass::kSlots> &addresses, void *stream) {
        auto problem = known.problem_at(addresses);
        if (known.kernel->mod.digest == 0) return Pass::launch(*known.kernel, problem, stream);
        CapturedValues captured = known.captured;
        captured.move_tensors(given.captured);
        if (known.tiles_offset != kNoPointer) {
            captured.move_tiles(addresses[Pass::kWorkspace] + known.tiles_offset);
        }
        const ModArguments mod = captured.arguments();
        problem.mod = &mod;
        return Pass::launch(*known.kernel, problem, stream);
    }

    using Launches = std::unordered_multimap<uint64_t, std::shared_ptr<const Launch>>;
    static constexpr std::size_t kMaxLaunches = 256;

    std::shared_ptr<const Launch> find(const CallLayout &layout) const {
        const auto [begin, end] = launches_.equal_range(layout.hash());
        for (auto entry = begin; entry != end; ++entry) {
            if (entry->second->layout == layout) return entry->second;
        }
        return nullptr;
    }

    Launches launches_;
    Reference last_label_;
};

}  // namespace flash::binding

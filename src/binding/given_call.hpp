// The arguments of a call as a table of calls compares them: tensors by their layouts, numbers by their
// values.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "binding/python.hpp"
#include "binding/remembered_passes.hpp"
#include "binding/tensors.hpp"

namespace flash::binding {

// What is compared of a call: a word for a tensor that is not there, 3 + 2 rank words for one that is.
class CallLayout {
  public:
    void add(uint64_t word) { words_[size_++] = word; }

    void add(const TensorFacts &facts) {
        constexpr uintptr_t kAlignment = 16;  // bytes; kernels copy chunks of this size
        const bool aligned = reinterpret_cast<uintptr_t>(facts.data) % kAlignment == 0;
        add(uint64_t(1) << 32 | uint64_t(aligned) << 16 | uint64_t(facts.rank));
        add(facts.dtype);
        add(facts.device);
        for (int i = 0; i < facts.rank; ++i) {
            add(static_cast<uint64_t>(facts.shape[i]));
            add(static_cast<uint64_t>(facts.strides[i]));
        }
    }

    uint64_t hash() const {
        uint64_t hash = size_;
        for (int i = 0; i < size_; ++i) {
            hash = (hash ^ words_[i]) * 0x9E3779B97F4A7C15ull;
            hash ^= hash >> 32;
        }
        return hash;
    }

    bool operator==(const CallLayout &other) const {
        return size_ == other.size_ &&
               std::equal(words_.begin(), words_.begin() + size_, other.words_.begin());
    }

  private:
    int size_ = 0;
    std::array<uint64_t,
               (kMostGivenSlots + kMaxCaptured) * (3 + 2 * kMaxRank) + kMaxNumbers + kMaxContentWords>
        words_;
};

// The arguments of a call of one pass, as far as they are tensors and numbers.
template <typename Pass>
struct GivenCall {
    static constexpr int kGivenSlots = Pass::kGivenSlots;

    CallLayout layout;
    std::array<TensorFacts, kGivenSlots> tensors;
    std::array<bool, kGivenSlots> is_given{};
    std::array<char *, kMaxCaptured> captured;  // where captured tensors are
    std::array<int64_t, kMaxCaptured> spans;    // and how long
    int n_captured = 0;

    // False without a Python error where it is no call that a table may know.
    bool read(PyObject *const *args, Py_ssize_t n_args) {
        if (n_args < Pass::kFewest || n_args > kGivenSlots + kMaxNumbers + 1 + kMaxCaptured) {
            return false;
        }
        const Unheard unheard(tensor_reader());
        for (Py_ssize_t slot = 0; slot < kGivenSlots; ++slot) {
            if (slot >= n_args || args[slot] == Py_None) {
                layout.add(0);
                continue;
            }
            if (!tensor_reader().read(args[slot], tensors[slot])) return false;
            if (Pass::may_be_negated(slot) && tensor_reader().is_negated(args[slot])) return false;
            is_given[slot] = true;
            layout.add(tensors[slot]);
        }
        int n_numbers = 0;
        PyObject *places = nullptr;
        for (Py_ssize_t i = kGivenSlots; i < n_args; ++i) {
            if (PyTuple_CheckExact(args[i])) {
                places = args[i];
                continue;
            }
            if (!PyLong_CheckExact(args[i])) {
                if (!read_captured(args[i])) return false;
                continue;
            }
            if (n_numbers++ == kMaxNumbers) return false;
            const long long number = PyLong_AsLongLong(args[i]);
            if (PyErr_Occurred()) {
                PyErr_Clear();
                return false;
            }
            layout.add(static_cast<uint64_t>(number));
        }
        return places == nullptr || read_contents(places);
    }

    // Whether what the caller gives to be written may share memory with an input. Exact for dense tensors;
    // views that interleave count as overlapping.
    bool written_may_overlap() const {
        for (const int slot : Pass::kMade) {
            if (slot < kGivenSlots && is_given[slot] && overlaps_another(slot)) return true;
        }
        return false;
    }

  private:
    static constexpr uintptr_t kLastDefaultStream = 1;

    bool read_captured(PyObject *object) {
        TensorFacts facts;
        if (n_captured == kMaxCaptured || !tensor_reader().read_captured(object, facts)) return false;
        if (!facts.is_whole && tensor_reader().is_negated(object)) return false;
        layout.add(facts);
        spans[n_captured] = facts.span_bytes();
        objects_[n_captured] = object;
        captured[n_captured++] = facts.data;
        return true;
    }

    // What was found from the contents of the captured tensors at these places holds for work on the same
    // stream, as long as they lie where they lay and nobody has written to them. A graph is run again when
    // that may have changed.
    bool read_contents(PyObject *places) {
        const TensorReader &reader = tensor_reader();
        const TensorFacts &q = tensors[Pass::kQ];
        const long device = q.on_cuda ? static_cast<long>(static_cast<int32_t>(q.device)) : -1;
        const auto stream = reinterpret_cast<uintptr_t>(reader.current_stream(device));
        // CUDA refuses to capture the default stream: 0, or 1 (cudaStreamLegacy).
        if (stream > kLastDefaultStream && reader.is_capturing()) return false;
        layout.add(stream);
        const Py_ssize_t n = PyTuple_Size(places);
        if (n > kMaxCaptured) return false;
        for (Py_ssize_t i = 0; i < n; ++i) {
            const int64_t place = to_int64(PyTuple_GetItem(places, i));
            uint64_t version = 0;
            if (place < 0 || place >= n_captured || !reader.read_version(objects_[place], version)) {
                return false;
            }
            layout.add(version);
            layout.add(reinterpret_cast<uintptr_t>(captured[place]));
        }
        return true;
    }

    bool overlaps_another(int slot) const {
        const char *const begin = tensors[slot].data, *const end = begin + tensors[slot].span_bytes();
        for (int other = 0; other < kGivenSlots; ++other) {
            if (other == slot || !is_given[other]) continue;
            const char *const data = tensors[other].data;
            if (begin < data + tensors[other].span_bytes() && data < end) return true;
        }
        for (int i = 0; i < n_captured; ++i) {
            if (begin < captured[i] + spans[i] && captured[i] < end) return true;
        }
        return false;
    }

    std::array<PyObject *, kMaxCaptured> objects_;  // the captured tensors
};

}  // namespace flash::binding

// The counters from which the blocks of a launch take their items (scheduler.cuh).
//
// A counter may serve one launch at a time; the launch leaves it at zero for the next. Which launches may run
// at the same time is known where they are issued:
//   - Launches into one stream follow each other: every stream has one counter, found by the stream's
//     id, which is never used again (its handle is).
//   - A captured launch may be replayed into any stream, next to anything but itself: replays of one
//     executable graph follow each other. It gets a counter of its own, which the graph owns (a CUDA
//     user object) and gives back when the graph and all that was instantiated from it are gone.
// One captured graph instantiated twice and replayed at once would share counters, as it shares the output it
// writes: both are races of the caller.
//
// Counters live in one device allocation, made when a kernel is loaded: launching allocates nothing. When it
// is used up, `acquire` gives nullptr, and items go round statically: slower under a causal mask, never
// wrong.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "common/scheduler_counter.cuh"

namespace flash {

inline constexpr int kMaxDevices = 64;

class SchedulerCounters {
  public:
    // Of the current device; nullptr in `counters` where there are more devices than expected.
    static cudaError_t of_current_device(SchedulerCounters *&counters) {
        int device = 0;
        if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
        if (device >= kMaxDevices) return cudaErrorInvalidDevice;
        // Never destroyed: graphs give counters back as late as at the end of the process.
        static auto &all = *new std::array<SchedulerCounters, kMaxDevices>;
        counters = &all[device];
        return cudaSuccess;
    }

    // Allocates, the first time. Called when a kernel is loaded, outside of any capture.
    cudaError_t prepare() {
        const std::lock_guard lock(mutex_);
        if (memory_ != nullptr) return cudaSuccess;
        SchedulerCounter *memory = nullptr;
        if (const cudaError_t error = cudaMalloc(&memory, kCounters * sizeof(SchedulerCounter));
            error != cudaSuccess) {
            return error;
        }
        if (const cudaError_t error = cudaMemset(memory, 0, kCounters * sizeof(SchedulerCounter));
            error != cudaSuccess) {
            return error;
        }
        // The memset runs in the default stream, for which other streams need not wait.
        if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
        memory_ = memory;
        return cudaSuccess;
    }

    // The counter for a launch into `stream`, or nullptr: there is none left.
    cudaError_t acquire(cudaStream_t stream, SchedulerCounter *&counter) {
        counter = nullptr;
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        if (const cudaError_t error = cudaStreamIsCapturing(stream, &status); error != cudaSuccess)
            return error;
        return status == cudaStreamCaptureStatusNone ? acquire_for_stream(stream, counter)
                                                     : acquire_for_graph(stream, counter);
    }

  private:
    static constexpr int kCounters = 16384;

    struct GraphLease {
        SchedulerCounters *owner;
        SchedulerCounter *counter;
    };

    cudaError_t acquire_for_stream(cudaStream_t stream, SchedulerCounter *&counter) {
        unsigned long long id = 0;
        if (const cudaError_t error = cudaStreamGetId(stream, &id); error != cudaSuccess) return error;
        const std::lock_guard lock(mutex_);
        const auto found = of_stream_.find(id);
        if (found != of_stream_.end()) {
            counter = found->second;
        } else if ((counter = take()) != nullptr) {
            of_stream_.emplace(id, counter);
        }
        return cudaSuccess;
    }

    cudaError_t acquire_for_graph(cudaStream_t stream, SchedulerCounter *&counter) {
        cudaStreamCaptureStatus status;
        cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
        cudaError_t error =
            cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr);
#else
        cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr);
#endif
        if (error != cudaSuccess) return error;
        SchedulerCounter *taken = nullptr;
        {
            const std::lock_guard lock(mutex_);
            taken = take();
        }
        if (taken == nullptr) return cudaSuccess;
        auto *lease = new GraphLease{this, taken};
        cudaUserObject_t object = nullptr;
        error = cudaUserObjectCreate(&object, lease, &SchedulerCounters::end_lease, 1,
                                     cudaUserObjectNoDestructorSync);
        if (error != cudaSuccess) {
            end_lease(lease);
            return error;
        }
        error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
        if (error != cudaSuccess) {
            cudaUserObjectRelease(object);  // ends the lease
            return error;
        }
        counter = taken;
        return cudaSuccess;
    }

    // Called by CUDA when a graph is gone; may not call CUDA.
    static void CUDART_CB end_lease(void *argument) {
        auto *lease = static_cast<GraphLease *>(argument);
        {
            const std::lock_guard lock(lease->owner->mutex_);
            lease->owner->returned_.push_back(lease->counter);
        }
        delete lease;
    }

    // Counters never used before come first, then the one returned longest ago.
    SchedulerCounter *take() {
        if (memory_ == nullptr) return nullptr;
        if (n_used_ < kCounters) return memory_ + n_used_++;
        if (returned_.empty()) return nullptr;
        SchedulerCounter *counter = returned_.front();
        returned_.pop_front();
        return counter;
    }

    std::mutex mutex_;
    SchedulerCounter *memory_ = nullptr;
    int n_used_ = 0;
    std::deque<SchedulerCounter *> returned_;
    std::unordered_map<unsigned long long, SchedulerCounter *> of_stream_;
};

}  // namespace flash

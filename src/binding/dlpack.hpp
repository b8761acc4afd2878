// DLPack's binary interface, as far as the binding reads it: the C exchange API of version 1.3.
#pragma once

#include <cstdint>

namespace flash::binding::dlpack {

struct Device {
    int32_t type, index;
};
struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct Tensor {
    void *data;
    Device device;
    int32_t rank;
    DataType dtype;
    int64_t *shape, *strides;  // strides in elements; nullptr: contiguous
    uint64_t byte_offset;
};
struct ExchangeHeader {
    uint32_t major, minor;
    ExchangeHeader *older;
};
struct ExchangeApi {
    ExchangeHeader header;
    void *managed_tensor_allocator, *managed_tensor_from_object, *managed_tensor_to_object;
    int (*tensor_from_object)(void *object, Tensor *out);  // a view that lives as long as the object
    int (*current_work_stream)(int32_t device_type, int32_t device_index, void **out);
};

inline constexpr const char *kCapsule = "dlpack_exchange_api";
inline constexpr uint32_t kMajor = 1;
inline constexpr int32_t kCuda = 2;  // type of a device

// Whether elements are whole numbers or truth values: codes of signed, unsigned and bool.
constexpr bool is_whole(DataType type) { return type.code == 0 || type.code == 1 || type.code == 6; }

}  // namespace flash::binding::dlpack

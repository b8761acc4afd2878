// What a PyTorch without CUDA lacks to believe in a GPU: a device guard, of one device, which is always the
// current one, with one stream; and the hooks that say that CUDA is there. Autograd asks both about every
// tensor that says that it is on a GPU. Random numbers are the CPU's.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kGpu{c10::DeviceType::CUDA, 0};

struct OneDevice final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kGpu.type(); }
    c10::Device exchangeDevice(c10::Device) const override { return kGpu; }
    c10::Device getDevice() const override { return kGpu; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kGpu); }
    c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream) const override { return getStream(kGpu); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    bool queryStream(const c10::Stream &) const override { return true; }
    void synchronizeStream(const c10::Stream &) const override {}
    void synchronizeDevice(c10::DeviceIndex) const override {}
};

const c10::impl::DeviceGuardImplRegistrar registrar(kGpu.type(), new OneDevice);

struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isAvailable() const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::Device getDeviceFromPtr(void *) const override { return kGpu; }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override {
        return at::detail::createCPUGenerator();
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace

// It says at compile time which accelerators there are. This one stands before it in the loader's order.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return kGpu.type(); }
}  // namespace at::accelerator

namespace at {
using ::CUDAHooks;  // PyTorch asks for them by this name
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

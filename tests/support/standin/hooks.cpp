// What torch asks of an accelerator as a whole.
#include "standin.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pthread.h>

#include <atomic>

namespace standin {

namespace {
std::atomic<bool> used{false}, forked_while_used{false};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return in_use(); }
  void init() const override { use(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { guard().setDevice({kDevice, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  c10::Device getDeviceFromPtr(void* address) const override {
    const auto block = block_at(address);
    TORCH_CHECK(block && !block->pinned, "standin: not an address of the device");
    return {kDevice, block->device};
  }
  bool isPinnedPtr(const void* address) const override {
    if (!maybe_pinned(address))
      return false;
    const auto block = block_at(address);
    return block && block->pinned;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = device_allocator()->allocate(bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept)
      device_allocator()->copy_data(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }

 private:
  static const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(kDevice); }
};
}  // namespace

void use() {
  TORCH_CHECK(
      !forked_while_used, "Cannot re-initialize standin in forked subprocess. To use it with multiprocessing, you must "
      "use the 'spawn' start method");
  used = true;
}

bool in_use() {
  return used;
}

bool in_bad_fork() {
  return forked_while_used;
}

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  pthread_atfork(nullptr, nullptr, [] {
    if (used)
      forked_while_used = true;
  });
}

}  // namespace standin

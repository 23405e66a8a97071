// The device's random generators: each has numbers of its own, which a generator of the CPU makes.
#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>

namespace standin {

namespace {
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator within = at::detail::createCPUGenerator())
      : c10::GeneratorImpl({kDevice, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(within)) {}

  // Kernels draw under the inner generator's lock; whoever calls these holds only the outer's.
  void set_current_seed(uint64_t seed) override {
    std::lock_guard<std::mutex> held(inner.mutex());
    inner.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    std::lock_guard<std::mutex> held(inner.mutex());
    return inner.current_seed();
  }
  uint64_t seed() override {
    std::lock_guard<std::mutex> held(inner.mutex());
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    std::lock_guard<std::mutex> held(inner.mutex());
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    std::lock_guard<std::mutex> held(inner.mutex());
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "standin: a generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "standin: a generator has no offset"); }

  mutable at::Generator inner;

 private:
  Generator* clone_impl() const override {
    std::lock_guard<std::mutex> held(inner.mutex());
    return new Generator(device_.index(), inner.clone());
  }
};
}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto made = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < kMostDevices; ++i)
      all.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return all;
  }();
  if (device == -1)
    device = current_device();
  check_index(device);
  return made[device];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device == -1 ? current_device() : device);
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kDevice, "Expected a 'standin' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace standin

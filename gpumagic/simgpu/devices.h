// The simulated devices as torch knows them: the current device, streams, allocators, generators and hooks, and the
// account of the copies between them.
#pragma once

#include "allocator.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>
#include <map>

namespace simgpu {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;

inline bool on_card(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSimgpu;
}

// ---- Copies -----------------------------------------------------------------------------------------------

struct Copy {
  Device source;
  Device target;
  size_t nbytes;
};

struct Ledger {
  std::mutex mutex;
  std::vector<Copy> copies;
};

inline Ledger& ledger() {
  static Ledger* instance = new Ledger();
  return *instance;
}

inline void count_copy(Device source, Device target, size_t nbytes) {
  if (source == target || nbytes == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().copies.push_back({source, target, nbytes});
}

// ---- Current device, streams and events -------------------------------------------------------------------

inline thread_local DeviceIndex current_index = 0;

inline DeviceIndex set_current(DeviceIndex index) {
  const DeviceIndex previous = current_index;
  if (index >= 0 && index != previous) {
    check_ordinal(index);
    current_index = index;
  }
  return previous;
}

inline Device resolve(std::optional<Device> device) {
  const DeviceIndex index = device.has_value() && device->has_index() ? device->index() : current_index;
  check_ordinal(index);
  return {kSimgpu, index};
}

// Work is done when the call returns, so there is one stream and an event is the moment it was recorded.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Clock = std::chrono::steady_clock;

  c10::DeviceType type() const override {
    return kSimgpu;
  }
  Device exchangeDevice(Device device) const override {
    return {kSimgpu, set_current(device.index())};
  }
  Device getDevice() const override {
    return {kSimgpu, current_index};
  }
  void setDevice(Device device) const override {
    set_current(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_index = device.index() >= 0 ? device.index() : current_index;
  }
  c10::Stream getStream(Device device) const SIMGPU_NOEXCEPT override {
    return c10::Stream(c10::Stream::DEFAULT, resolve(device));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const SIMGPU_NOEXCEPT override {
    return stream;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point();
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    const auto span = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(span).count();
  }
  DeviceIndex deviceCount() const noexcept override {
    return cards().count;
  }
#if SIMGPU_TORCH_AT_LEAST(2, 10)
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }
#endif
};

// ---- Allocators -------------------------------------------------------------------------------------------

// torch's view of the cards' memory.
struct CardAllocator final
#if SIMGPU_TORCH_AT_LEAST(2, 9)
    : c10::DeviceAllocator
#else
    : c10::Allocator
#endif
{
  c10::DataPtr allocate(size_t size) override {
    return simgpu::allocate(current_index, size, {kSimgpu, current_index});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
#if SIMGPU_TORCH_AT_LEAST(2, 9)
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex index = 0; index < cards().count; ++index) {
      card(index).empty_cache();
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  DeviceStats getDeviceStats(DeviceIndex index) override {
    return card(index).stats();
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    card(index).reset_accumulated();
  }
  void resetPeakStats(DeviceIndex index) override {
    card(index).reset_peaks();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) {
    return {card(index).capacity() - card(index).reserved(), card(index).capacity()};
  }
#endif
};

inline CardAllocator& card_allocator() {
  static CardAllocator* instance = new CardAllocator();
  return *instance;
}

// Grows a card's storage while a CPU kernel holds it as host memory (`out=` tensors that have to be resized).
struct LentAllocator final : c10::Allocator {
  explicit LentAllocator(DeviceIndex index) : index(index) {}
  c10::DataPtr allocate(size_t size) override {
    return simgpu::allocate(index, size, Device(c10::kCPU));
  }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
  const DeviceIndex index;
};

inline LentAllocator& lent_allocator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<LentAllocator*>();
    for (DeviceIndex i = 0; i < kMaxDevices; ++i) {
      made->push_back(new LentAllocator(i));
    }
    return made;
  }();
  return *(*all)[index];
}

// The card whose operator this thread is running, if any.
inline thread_local Card* running_on = nullptr;

// What the host may take for an operator without asking whether the card could hold it.
constexpr size_t kFreeOfHost = 64 * 1024 * 1024;

// The host's allocator, except that an operator on a card is refused a lot that the whole card could not hold. It
// would most likely be refused at the end, of its result; this spares the host from computing it first.
struct HostAllocator final : c10::Allocator {
  explicit HostAllocator(c10::Allocator* host) : host(host) {}
  c10::DataPtr allocate(size_t size) override {
    if (running_on != nullptr && size > std::max(running_on->capacity(), kFreeOfHost)) {
      running_on->give_back(running_on->take(size));
    }
    return host->allocate(size);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return host->raw_deleter();
  }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return host->is_simple_data_ptr(pointer);
  }
  void copy_data(void* target, const void* source, size_t count) const override {
    host->copy_data(target, source, count);
  }
  c10::Allocator* const host;
};

// Page-locked memory is ordinary host memory that is remembered as pinned.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* host = static_cast<char*>(size == 0 ? nullptr : c10::alloc_cpu(size));
    if (host != nullptr) {
      std::lock_guard<std::mutex> lock(mutex());
      ranges()[host] = host + size;
    }
    return {host, host, &forget, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &forget;
  }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
  static bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = ranges().upper_bound(pointer);
    return after != ranges().begin() && std::less<>()(pointer, std::prev(after)->second);
  }
  static std::mutex& mutex() {
    static auto* instance = new std::mutex();
    return *instance;
  }

 private:
  static std::map<const void*, const void*>& ranges() {
    static auto* instance = new std::map<const void*, const void*>();
    return *instance;
  }
  static void forget(void* host) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      ranges().erase(host);
    }
    c10::free_cpu(host);
  }
};

inline PinnedAllocator& pinned_allocator() {
  static PinnedAllocator* instance = new PinnedAllocator();
  return *instance;
}

// ---- Random numbers ---------------------------------------------------------------------------------------

// A card's generator. Kernels draw from the CPU generator inside it, so a seed gives the CPU's numbers.
struct CardGenerator final : c10::GeneratorImpl {
  explicit CardGenerator(DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(kSimgpu, index), DispatchKeySet(DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  CardGenerator* clone_impl() const override {
    return new CardGenerator(device().index(), host.clone());
  }
  at::Generator host;
};

inline const at::Generator& default_generator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (DeviceIndex i = 0; i < kMaxDevices; ++i) {
      made->push_back(at::make_generator<CardGenerator>(i));
      made->back().set_current_seed(c10::detail::getNonDeterministicRandom());
    }
    return made;
  }();
  check_ordinal(index);
  return (*all)[index];
}

inline at::Generator host_generator(const std::optional<at::Generator>& generator, Device device) {
  if (!generator.has_value() || !generator->defined()) {
    return host_generator(default_generator(device.index()), device);
  }
  TORCH_CHECK(
      generator->device().type() == kSimgpu,
      "Expected a 'simgpu' device type for generator but found '", generator->device().type(), "'");
  return static_cast<CardGenerator*>(generator->unsafeGetGeneratorImpl())->host;
}

// Lets a kernel that takes no generator draw from a card's, by putting its state into the CPU's default one.
struct BorrowedDefaultGenerator {
  explicit BorrowedDefaultGenerator(Device device)
      : host(at::detail::getDefaultCPUGenerator()),
        card(host_generator(std::nullopt, device)),
        saved(host.get_state()) {
    host.set_state(card.get_state());
  }
  ~BorrowedDefaultGenerator() {
    card.set_state(host.get_state());
    host.set_state(saved);
  }
  at::Generator host;
  at::Generator card;
  Tensor saved;
};

// ---- Hooks ------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const
#if SIMGPU_TORCH_AT_LEAST(2, 7)
      override
#endif
  {
    return true;
  }
  bool isAvailable() const
#if SIMGPU_TORCH_AT_LEAST(2, 7)
      override
#endif
  {
    return cards().count > 0;
  }
  bool hasPrimaryContext(DeviceIndex index) const override {
    return card(index).used();
  }
  DeviceIndex deviceCount() const override {
    return cards().count;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    set_current(index);
  }
  DeviceIndex getCurrentDevice() const override {
    return current_index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return set_current(index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return set_current(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index < 0 ? current_index : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<CardGenerator>(resolve(Device(kSimgpu, index)).index());
  }
  Device getDeviceFromPtr(void*) const override {
    return {kSimgpu, current_index};
  }
  bool isPinnedPtr(const void* pointer) const override {
    return PinnedAllocator::holds(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    const Device device = storage.device();
    c10::DataPtr resized = simgpu::allocate(device.index(), size, device);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept != 0) {
      std::memcpy(resized.mutable_get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(resized));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

}  // namespace simgpu

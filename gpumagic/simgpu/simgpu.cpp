// A simulated accelerator for PyTorch: the PrivateUse1 backend "simgpu".
//
// A tensor on a simulated card lives in host memory that only this backend hands out. To run an operator, its
// arguments are lent to ATen's CPU kernel as host tensors over the same memory, and what the kernel made is
// taken over by the card; nothing is copied, so the copies that are counted are exactly those a user's program
// asks for. Memory that a CPU kernel uses and frees within one operator is host memory and is not counted.
#include "allocator.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pthread.h>

#include <chrono>
#include <map>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace simgpu {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;

bool on_card(const Tensor& tensor) {
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

Ledger& ledger() {
  static Ledger* instance = new Ledger();
  return *instance;
}

void count_copy(Device source, Device target, size_t nbytes) {
  if (source == target || nbytes == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().copies.push_back({source, target, nbytes});
}

// ---- Current device, streams and events -------------------------------------------------------------------

thread_local DeviceIndex current_index = 0;

DeviceIndex set_current(DeviceIndex index) {
  const DeviceIndex previous = current_index;
  if (index >= 0 && index != previous) {
    check_ordinal(index);
    current_index = index;
  }
  return previous;
}

Device resolve(std::optional<Device> device) {
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
  c10::Stream getStream(Device device) const override {
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
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const
#if SIMGPU_TORCH_AT_LEAST(2, 6)
      override
#endif
  {}
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

CardAllocator& card_allocator() {
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

LentAllocator& lent_allocator(DeviceIndex index) {
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
thread_local Card* running_on = nullptr;

// The host's allocator, except that an operator on a card is refused what the whole card could not hold. It
// would be refused at the end anyway; this spares the host from computing it first.
struct HostAllocator final : c10::Allocator {
  explicit HostAllocator(c10::Allocator* host) : host(host) {}
  c10::DataPtr allocate(size_t size) override {
    if (running_on != nullptr && size > running_on->capacity()) {
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

PinnedAllocator& pinned_allocator() {
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

const at::Generator& default_generator(DeviceIndex index) {
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

at::Generator host_generator(const std::optional<at::Generator>& generator, Device device) {
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
  at::Generator getNewGenerator(DeviceIndex index) const
#if SIMGPU_TORCH_AT_LEAST(2, 6)
      override
#endif
  {
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

// ---- Lending a card's tensors to a CPU kernel -------------------------------------------------------------

void check_strided(const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_quantized() && !tensor.is_nested(),
      "simgpu has dense tensors only: no sparse, quantized or nested ones");
}

void copy_geometry(const Tensor& from, c10::TensorImpl* to) {
  if (to->sizes() != from.sizes() || to->strides() != from.strides()) {
    to->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  } else if (to->storage_offset() != from.storage_offset()) {
    to->set_storage_offset(from.storage_offset());
  }
  if (to->is_conj() != from.is_conj()) {
    to->_set_conj(from.is_conj());
  }
  if (to->is_neg() != from.is_neg()) {
    to->_set_neg(from.is_neg());
  }
}

Tensor view_of(const Storage& storage, DispatchKey key, const Tensor& like) {
  DispatchKeySet keys(key);
  if (like._is_zerotensor()) {
    keys = keys.add(DispatchKey::ZeroTensor);
  }
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

// One call of a CPU kernel on behalf of a card: `lend` before it, `take_back` what it returned, `settle` last.
class HostCall {
 public:
  explicit HostCall(Device device) : device_(device), guard_(device), outer_(running_on) {
    running_on = &card(device.index());
  }
  ~HostCall() {
    running_on = outer_;
  }
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  // The host's view of a card's tensor; host tensors pass unchanged.
  Tensor lend(const Tensor& tensor) {
    if (!on_card(tensor)) {
      return tensor;
    }
    auto known = lent_.find(tensor.unsafeGetTensorImpl());
    if (known != lent_.end()) {
      return known->second;
    }
    check_strided(tensor);
    Tensor host = view_of(lend_storage(tensor.storage()), DispatchKey::CPU, tensor);
    lent_.emplace(tensor.unsafeGetTensorImpl(), host);
    returned_.emplace(host.unsafeGetTensorImpl(), tensor);
    return host;
  }

  Tensor lend(const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? lend(*tensor) : Tensor();
  }

  // The card's tensor for one that the kernel returned: an argument, a view of one, or something new.
  Tensor take_back(const Tensor& host) {
    if (!host.defined() || host.device().type() != c10::kCPU) {
      return host;
    }
    auto known = returned_.find(host.unsafeGetTensorImpl());
    if (known != returned_.end()) {
      return known->second;
    }
    check_strided(host);
    Tensor taken = view_of(take_back_storage(host.storage()), DispatchKey::PrivateUse1, host);
    made_.push_back(host);
    returned_.emplace(host.unsafeGetTensorImpl(), taken);
    return taken;
  }

  // Carries over what the kernel did to the arguments' sizes and to the length of their storages.
  void settle() {
    for (auto& [card_storage, loan] : loans_) {
      settle_storage(card_storage, loan);
    }
    for (auto& [tensor, host] : lent_) {
      copy_geometry(host, tensor);
    }
  }

 private:
  struct Loan {
    Storage host;
    Storage card;
    const void* start;
  };

  Storage lend_storage(const Storage& storage) {
    auto known = loans_.find(storage.unsafeGetStorageImpl());
    if (known != loans_.end()) {
      return known->second.host;
    }
    void* start = const_cast<void*>(storage.data());
    Storage host(
        Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(start, Device(c10::kCPU)),
        &lent_allocator(storage.device().index()), /*resizable=*/true);
    loans_.emplace(storage.unsafeGetStorageImpl(), Loan{host, storage, start});
    card_storages_.emplace(host.unsafeGetStorageImpl(), storage);
    return host;
  }

  Storage take_back_storage(const Storage& host) {
    auto known = card_storages_.find(host.unsafeGetStorageImpl());
    if (known != card_storages_.end()) {
      return known->second;
    }
    Storage taken(
        Storage::use_byte_size_t(), host.nbytes(), take_over(device_.index(), host), &card_allocator(),
        /*resizable=*/true);
    card_storages_.emplace(host.unsafeGetStorageImpl(), taken);
    return taken;
  }

  static void settle_storage(c10::StorageImpl* card_storage, Loan& loan) {
    if (loan.host.data() == loan.start && loan.host.nbytes() == card_storage->nbytes()) {
      return;
    }
    const size_t nbytes = loan.host.nbytes();
    c10::DataPtr resized = loan.host.set_data_ptr(c10::DataPtr(nullptr, Device(c10::kCPU)));
    void* host = resized.get();
    auto deleter = resized.get_deleter();
    card_storage->set_data_ptr_noswap({host, resized.release_context(), deleter, card_storage->device()});
    card_storage->set_nbytes(nbytes);
  }

  const Device device_;
  c10::DeviceGuard guard_;
  Card* const outer_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard below_autocast_{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard below_python_{
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot})};
  std::unordered_map<c10::TensorImpl*, Tensor> lent_;
  std::unordered_map<c10::TensorImpl*, Tensor> returned_;
  std::unordered_map<c10::StorageImpl*, Loan> loans_;
  std::unordered_map<c10::StorageImpl*, Storage> card_storages_;
  std::vector<Tensor> made_;  // keeps the addresses in returned_ from being reused
};

// ---- Operands on different devices ------------------------------------------------------------------------

// Operators that take a 0-dim tensor on the CPU for a number, as CUDA's do: those that native_functions.yaml marks
// `device_check: NoCheck` and that have several operands. All other operators of torch insist on one device.
const std::unordered_set<std::string>& operators_that_take_numbers() {
  static const auto* names = new std::unordered_set<std::string>{
      "__ilshift__", "__irshift__", "__lshift__", "__rshift__", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_",
      "_fused_sgd_", "_index_put_impl_", "add", "addcdiv", "addcmul", "atan2", "bernoulli", "binary_cross_entropy",
      "binomial", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "copysign",
      "div", "eq", "fill", "floor_divide", "fmax", "fmin", "fmod", "ge", "gt", "heaviside", "hypot", "index",
      "index_fill", "le", "lerp", "logical_and", "logical_or", "logical_xor", "lt", "masked_fill", "max", "maximum",
      "min", "minimum", "mse_loss", "mul", "ne", "pow", "remainder", "rsub", "smooth_l1_loss",
      "special_chebyshev_polynomial_t", "special_chebyshev_polynomial_u", "special_chebyshev_polynomial_v",
      "special_chebyshev_polynomial_w", "special_hermite_polynomial_h", "special_hermite_polynomial_he",
      "special_laguerre_polynomial_l", "special_legendre_polynomial_p", "special_shifted_chebyshev_polynomial_t",
      "special_shifted_chebyshev_polynomial_u", "special_shifted_chebyshev_polynomial_v",
      "special_shifted_chebyshev_polynomial_w", "special_xlog1py", "special_zeta", "sub", "where", "xlogy"};
  return *names;
}

bool takes_numbers(const c10::OperatorName& name) {
  constexpr std::string_view torchs_own = "aten::";
  if (name.name.compare(0, torchs_own.size(), torchs_own) != 0) {
    return true;
  }
  std::string base = name.name.substr(torchs_own.size());
  const auto& known = operators_that_take_numbers();
  if (known.count(base) == 0 && base.back() == '_') {
    base.pop_back();
  }
  return known.count(base) != 0;
}

// Finds the card that an operator runs on and refuses operands elsewhere, with the exception above; an operator
// never writes to a tensor elsewhere.
class CommonDevice {
 public:
  explicit CommonDevice(const c10::OperatorHandle& op) : op_(op) {}

  void see(const Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined() || is_number(tensor, argument)) {
      return;
    }
    if (!first_.has_value()) {
      first_ = tensor.device();
    } else if (*first_ != tensor.device()) {
      refuse(tensor.device(), argument);
    }
  }

  std::optional<Device> device() const {
    return first_;
  }

 private:
  bool is_number(const Tensor& tensor, const c10::Argument& argument) const {
    if (tensor.device().type() != c10::kCPU || tensor.dim() != 0) {
      return false;
    }
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    return !written && (tensor.unsafeGetTensorImpl()->is_wrapped_number() || takes_numbers(op_.operator_name()));
  }

  void refuse(Device other, const c10::Argument& argument) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", *first_,
        " and ", other, "! (when checking argument for argument ", argument.name(), " in method ",
        op_.operator_name(), ")");
  }

  const c10::OperatorHandle& op_;
  std::optional<Device> first_;
};

template <class Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      visit(tensor.value_or(Tensor()));
    }
  }
}

template <class Change>
IValue with_each_tensor(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

Device check_operands(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  CommonDevice common(op);
  std::optional<Device> asked_for;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::Argument& argument = op.schema().arguments()[i];
    for_each_tensor(arguments[i], [&](const Tensor& tensor) { common.see(tensor, argument); });
    if (arguments[i].isDevice()) {
      asked_for = arguments[i].toDevice();
    }
  }
  if (!common.device().has_value()) {
    return resolve(asked_for);
  }
  // A generator alone brings a call here.
  TORCH_CHECK(
      common.device()->type() == kSimgpu, "Expected a '", common.device()->type(),
      "' device type for generator but found 'simgpu'");
  return *common.device();
}

// ---- Every operator ---------------------------------------------------------------------------------------

// CUDA takes index tensors from the CPU, at the price of a copy, with masks turned into indices first.
IValue indices_on(Device device, const IValue& value) {
  c10::List<std::optional<Tensor>> moved;
  for (const std::optional<Tensor>& index : value.toOptionalTensorVector()) {
    if (!index.has_value() || !index->defined() || on_card(*index)) {
      moved.push_back(index);
    } else if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) {
      for (const Tensor& column : index->nonzero().unbind(1)) {
        moved.push_back(column.to(device));
      }
    } else {
      moved.push_back(index->to(device));
    }
  }
  return moved;
}

void move_indices(c10::ArrayRef<IValue> arguments, torch::jit::Stack* stack) {
  const size_t start = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isOptionalTensorList()) {
      continue;
    }
    const Tensor& indexed = arguments[0].toTensor();
    TORCH_CHECK(
        on_card(indexed), "indices should be either on ", indexed.device(),
        " or on the same device as the indexed tensor (", indexed.device(), ")");
    (*stack)[start + i] = indices_on(indexed.device(), arguments[i]);
  }
}

bool takes(const c10::OperatorHandle& op, c10::TypeKind kind) {
  for (const c10::Argument& argument : op.schema().arguments()) {
    const c10::TypePtr& type = argument.type();
    const auto* optional = type->castRaw<c10::OptionalType>();
    if ((optional != nullptr ? optional->getElementType()->kind() : type->kind()) == kind) {
      return true;
    }
  }
  return false;
}

IValue lend_argument(HostCall& call, Device device, const c10::Argument& argument, const IValue& value) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  const auto kind = optional != nullptr ? optional->getElementType()->kind() : argument.type()->kind();
  if (kind == c10::TypeKind::GeneratorType) {
    return host_generator(value.isNone() ? std::nullopt : std::make_optional(value.toGenerator()), device);
  }
  if (value.isDevice()) {
    return Device(c10::kCPU);
  }
  return with_each_tensor(value, [&](const Tensor& tensor) { return call.lend(tensor); });
}

void check_supported(const c10::OperatorHandle& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(DispatchKey::CPU) ||
          op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
          op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd),
      "Could not run '", op.operator_name(), "' on simgpu: the operator has no CPU kernel to simulate it with");
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  move_indices(torch::jit::last(*stack, count), stack);
  const std::vector<IValue> arguments = torch::jit::last(*stack, count).vec();
  const Device device = check_operands(op, arguments);
  check_supported(op);

  HostCall call(device);
  const size_t start = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    (*stack)[start + i] = lend_argument(call, device, op.schema().arguments()[i], arguments[i]);
  }
  std::optional<BorrowedDefaultGenerator> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded) && !takes(op, c10::TypeKind::GeneratorType)) {
    random.emplace(device);
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  const auto returned = torch::jit::last(*stack, op.schema().returns().size()).vec();
  torch::jit::drop(*stack, returned.size());
  for (const IValue& value : returned) {
    stack->push_back(with_each_tensor(value, [&](const Tensor& tensor) { return call.take_back(tensor); }));
  }
  call.settle();
}

// ---- Operators with kernels of their own ------------------------------------------------------------------

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_generic(
      size, &card_allocator(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_strided_generic(
      size, stride, &card_allocator(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The bytes that cross: CUDA converts types on the host, or on the card for a copy that does not block, before
// or after the contiguous copy (copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cu).
size_t crossing_bytes(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool source_converts = non_blocking ? on_card(source) : !on_card(source);
  const bool between_cards = on_card(source) && on_card(target);
  const Tensor& crossing = source_converts && !between_cards ? target : source;
  return static_cast<size_t>(target.numel()) * crossing.element_size();
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const Device device = on_card(target) ? target.device() : source.device();
  for (const Tensor* end : {&source, &target}) {
    TORCH_CHECK(
        on_card(*end) || end->device().type() == c10::kCPU, "cannot copy between ", device, " and ", end->device());
  }
  HostCall call(device);
  call.lend(target).copy_(call.lend(source));
  count_copy(source.device(), target.device(), crossing_bytes(source, target, non_blocking));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  HostCall call(self.device());
  count_copy(self.device(), Device(c10::kCPU), self.element_size());
  return at::_local_scalar_dense(call.lend(self));
}

// CUDA compares on the card and fetches the answer, one byte.
bool equal(const Tensor& self, const Tensor& other) {
  TORCH_CHECK(
      self.device() == other.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
      self.device(), " and ", other.device(), "! (when checking argument for argument other in method aten::equal)");
  if (self.sizes() != other.sizes()) {
    return false;
  }
  return at::eq(self, other).all().item<bool>();
}

Tensor& set_storage_strided(
    Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride, /*check_offset_in_bounds=*/false);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  }
  const size_t needed = self.numel() == 0
      ? 0
      : at::detail::computeStorageNbytes(size, self.strides(), self.dtype().itemsize(), offset);
  if (needed > source.nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

Tensor& set_storage(Tensor& self, Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_strided(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() != source.unsafeGetTensorImpl()) {
    set_storage_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  }
  return self;
}

Tensor& set_nothing(Tensor& self) {
  Storage nothing(
      Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), &card_allocator(), /*resizable=*/true);
  return set_storage_strided(self, std::move(nothing), 0, {0}, {});
}

void record_stream(Tensor&, c10::Stream) {}

// ---- Operators that only GPUs have ------------------------------------------------------------------------

template <class... Tensors>
Device check_same_device(const char* method, const Tensor& first, const Tensors&... others) {
  auto check = [&](const Tensor& other) {
    TORCH_CHECK(
        !other.defined() || other.device() == first.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ", first.device(), " and ",
        other.device(), "! (when checking arguments in method ", method, ")");
  };
  (check(others), ...);
  return resolve(first.device());
}

template <class... Tensors>
std::tuple<Tensors...> take_all(HostCall& call, const Tensors&... tensors) {
  return {call.take_back(tensors)...};
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  HostCall call(check_same_device("aten::convolution", input, weight, bias.value_or(Tensor())));
  return call.take_back(at::convolution(
      call.lend(input), call.lend(weight), call.lend(bias), stride, padding, dilation, transposed, output_padding,
      groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  HostCall call(check_same_device("aten::convolution_backward", grad, input, weight));
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      call.lend(grad), call.lend(input), call.lend(weight), IntArrayRef(channels), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  return take_all(call, grad_input, grad_weight, grad_bias);
}

Tensor plus(const Tensor& gates, const Tensor& bias) {
  return bias.defined() ? gates + bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  HostCall call(check_same_device("aten::_thnn_fused_lstm_cell", input_gates, hidden_gates, cx));
  const Tensor gates = plus(call.lend(input_gates), call.lend(input_bias)) +
      plus(call.lend(hidden_gates), call.lend(hidden_bias));
  const auto chunks = gates.chunk(4, 1);
  const Tensor in = chunks[0].sigmoid(), forget = chunks[1].sigmoid(), cell = chunks[2].tanh(), out = chunks[3].sigmoid();
  const Tensor cy = forget * call.lend(cx) + in * cell;
  return take_all(call, out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1));
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  const bool through_hy = grad_hy.has_value() && grad_hy->defined();
  const bool through_cy = grad_cy.has_value() && grad_cy->defined();
  if (!through_hy && !through_cy) {
    return {};
  }
  HostCall call(check_same_device("aten::_thnn_fused_lstm_cell_backward", workspace, cx, cy));
  const auto chunks = call.lend(workspace).chunk(4, 1);
  const Tensor &in = chunks[0], &forget = chunks[1], &cell = chunks[2], &out = chunks[3];
  const Tensor tanh_cy = call.lend(cy).tanh();
  const Tensor dhy = through_hy ? call.lend(grad_hy) : at::zeros_like(tanh_cy);
  Tensor dcy = dhy * out * (1 - tanh_cy * tanh_cy);
  if (through_cy) {
    dcy = dcy + call.lend(grad_cy);
  }
  const Tensor gates = at::cat(
      {dcy * cell * in * (1 - in), dcy * call.lend(cx) * forget * (1 - forget), dcy * in * (1 - cell * cell),
       dhy * tanh_cy * out * (1 - out)},
      1);
  return take_all(call, gates, dcy * forget, has_bias ? gates.sum(0) : Tensor());
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  HostCall call(check_same_device("aten::_thnn_fused_gru_cell", input_gates, hidden_gates, hx));
  const auto in = plus(call.lend(input_gates), call.lend(input_bias)).chunk(3, 1);
  const auto hidden = plus(call.lend(hidden_gates), call.lend(hidden_bias)).chunk(3, 1);
  const Tensor reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  const Tensor fresh = (in[2] + reset * hidden[2]).tanh(), old = call.lend(hx);
  return take_all(call, fresh + update * (old - fresh), at::cat({reset, update, fresh, old, hidden[2]}, 1));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  HostCall call(check_same_device("aten::_thnn_fused_gru_cell_backward", grad_hy, workspace));
  const auto chunks = call.lend(workspace).chunk(5, 1);
  const Tensor &reset = chunks[0], &update = chunks[1], &fresh = chunks[2], &old = chunks[3], &hidden = chunks[4];
  const Tensor grad = call.lend(grad_hy);
  const Tensor dfresh = grad * (1 - update) * (1 - fresh * fresh);
  const Tensor dupdate = grad * (old - fresh) * update * (1 - update);
  const Tensor dreset = dfresh * hidden * reset * (1 - reset);
  const Tensor in = at::cat({dreset, dupdate, dfresh}, 1), out = at::cat({dreset, dupdate, dfresh * reset}, 1);
  return take_all(
      call, in, out, grad * update, has_bias ? in.sum(0) : Tensor(), has_bias ? out.sum(0) : Tensor());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view));
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("equal", equal);
  // Left to itself torch would run these as several operators, would look for a kernel of the backend inside
  // them, or (index) would move the indices a first time to infer the result's shape.
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "native_channel_shuffle", "silu_backward", "mish_backward", "all.dims",
        "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "conj_physical_", "mode.values", "_linalg_solve_ex", "index.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage_storage_offset", set_storage_strided);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// copy_ resolves lazy conjugation and negation by copying, so the copy itself has to take them as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// ---- Bringing it to life ----------------------------------------------------------------------------------

// The autograd engine makes one thread a device at the first backward of the process, which may have been
// before this backend was loaded; give it the threads it would have made.
struct EngineThreads : torch::autograd::Engine {
  static void catch_up() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    auto& queues = engine.*(&EngineThreads::device_ready_queues_);
    if (!(engine.*(&EngineThreads::thread_pool_shared_))) {
      return;
    }
    while (queues.size() < static_cast<size_t>(cards().count)) {
      queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
      std::thread(&torch::autograd::Engine::thread_init, &engine, queues.size() - 1, queues.back(), true).detach();
    }
  }
};

std::vector<std::mutex*> all_locks() {
  std::vector<std::mutex*> locks{&ledger().mutex, &PinnedAllocator::mutex()};
  for (auto& card : cards().all) {
    locks.push_back(&card->mutex);
  }
  return locks;
}

// A child must not inherit a lock that a thread of its parent held.
void survive_forks() {
  pthread_atfork(
      [] { for (auto* lock : all_locks()) lock->lock(); },
      [] { for (auto* lock : all_locks()) lock->unlock(); },
      [] { for (auto* lock : all_locks()) lock->unlock(); });
}

void start() {
  static Guard* guard = new Guard();
  static c10::impl::DeviceGuardImplRegistrar registrar(kSimgpu, guard);
  c10::SetAllocator(kSimgpu, &card_allocator());
  c10::SetCPUAllocator(new HostAllocator(c10::GetCPUAllocator()), /*priority=*/100);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  survive_forks();
}

// Returns false where a card is in use and can no longer be changed.
bool configure(DeviceIndex count, size_t capacity) {
  for (auto& card : cards().all) {
    if (card->allocated() != 0) {
      return false;
    }
  }
  for (auto& card : cards().all) {
    card->empty_cache();
    card->set_capacity(capacity);
  }
  cards().count = count;
  current_index = 0;
  EngineThreads::catch_up();
  return true;
}

pybind11::list copies() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  pybind11::list listed;
  for (const Copy& copy : ledger().copies) {
    const char* direction = copy.source.is_cpu() ? "host-to-device"
        : copy.target.is_cpu()                   ? "device-to-host"
                                                 : "device-to-device";
    listed.append(pybind11::make_tuple(direction, copy.source.str(), copy.target.str(), copy.nbytes));
  }
  return listed;
}

void reset_copies() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().copies.clear();
}

pybind11::dict memory_stats(DeviceIndex index) {
  const DeviceStats stats = card(index).stats();
  pybind11::dict flat;
  auto add = [&](const std::string& name, const c10::CachingAllocator::StatArray& figure) {
    const char* pools[] = {"all", "small_pool", "large_pool"};
    for (size_t pool = 0; pool < 3; ++pool) {
      const std::string prefix = name + "." + pools[pool] + ".";
      flat[(prefix + "current").c_str()] = figure[pool].current;
      flat[(prefix + "peak").c_str()] = figure[pool].peak;
      flat[(prefix + "allocated").c_str()] = figure[pool].allocated;
      flat[(prefix + "freed").c_str()] = figure[pool].freed;
    }
  };
  add("allocation", stats.allocation);
  add("segment", stats.segment);
  add("active", stats.active);
  add("inactive_split", stats.inactive_split);
  add("allocated_bytes", stats.allocated_bytes);
  add("reserved_bytes", stats.reserved_bytes);
  add("active_bytes", stats.active_bytes);
  add("inactive_split_bytes", stats.inactive_split_bytes);
  add("requested_bytes", stats.requested_bytes);
  flat["num_alloc_retries"] = stats.num_alloc_retries;
  flat["num_ooms"] = stats.num_ooms;
  flat["num_device_alloc"] = stats.num_device_alloc;
  flat["num_device_free"] = stats.num_device_free;
  return flat;
}

}  // namespace simgpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simgpu;
  m.def("start", start);
  m.def("configure", configure);
  m.def("copies", copies);
  m.def("reset_copies", reset_copies);
  m.def("device_count", [] { return cards().count; });
  m.def("current_device", [] { return current_index; });
  m.def("set_device", [](int64_t index) {
    check_ordinal(index);
    set_current(static_cast<DeviceIndex>(index));
  });
  m.def("exchange_device", [](int64_t index) {
    if (index >= 0) {
      check_ordinal(index);
    }
    return set_current(static_cast<DeviceIndex>(index));
  });
  m.def("check_ordinal", check_ordinal);
  m.def("used", [](int64_t index) { return card(index).used(); });
  m.def("capacity", [](int64_t index) { return card(index).capacity(); });
  m.def("memory_stats", memory_stats);
  m.def("reset_peaks", [](int64_t index) { card(index).reset_peaks(); });
  m.def("reset_accumulated", [](int64_t index) { card(index).reset_accumulated(); });
  m.def("empty_cache", [] {
    for (DeviceIndex index = 0; index < cards().count; ++index) {
      card(index).empty_cache();
    }
  });
  m.def("default_generator", default_generator);
}

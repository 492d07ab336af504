// What every operator needs before it can run on a CPU kernel: operands on one device, lent as host memory, and the
// way back.
#pragma once

#include "devices.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>

#include <unordered_map>
#include <unordered_set>

namespace simgpu {

// ---- Lending a card's tensors to a CPU kernel -------------------------------------------------------------

inline void check_strided(const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_quantized() && !tensor.is_nested(),
      "simgpu has dense tensors only: no sparse, quantized or nested ones");
}

inline void copy_geometry(const Tensor& from, c10::TensorImpl* to) {
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

inline Tensor view_of(const Storage& storage, DispatchKey key, const Tensor& like) {
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
    Tensor taken = view_of(take_back_storage(own_storage(host)), DispatchKey::PrivateUse1, host);
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
        Storage::use_byte_size_t(), host.nbytes(), adopt(device_.index(), host), &card_allocator(),
        /*resizable=*/true);
    card_storages_.emplace(host.unsafeGetStorageImpl(), taken);
    return taken;
  }

  // A number's storage is its own: the CPU's losses return theirs in the room of all that they summed up.
  Storage own_storage(const Tensor& host) {
    const bool is_known = card_storages_.count(host.storage().unsafeGetStorageImpl()) != 0;
    const bool has_more = host.dim() == 0 && host.storage().nbytes() > host.itemsize();
    return !is_known && has_more && host.storage_offset() == 0 ? host.clone().storage() : host.storage();
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
inline const std::unordered_set<std::string>& operators_that_take_numbers() {
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

inline bool takes_numbers(const c10::OperatorName& name) {
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

  std::optional<Device> found() const {
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

inline Device check_operands(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  CommonDevice common(op);
  std::optional<Device> asked_for;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::Argument& argument = op.schema().arguments()[i];
    for_each_tensor(arguments[i], [&](const Tensor& tensor) { common.see(tensor, argument); });
    if (arguments[i].isDevice()) {
      asked_for = arguments[i].toDevice();
    }
  }
  if (!common.found().has_value()) {
    return resolve(asked_for);
  }
  // A generator alone brings a call here.
  TORCH_CHECK(
      common.found()->type() == kSimgpu, "Expected a '", common.found()->type(),
      "' device type for generator but found 'simgpu'");
  return *common.found();
}

}  // namespace simgpu

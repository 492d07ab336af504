// A simulated accelerator for PyTorch: the PrivateUse1 backend "simgpu".
//
// A tensor on a simulated card lives in host memory that only this backend hands out. To run an operator, its
// arguments are lent to ATen's CPU kernel as host tensors over the same memory, and what the kernel made is
// taken over by the card; nothing is copied, so the copies that are counted are exactly those a user's program
// asks for. Memory that a CPU kernel uses and frees within one operator is host memory and is not counted.
//
// Read allocator.h for the cards' memory, devices.h for what torch sees of them, host_call.h for the lending.
#include "host_call.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pthread.h>

#include <thread>

namespace simgpu {

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

bool is_mask(const Tensor& index) { return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte; }

// CUDA looks for what a mask selects, by the operator that does so, and the host asks how much that is. It need not
// where one number is written under one mask; here torch has made that number a tensor, so one of the card's is taken
// for it.
void find_masked(const std::vector<IValue>& arguments) {
  std::vector<Tensor> masks;
  size_t selecting = 0;
  for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorVector()) {
    const bool selects = index.has_value() && index->defined();
    selecting += selects ? 1 : 0;
    if (selects && on_card(*index) && is_mask(*index)) {
      masks.push_back(*index);
    }
  }
  const bool writes = arguments.size() > 3 && arguments[2].isTensor();
  if (writes && selecting == 1 && arguments[2].toTensor().numel() == 1 && !arguments[3].toBool()) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Tensor& mask : masks) {
    mask.nonzero();
  }
}

// CUDA's kernels tell the host how many elements they have found: int32 from nonzero, mostly int64 from unique.
void count_sizes(const c10::OperatorHandle& op, Device device, const std::vector<IValue>& arguments) {
  const std::string& name = op.schema().name();
  size_t nbytes = sizeof(int32_t);
  if (name == "aten::index" || name == "aten::_index_put_impl_") {
    find_masked(arguments);
    return;
  }
  if (name == "aten::_unique2" || name.find("aten::unique") == 0) {
    const Tensor& given = arguments[0].toTensor();
    const bool in_slices =
        name.find("_dim") != std::string::npos || (name == "aten::unique_consecutive" && !arguments[3].isNone());
    if (given.numel() == 0) {
      return;
    }
    nbytes = in_slices || given.scalar_type() == at::kBool ? sizeof(int32_t) : sizeof(int64_t);
  } else if (name != "aten::nonzero" && name != "aten::masked_select") {
    return;
  }
  count_copy(device, Device(c10::kCPU), nbytes);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  move_indices(torch::jit::last(*stack, count), stack);
  const std::vector<IValue> arguments = torch::jit::last(*stack, count).vec();
  const Device device = check_operands(op, arguments);
  check_supported(op);
  count_sizes(op, device, arguments);

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
      self.device() == other.device(),
      "Expected all tensors to be on the same device, but found at least two devices, ", self.device(), " and ",
      other.device(), "! (when checking argument for argument other in method aten::equal)");
  if (self.sizes() != other.sizes()) {
    return false;
  }
  return at::eq(self, other).all().item<bool>();
}

Tensor& set_storage_strided(
    Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
#if SIMGPU_TORCH_AT_LEAST(2, 8)
  at::native::checkSetStorage(self, source, offset, size, stride, /*check_offset_in_bounds=*/false);
#else
  at::native::checkSetStorage(self, source, offset, size, stride);
#endif
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
  const Tensor in = chunks[0].sigmoid(), forget = chunks[1].sigmoid(), cell = chunks[2].tanh();
  const Tensor out = chunks[3].sigmoid();
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
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("equal", TORCH_FN(equal));
  // Left to itself torch would run these as several operators, would look for a kernel of the backend inside
  // them, would move the indices a first time to infer the result's shape (index), or would write through a
  // result that the CPU's kernel has to enlarge and shrink again (the losses).
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "native_channel_shuffle", "silu_backward", "mish_backward",
        "all.dims", "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "conj_physical_", "mode.values",
        "_linalg_solve_ex", "index.Tensor", "mse_loss", "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_strided));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
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

// What torch.cuda.memory_snapshot tells; a block in use has the address that its tensors give.
pybind11::list memory_snapshot() {
  pybind11::list told;
  for (DeviceIndex index = 0; index < cards().count; ++index) {
    for (const auto& segment : card(index).segments()) {
      pybind11::list blocks;
      size_t total = 0, allocated = 0, requested = 0;
      for (const auto& [block, cached] : segment) {
        pybind11::dict each;
        each["address"] = block.host != nullptr ? reinterpret_cast<size_t>(block.host) : block.address;
        each["size"] = block.size;
        each["requested_size"] = cached ? 0 : block.requested;
        each["state"] = cached ? "inactive" : "active_allocated";
        blocks.append(each);
        total += block.size;
        allocated += cached ? 0 : block.size;
        requested += cached ? 0 : block.requested;
      }
      pybind11::dict each;
      each["device"] = index;
      each["address"] = segment.front().first.address;
      each["total_size"] = total;
      each["allocated_size"] = allocated;
      each["active_size"] = allocated;
      each["requested_size"] = requested;
      each["stream"] = 0;
      each["segment_type"] = segment.front().first.small ? "small" : "large";
      each["segment_pool_id"] = pybind11::make_tuple(0, 0);
      each["is_expandable"] = false;
      each["blocks"] = blocks;
      told.append(each);
    }
  }
  return told;
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
  m.def("memory_snapshot", memory_snapshot);
  m.def("record_history", [](bool is_on) {
    for (auto& each : cards().all) {
      each->record_history(is_on);
    }
  });
  m.def("history", [](int64_t index) {
    pybind11::list found;
    for (const Event& each : card(index).history()) {
      found.append(pybind11::make_tuple(each.address, each.size, each.seconds));
    }
    return found;
  });
  m.def("reset_peaks", [](int64_t index) { card(index).reset_peaks(); });
  m.def("reset_accumulated", [](int64_t index) { card(index).reset_accumulated(); });
  m.def("empty_cache", [] {
    for (DeviceIndex index = 0; index < cards().count; ++index) {
      card(index).empty_cache();
    }
  });
  m.def("default_generator", default_generator);
}

"""Each private name of torch that the package uses outside `worker`, once: what for, since when, and what without it.

Any torch may have renamed one of them. So none is taken at import: `PrivateName.get` looks it up when a magic first
needs it, and what stands in for a missing one is said here. Where nothing does, the report says what it lacks, by
`lacking`. Loading this module imports no torch.

What torch keeps under a private name in its objects (`Module._parameters`) can be asked for only where there is an
object: the names of such attributes are constants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from gpumagic._compat.private_names import PrivateName

# ---- Tensors and storages, as torch has them under what a subclass makes of them

TENSOR_BASE = PrivateName(
    "torch._C.TensorBase",
    use="reads a tensor's own shape, device and so on, whatever its class has made of them",
    without="its subclass `torch.Tensor` is asked, which overrides none of what is read",
    instead="torch.Tensor",
)
DISABLE_TORCH_FUNCTION = PrivateName(
    "torch._C.DisableTorchFunction",
    use="reads tensors without `__torch_function__` of the user's classes and modes",
    without="function modes and classes of tensors of your own see what is read for this report",
    instead="contextlib.nullcontext",
    reports=("devices", "oomguard", "ondevice"),
)
DISABLE_TORCH_DISPATCH = PrivateName(
    "torch._C._DisableTorchDispatch",
    use="reads gradients and the parts of sparse tensors without the user's dispatch modes",
    without="gradients that Python has not read are not counted, nor the bytes of sparse tensors",
    reports=("oomguard",),  # `%devices` has a note of its own, at each of them
)
BELOW_AUTOGRAD = PrivateName(
    "torch._C._AutoDispatchBelowAutograd",
    use="reads tensors without autograd; unlike `no_grad` no Ctrl-C can leave it on",
    without="`torch.no_grad` is entered",
    instead="torch.no_grad",
)
IS_FUNCTIONAL = PrivateName(
    "torch._is_functional_tensor",
    use="tells tensors that stand for others while torch traces",
    without="none is taken for one",
    instead=lambda _: False,
)
VERSION = PrivateName(
    "torch.Tensor._version",
    use="counts a tensor's changes in place",
    without="a second copy of the same data is not told from one of new data, nor are changes in place undone",
    instead=lambda _: None,
    reports=("ondevice", "oomguard"),
)


def storage_address(tensor: Any) -> int:
    """Return the address of a tensor's storage; 0 for one without memory, as a fake tensor is."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return 0


DATA_ADDRESS = PrivateName(
    "torch._C._data_address",
    use="the address of a tensor's storage; it neither fails for fake tensors nor copies a lazy clone",
    without="`data_ptr` of the storage is asked",
    instead=storage_address,
)
STORAGE_IDENTITY = PrivateName(
    "torch.UntypedStorage._cdata",
    use="tells storages apart, also those of no bytes",
    without="they are told apart by their addresses",
    instead="torch.UntypedStorage.data_ptr",
)
WEAK_REFERENCE = PrivateName(
    "torch.UntypedStorage._weak_ref",
    use="keeps the record of a storage, and so its identity, from being given to another one",
    without="a storage may be taken for an earlier one that had its address",
    reports=("devices", "ondevice"),
)
IS_EXPIRED = PrivateName(
    "torch.UntypedStorage._expired",
    use="tells whether the storage of a weak reference is gone",
    without=WEAK_REFERENCE.without,
    reports=("devices", "ondevice"),
)
FREE_WEAK_REFERENCE = PrivateName(
    "torch.UntypedStorage._free_weak_ref",
    use="frees the record that a weak reference keeps",
    without=WEAK_REFERENCE.without,
    reports=("devices", "ondevice"),
)


class WeakReferences(NamedTuple):
    """How the records of storages are kept and freed."""

    keep: Callable[[Any], int]
    is_expired: Callable[[int], bool]
    free: Callable[[int], object]


@cache
def weak_references() -> WeakReferences:
    """Return torch's weak references of storages; where one part is missing, what keeps no record and frees none."""
    parts = (WEAK_REFERENCE, IS_EXPIRED, FREE_WEAK_REFERENCE)
    if all(part.is_there() for part in parts):
        return WeakReferences(*(part.get() for part in parts))
    return WeakReferences(
        keep=STORAGE_IDENTITY.get(),
        is_expired=lambda _: False,
        free=lambda _: None,
    )


SPARSE_INDICES: Final = "_indices"
"""The method of a sparse tensor that returns its indices: `indices` asks that they are coalesced."""
SPARSE_VALUES: Final = "_values"
STORED_ELEMENTS: Final = "_nnz"
"""The method of a sparse tensor that returns how many elements it has, before they are coalesced as well."""
LOCAL_TENSOR: Final = "_local_tensor"
"""Where a `DTensor` has the tensor that this process has of it: ``to_local`` is an operation of autograd."""
TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a tensor has its hooks."""

# ---- Autograd's graphs, modules

PARSE_IR = PrivateName(
    "torch._C.parse_ir",
    use="makes the graph that reads a gradient without making an object of Python's of it",
    without="gradients that Python has not read are not counted",
    reports=("oomguard",),
)
INTERPRET_GRAPH = PrivateName(
    "torch._C._jit_interpret_graph",
    use="runs that graph",
    without="gradients that Python has not read are not counted",
    reports=("oomguard",),
)
SAVED: Final = "_raw_saved_"
"""How the names of a node's attributes begin that are handles of what it saved; without any, graphs keep nothing."""
PARAMETERS: Final = "_parameters"
BUFFERS: Final = "_buffers"
MODULES: Final = "_modules"
REGISTERED: Final = (PARAMETERS, BUFFERS, MODULES)
"""The dicts of a module, documented where `Module.__getattr__` is: its methods would run the user's code."""
SCRIPT_MODULE: Final = "torch.jit._script"
"""Where the class of those dicts stands for a module of TorchScript's."""


class Loader(NamedTuple):
    """What the iterator of a `DataLoader` reads with."""

    dataset: Any
    sampler: Any
    collate: Any


LOADER_ITERATOR: Final = "torch.utils.data.dataloader._BaseDataLoaderIter"
GENERATOR: Final = "torch._C.Generator"
"""Under which name `torch.Generator` is known as a class."""


def loader_of(iterator: Any) -> Loader | None:
    """Return what the iterator of a `DataLoader` reads with; None where it batches nothing, or keeps that elsewhere."""
    try:
        if not iterator._auto_collation:
            return None
        return Loader(iterator._dataset, iterator._index_sampler, iterator._collate_fn)
    except AttributeError:
        return None


# ---- The devices


def _out_of_tree_backend() -> str:
    import torch

    return str(torch.device("privateuseone").type)


OUT_OF_TREE_BACKEND = PrivateName(
    "torch._C._get_privateuse1_backend_name",
    use="the name of the out-of-tree backend, without function modes of the user's",
    without="a device is asked for its type, which such modes see",
    instead=_out_of_tree_backend,
)
DEVICE_STATS = PrivateName(
    "torch._C._accelerator_getDeviceStats",
    use="the figures of an out-of-tree backend's allocator, nested, which is faster to read",
    without="`memory_stats` of its module is read",
    since="2.9",
)


def _register_device_module(name: str, module: Any) -> None:
    import torch

    setattr(torch, name, module)
    sys.modules[f"torch.{name}"] = module


REGISTER_DEVICE_MODULE = PrivateName(
    "torch._register_device_module",
    use="makes the simulated GPUs `torch.simgpu`",
    without="the module is put there",
    instead=_register_device_module,
)
BACKENDS_IN_PYTHON = PrivateName(
    "torch._C._acc",
    use="a dry run on fake tensors makes a backend of its own with it",
    without="there are no dry runs",
    since="2.10",
)
OUT_OF_MEMORY_OBSERVER = PrivateName(
    "torch._C._cuda_attach_out_of_memory_observer",
    use="notes the allocator's figures at the instant of a failure that a library hides",
    without="the figures are those of after it",
)
CLEAR_WORKSPACES: Final = "torch._C._cuda_clearCublasWorkspaces()"
"""What the user may type to free what cuBLAS keeps: torch has no public name for it."""
HISTORY_IS_ON = PrivateName(
    "torch._C._cuda_isHistoryEnabled",
    use="tells whether the user records the allocator's history",
    without="lines have no memory",
)
RECORD_HISTORY = PrivateName(
    "torch.cuda.memory._record_memory_history",
    use="records the allocator's history, as torch's documentation says",
    without="lines have no memory",
)
SNAPSHOT = PrivateName(
    "torch.cuda.memory._snapshot",
    use="reads that history",
    without="lines have no memory",
)
METADATA = PrivateName(
    "torch._C._cuda_getMemoryMetadata",
    use="what the user has had written into the history's entries",
    without="entries find their line by the clock",
    since="2.10",
)
SET_METADATA = PrivateName(
    "torch._C._cuda_setMemoryMetadata",
    use="has the history's entries say which line made them",
    without="entries find their line by the clock",
    since="2.10",
)

# ---- Function modes and the default device: without any of them `%%ondevice` runs the cell, and records nothing

UNRECORDED = "what the cell creates and copies is not recorded"
DEVICE_STATE = PrivateName(
    "torch.utils._device",
    use="notes the default device as `with torch.device(...)` does",
    without=UNRECORDED,
)
DEVICE_CONTEXT = PrivateName(
    "torch.utils._device.DeviceContext",
    use="the context that `with torch.device(...)` enters, of which the recording one is a kind",
    without=UNRECORDED,
)
DEVICE_CONSTRUCTORS = PrivateName(
    "torch.utils._device._device_constructors",
    use="the functions that a default device is for",
    without=UNRECORDED,
)
FUNCTION_MODES = PrivateName(
    "torch._C._len_torch_function_stack",
    use="how many function modes the thread has",
    without=UNRECORDED,
)
FUNCTION_MODE_AT = PrivateName(
    "torch._C._get_function_stack_at",
    use="finds the device context among the function modes",
    without=UNRECORDED,
)
PUSH_MODE = PrivateName(
    "torch.overrides._push_mode",
    use="nests device contexts in torch before 2.11",
    without=UNRECORDED,
)
POP_MODE = PrivateName(
    "torch.overrides._pop_mode",
    use="nests device contexts in torch before 2.11",
    without=UNRECORDED,
)

# ---- The dispatcher, where copies are counted: the same

DISPATCH_KEY = PrivateName(
    "torch._C.DispatchKey",
    use="names the place of a kernel",
    without=UNRECORDED,
)
HAS_COMPUTED_KERNEL = PrivateName(
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key",
    use="tells which backends torch has kernels for",
    without=UNRECORDED,
)
HAS_KERNEL = PrivateName(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    use="tells whether torch would warn that a kernel takes the place of another",
    without="its warnings are hidden while the first kernel is put there",
    instead=lambda *_: True,
)
COMPUTED_KERNEL = PrivateName(
    "torch._C._dispatch_get_computed_kernel_for_dispatch_key",
    use="finds torch's own kernel, which ours calls",
    without="ours stand at `BackendSelect`, from where calls go on to torch's",
    since="2.9",
)
KEYS_AFTER = PrivateName(
    "torch._C._dispatch_keyset_full_after",
    use="where calls go on from `BackendSelect`, in torch before 2.9",
    without=UNRECORDED,
)
LIBRARY_KERNELS = PrivateName(
    "torch.library._impls",
    use="tells whether another library in Python has put a kernel there",
    without="torch's kernel is looked for anew with each cell",
)
DESTROY_LIBRARY = PrivateName(
    "torch.library.Library._destroy",
    use="takes kernels away again",
    without=UNRECORDED,
)
REDISPATCH: Final = "_handle"
"""Where an operator has what passes a call on to torch's next kernel, in torch before 2.9."""
READ_VALUE = PrivateName(
    "torch.ops.aten._local_scalar_dense",
    use="the operator by which the host reads a value",
    without=UNRECORDED,
)
UNIQUE = PrivateName(
    "torch.ops.aten._unique2",
    use="the operator of `unique`, which tells the host how many elements it has found",
    without="what `unique` makes the host wait for is not counted",
    reports=("ondevice",),
)
COALESCE = PrivateName(
    "torch.ops.aten._coalesce",
    use="the operator of `coalesce`, which tells the host how many elements it has found",
    without="what `coalesce` makes the host wait for is not counted",
    reports=("ondevice",),
)

# ---- What torch does with calls meanwhile: tracing, compiling, `vmap`, backward

TRACING_STATE = PrivateName(
    "torch._C._get_tracing_state",
    use="keeps what counting does out of a trace of `torch.jit`",
    without=UNRECORDED,
)
SET_TRACING_STATE = PrivateName(
    "torch._C._set_tracing_state",
    use="keeps what counting does out of a trace of `torch.jit`",
    without=UNRECORDED,
)
SET_EVAL_FRAME = PrivateName(
    "torch._C._dynamo.eval_frame.set_eval_frame",
    use="keeps `torch.compile` from compiling what counting does",
    without=UNRECORDED,
)
SKIP_CODE = PrivateName(
    "torch._C._dynamo.eval_frame.skip_code",
    use="has `torch.compile` run our functions as they are, in torch 2.6",
    without="later torch has a strategy for that",
)
SET_STRATEGY = PrivateName(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    use="has `torch.compile` run our functions as they are",
    without="it compiles them where it comes upon them, which takes time and changes nothing",
    since="2.7",
)
STRATEGY = PrivateName(
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    use="what it is to do with some code, and with what that calls",
    without=SET_STRATEGY.without,
    since="2.7",
)
FRAME_ACTION = PrivateName(
    "torch._C._dynamo.eval_frame._FrameAction",
    use="what it is to do with some code",
    without=SET_STRATEGY.without,
    since="2.7",
)
IS_WRAPPED = PrivateName(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    use="tells a tensor that `vmap` shows as one example",
    without=UNRECORDED,
)
UNWRAPPED = PrivateName(
    "torch._C._functorch.get_unwrapped",
    use="the tensor of all examples",
    without=UNRECORDED,
)
GRAPH_TASK = PrivateName(
    "torch._C._current_graph_task_id",
    use="tells whether a thread runs backward",
    without=UNRECORDED,
)
TREE_FLATTEN = PrivateName(
    "torch.utils._pytree.tree_flatten",
    use="what a container of any kind holds, for `--move`",
    without="`--move` moves no containers",
)
TREE_UNFLATTEN = PrivateName(
    "torch.utils._pytree.tree_unflatten",
    use="makes a container of the same kind around what moved",
    without="`--move` moves no containers",
)


class Containers(NamedTuple):
    """How containers are taken apart and put together again."""

    flatten: Callable[..., tuple[list[Any], Any]]
    unflatten: Callable[[list[Any], Any], Any]


@cache
def containers() -> Containers:
    """Return torch's own functions for that; where one is missing, what takes nothing for a container."""
    if TREE_FLATTEN.is_there() and TREE_UNFLATTEN.is_there():
        return Containers(TREE_FLATTEN.get(), TREE_UNFLATTEN.get())
    return Containers(lambda value, *_: ([value], None), lambda leaves, _: leaves[0])


NAMES = tuple(
    name for name in list(globals().values()) if isinstance(name, PrivateName)
)
"""All names that can be looked up."""


def lacking(report: str) -> list[str]:
    """Return what a magic's report has to say of names that this torch lacks: for each, what is not told without it."""
    if "torch" not in sys.modules:
        return []
    told = []
    for name in NAMES:
        if report in name.reports and not name.is_there():
            told.append(f"{name.missing()}: {name.without}")
    return told

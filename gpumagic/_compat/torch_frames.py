"""Private functions and modules of torch by which its frames are recognised; a frame of another name tells nothing.

None of them is called or looked up: a torch that has renamed one only has less said of what its code was doing.
"""

from __future__ import annotations

from typing import Final

IN_BACKWARD: Final = "_engine_run_backward"
IN_LOADING: Final = "_load"
IN_MODULE_MOVE: Final = "_apply"
IN_MODULE_CALL: Final = "_call_impl"
IN_PIN_THREAD: Final = "_pin_memory_loop"
IN_OPTIMIZER_STEP: Final = (
    "_multi_tensor_",
    "_single_tensor_",
    "_fused_adam",
    "_fused_sgd",
    "_init_group",
)
"""How the names of these functions begin."""
IN_FOREACH_ADAM: Final = "_multi_tensor_adam"
STORAGE_FROM_BYTES: Final = "_load_from_bytes"
PRINTING_MODULE: Final = "torch._tensor_str"
TENSOR_MODULE: Final = "torch._tensor"
OPERATORS_MODULE: Final = "torch._ops"
DEVICE_MODULE: Final = "torch.utils._device"
FAKE_TENSORS: Final = "torch._subclasses.fake_tensor"
INDUCTOR: Final = "torch._inductor."
PRIVATE_FUNCTIONS: Final = "torch._C."

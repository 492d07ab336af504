"""Code that torch traces, compiles, exports, differentiates or maps, and copies in it: for simgpu and for CUDA.

It writes devices as `simgpu:0`, and runs after `ondevice_corpus.SETUP`.
"""

from __future__ import annotations

SETUP = """
from torch._subclasses.fake_tensor import FakeTensorMode
class Moving(torch.nn.Module):
    def forward(self, values):
        return values.to("simgpu:0") * 2
moving = Moving()
"""
COMPILED = {
    "a move": "f = torch.compile(lambda v: v.to('simgpu:1') + torch.ones(10), backend=count, fullgraph=True); y = f(x)",
    "a read": "f = torch.compile(lambda v: v * v.sum().item() + 1, backend=count); y = f(g)",
    "a module": "net = torch.nn.Linear(10, 3); y = torch.compile(net, backend=count)(torch.ones(2, 10))",
    "a print": "def f(v):\n    print(v.sum())\n    return v + 1\ny = torch.compile(f, backend=count)(g)",
}
"""What is compiled by a backend `count`."""
TRACED = {
    "export": "ep = torch.export.export(moving, (x,)); y = ep.module()(x)",
    "jit.trace": "y = torch.jit.trace(moving, (x,), check_trace=False)(x)",
    "jit.script": "y = torch.jit.script(model)(batch['inputs'])",
    "jit.save": "import io; file = io.BytesIO(); torch.jit.save(torch.jit.script(model.to('simgpu:0')), file)",
    "fake tensors": "with FakeTensorMode(): y = torch.ones(9, device='cpu').to('simgpu:1') + torch.ones(9)",
    "vmap": "y = torch.vmap(lambda v: v.to('simgpu:0') * 2)(x)",
    "jvp": "y = torch.func.jvp(lambda v: v.to('simgpu:0') * 2, (x,), (x,))",
    "hessian": "y = torch.func.hessian(lambda v: (v.to('simgpu:0') ** 3).sum())(x[0])",
    "nested": "y = torch.nested.nested_tensor(rows, layout=torch.jagged, device='cpu').to('simgpu:0')",
    "storage": "y = g.untyped_storage().tolist()",
    "operators": "y = torch.ops.aten._to_copy(x, device=g.device); torch.ops.aten.copy_(y, x); y[0, 0].item()",
    "a parameter printed": "w = torch.nn.Linear(3, 2).bias; print(w, [w], f'{w}')",
    "in": "y = 3.0 in g",
    "a slice": "y = x[:, : torch.tensor(3, device='simgpu:0')]",
}

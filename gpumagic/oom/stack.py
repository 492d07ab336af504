"""What the frames of a failure tell: where it failed, and what the code worked with.

They are read before the release, while they are whole. What they hold becomes plain records: no frame and no tensor
outlives the call.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections import deque
from collections.abc import Collection as AnyCollection
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from gpumagic._compat import torch_frames, torch_private
from gpumagic.advice.facts import Collection, Frames, Member, TensorFact
from gpumagic.heap.branches import (
    attributes_of,
    class_attribute,
    dict_of,
    stored_attribute,
)
from gpumagic.oom import ownership
from gpumagic.source import cell_code, frames
from gpumagic.source import text as texts
from gpumagic.source.text import CellText


class FrameLine(NamedTuple):
    """A frame on the failing stack, and the line it stood on."""

    frame: FrameType
    line: int

    @property
    def file(self) -> str:
        """What its code was compiled as: a file, or what stands for a cell."""
        return self.frame.f_code.co_filename

    @property
    def function(self) -> str:
        """The name of its function."""
        return self.frame.f_code.co_name

    @property
    def text(self) -> str:
        """The text of the line, as far as it is known."""
        return frames.code_at(self.frame, self.line) or ""

    def mentions(self, name: str) -> bool:
        """Return whether its function uses a name or an attribute."""
        return name in self.frame.f_code.co_names


_MAGICS_ABOVE = re.compile(r"\A(%%.*\n)+")
"""What the text of a cell that was run again has above its body, as it was typed."""
_FUNCTIONAL = str(Path("torch", "nn", "functional.py"))
_SAMPLE = 8
"""How many members of a collection are looked at before all are: it may be a long list of numbers."""


def read_frames(
    error: BaseException,
    device: str,
    namespace: Mapping[str, object],
    shell: object | None = None,
    outside: AnyCollection[int] = (),
) -> Frames:
    """Return where an error happened, and what the code worked with.

    Args:
        error: the exception, with its frames whole.
        device: the device whose models, optimizers and collections are looked for.
        namespace: the notebook's variables.
        shell: the shell, which knows the cells by the names of their files.
        outside: ids of exceptions that were being handled before, and are none of this one's.
    """
    stack = [FrameLine(*step) for step in frames.frames_in(error, outside)]
    functions = frozenset(step.function for step in stack)
    of_user = []
    of_notebook = []
    for step in stack:
        is_of_notebook = step.frame.f_globals is namespace
        if is_of_notebook:
            of_notebook.append(step)
        if is_of_notebook or frames.is_user_code(step.frame):
            of_user.append(step)
    if not of_user:
        return Frames(functions=functions)
    of_notebook = of_notebook or of_user
    outermost = of_user[0]
    failing = of_user[-1]
    # The cell is the outermost of the notebook's code, and may call functions of its own.
    in_cell = [step for step in of_notebook if step.file == of_notebook[0].file][-1]
    source = _source(in_cell.frame)
    cell = cell_code.read_cell(source) if source else None
    failing_text = _failing_text(outermost, failing, shell)
    values = _named_values(cell.text if cell is not None else None, outermost.frame)
    values |= _named_values(failing_text, failing.frame)
    variables = _variables(of_user, namespace)
    models, optimizers = ownership.find_models_and_optimizers(variables, device)
    return Frames(
        line=in_cell.line,
        code=in_cell.text or None,
        source=source or None,
        cell=cell,
        functions=functions,
        deepest_line=_described(failing) if failing.file != in_cell.file else None,
        calls_backward=any(step.mentions("backward") for step in of_notebook),
        mentions_autocast=any(step.mentions("autocast") for step in of_notebook),
        failing_text=failing_text,
        tensors=_tensors(values),
        numbers={
            code: value for code, value in values.items() if type(value) in (int, float)
        },
        collections=_collections(values, device),
        operands=_operands(stack),
        summing_criteria=_summing_criteria(variables, values),
        moved_nbytes=_moved_nbytes(stack),
        models_alive=models,
        optimizers_alive=optimizers,
    )


def _described(step: FrameLine) -> str:
    """Return a line with its function, and its text where that is known."""
    place = f"{step.function}(), line {step.line}"
    return f"{place}: {step.text}" if step.text else place


def _source(frame: FrameType) -> str:
    """Return the text of the cell that a frame runs; of a file nothing, which is not for a cell's advice to change."""
    filename = frame.f_code.co_filename
    if Path(filename).exists():
        return ""
    text = "".join(linecache.getlines(filename, frame.f_globals))
    return _MAGICS_ABOVE.sub(lambda magics: "\n" * magics[0].count("\n"), text)


def _failing_text(
    outermost: FrameLine, failing: FrameLine, shell: object | None
) -> CellText | None:
    """Return the text of the failing code, with the number of its cell where that is another one."""
    source = _source(failing.frame)
    if not source:
        return None
    if failing.file == outermost.file:
        return texts.parse(source, "", failing.line)
    known: Any = getattr(getattr(shell, "compile", None), "_filename_map", {})
    number = known.get(failing.file)
    if number is None and failing.file.startswith("<ipython-input-"):
        number = failing.file.split("-")[2]  # IPython 7 writes it into the name
    cell = f"In [{number}]" if number is not None else "another cell"
    return texts.parse(source, cell, failing.line)


def _variables(
    steps: Iterable[FrameLine], namespace: Mapping[str, object]
) -> list[ownership.Variable]:
    """Return the notebook's variables, then those of the functions that were running."""
    variables = []
    for name, value in list(namespace.items()):
        if not name.startswith("_"):
            variables.append(ownership.Variable(name, value))
    for frame, _ in steps:
        if frame.f_locals is frame.f_globals:
            continue
        for name, value in list(frame.f_locals.items()):
            variables.append(ownership.Variable(name, value, is_local=True))
    return variables


def _named_values(text: CellText | None, frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame, their stored attributes and the values of dicts, by the text that names them."""
    values: dict[str, Any] = {}
    if text is None:
        return values
    globals_read = frame.f_globals.keys() & frame.f_code.co_names
    variables = {name: frame.f_globals[name] for name in globals_read}
    variables |= frame.f_locals
    owner: Any
    for node in text.nodes():
        if isinstance(node, ast.Name) and node.id in variables:
            values[node.id] = variables[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = variables.get(node.value.id)
            if owner is not None:
                read = class_attribute if isinstance(owner, type) else stored_attribute
                values[ast.unparse(node)] = read(owner, node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            owner = variables.get(node.value.id)
            key = _key(node.slice, variables)
            if issubclass(type(owner), dict) and type(key) in (str, int):
                # Not by its own methods: a defaultdict would grow
                values[text.code(node)] = dict.get(owner, key)
    return values


def _key(index: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the key that an index stands for; None where it is neither a variable nor a constant."""
    if isinstance(index, ast.Name):
        return variables.get(index.id)
    return index.value if isinstance(index, ast.Constant) else None


def _operands(stack: list[FrameLine]) -> dict[str, TensorFact]:
    """Return the tensors of the deepest function of `torch.nn.functional` on a stack."""
    for step in reversed(stack):
        if step.file.endswith(_FUNCTIONAL):
            return _tensors(step.frame.f_locals)
    return {}


def _moved_nbytes(stack: list[FrameLine]) -> int:
    """Return the bytes of float32 parameters in the module that `Module.to` or its like was moving."""
    import torch

    for step in stack:
        if step.function != torch_frames.IN_MODULE_MOVE:
            continue
        module: Any = step.frame.f_locals.get("self")
        if issubclass(type(module), torch.nn.Module):
            weights = [
                weight
                for weight in module.parameters()
                if weight.dtype == torch.float32
            ]
            return sum(weight.nbytes for weight in weights)
    return 0


def _summing_criteria(
    variables: Iterable[ownership.Variable], values: Mapping[str, Any]
) -> frozenset[str]:
    """Return the names of modules, such as losses, that add up what they reduce."""
    named = [(variable.name, variable.value) for variable in variables]
    named += values.items()
    modules = [
        (name, value) for name, value in named if ownership.kind_of(value) == "module"
    ]
    return frozenset(
        name
        for name, module in modules
        if attributes_of(module).get("reduction") == "sum"
    )


def _tensors(values: Mapping[str, object]) -> dict[str, TensorFact]:
    """Return those of some values that are tensors or arrays."""
    facts = {code: _tensor_fact(value) for code, value in values.items()}
    return {code: fact for code, fact in facts.items() if fact is not None}


def _tensor_fact(value: object) -> TensorFact | None:
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    if not issubclass(type(value), torch.Tensor):
        return _array_fact(value)
    tensor: Any = value
    lazy: Any = torch.nn.parameter.UninitializedTensorMixin
    with torch_private.DISABLE_TORCH_FUNCTION.get()():
        if tensor.is_nested or issubclass(type(tensor), lazy):
            return None  # it has no one shape, or none yet, and raises where it is asked for one
        return TensorFact(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nbytes=tensor.numel() * tensor.element_size(),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            has_graph=tensor.grad_fn is not None,
        )


def _array_fact(array: Any) -> TensorFact | None:
    """Return what is known of numpy's array or pandas's table, of which `values` makes one array."""
    cls = type(array)
    package = cls.__module__.partition(".")[0]
    if package == "numpy" and cls.__name__ == "ndarray":
        return TensorFact(array.shape, str(array.dtype), array.nbytes, "cpu")
    if package == "pandas" and cls.__name__ == "DataFrame":
        dtypes = {str(dtype) for dtype in array.dtypes}
        dtype = dtypes.pop() if len(dtypes) == 1 else "object"
        return TensorFact(array.shape, dtype, 8 * array.size, "cpu")
    return None


def _collections(values: Mapping[str, Any], device: str) -> dict[str, Collection]:
    """Return the collections of tensors on the device among some values, and those that the notebook's objects have."""
    collections = {}
    for code, value in values.items():
        collection = _collection(value, device)
        is_of_the_notebook = dict_of(type(value)).get("__module__") == "__main__"
        if (
            collection is None
            and is_of_the_notebook
            and ownership.kind_of(value) != "module"
        ):
            collection = _largest_attribute(code, value, device)
        if collection is not None:
            collections[code] = collection
    return collections


def _largest_attribute(code: str, owner: object, device: str) -> Collection | None:
    """Return the largest collection that an object has in an attribute."""
    largest: Collection | None = None
    most = -1
    for name, value in attributes_of(owner).items():
        collection = _collection(value, device)
        if collection is not None and collection.nbytes > most:
            most = collection.nbytes
            largest = replace(collection, place=f"{code}.{name}")
    return largest


def _collection(value: Any, device: str) -> Collection | None:
    """Return what a list, deque or dict has of tensors on a device; None where it has none or other members as well."""
    if type(value) in (list, deque):
        members = list(value)
    elif type(value) is dict:
        members = list(value.values())
    else:
        return None
    if not any(_has_tensor(member) for member in members[:_SAMPLE]):
        return None
    records = [member for member in members if _kind_of_record(member) is not None]
    if records and len(records) < len(members):
        return None
    parts: dict[int, Any] = {}
    for member in members:
        parts |= {id(part): part for part in _parts(member)}
    tensors = []
    for part in parts.values():
        fact = _tensor_fact(part)
        if fact is not None and fact.device == device:
            tensors.append(fact)
    if not tensors:
        return None
    return Collection(
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        graphs=sum(tensor.has_graph for tensor in tensors),
        is_of_numbers=not any(tensor.shape for tensor in tensors),
        is_dict=type(value) is dict,
        member=_kind_of_record(members[0]) or "tensor",
    )


def _has_tensor(member: Any) -> bool:
    return any(_tensor_fact(part) is not None for part in _parts(member))


def _kind_of_record(member: Any) -> Member | None:
    """Return what a member of a collection is that consists of tensors and more; None for a tensor or a number."""
    cls = type(member)
    for kind in _RECORDS:
        if ownership.kind_of(member) == kind:
            return kind
    if cls is list:
        return "list"
    if cls is dict:
        return "dict"
    if issubclass(cls, tuple):
        return "named tuple" if hasattr(cls, "_make") else "tuple"
    return None


_RECORDS: tuple[Member, ...] = ("module", "optimizer")


def _parts(member: Any) -> Iterable[Any]:
    """Return what a tuple, a list, a dict, a module or an optimizer has; of anything else itself."""
    kind = _kind_of_record(member)
    if kind in ("module", "optimizer"):
        return ownership.tensors_of(member)
    if kind == "dict":
        parts: Iterable[Any] = member.values()
        return parts
    return member if kind else (member,)

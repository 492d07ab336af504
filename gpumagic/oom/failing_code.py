"""What the code was working with when it failed: its text, its tensors, the failing operation, models, optimizers.

It is read while the frames are whole. The result is plain records: no frame and no tensor outlives the call.
"""

from __future__ import annotations

import ast
import linecache
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from gpumagic.heap.branches import attributes_of, class_attribute, dict_of, mro_of, name_of_type, stored_attribute
from gpumagic.oom import ownership
from gpumagic.oom.rules.facts import Collection as Collected
from gpumagic.oom.rules.facts import Facts, TensorFact, Trainer
from gpumagic.source import cell_code, frames
from gpumagic.source import text as texts
from gpumagic.source.frames import is_user_code
from gpumagic.source.text import CellText, called_name, names_in

FrameLine = tuple[FrameType, int]
"""A frame and the line it stood on."""


def read_frames(
    facts: Facts, error: BaseException, namespace: Mapping[str, object], shell: object | None, outside: Collection[int]
) -> Facts:
    """Return the facts with where the error happened, what its frames worked with, and what is on the device.

    Frames over `namespace`, the notebook's variables, are the user's; `outside` are the ids of exceptions that were
    being handled before.
    """
    stack = list(frames.frames_in(error, outside))
    facts = replace(facts, functions=frozenset(frame.f_code.co_name for frame, _ in stack))
    users = [each for each in stack if is_user_code(each[0])]
    own = [each for each in stack if each[0].f_globals is namespace] or users
    if own:
        facts = _with_place(facts, own, *(users or own)[-1])
    return _with_values(facts, stack, users, namespace, shell) if users else facts


def _with_place(facts: Facts, own: list[FrameLine], deepest: FrameType, its_line: int) -> Facts:
    filename = own[0][0].f_code.co_filename
    frame, line = [each for each in own if each[0].f_code.co_filename == filename][-1]
    text = "".join(linecache.getlines(filename, frame.f_globals)) if not Path(filename).exists() else ""
    cell, inside = cell_code.read_cell(text) if text else None, None
    if deepest.f_code.co_filename != filename:
        code = frames.code_at(deepest, its_line)
        inside = f"{deepest.f_code.co_name}(), line {its_line}" + (f": {code}" if code else "")
    # A cell's locals are the whole notebook, of which only the names in its text concern this failure. IPython
    # compiles each statement separately, so the frame's own code has too few of them.
    named = sorted(cell.names) if cell is not None else ()
    bound = {
        name: _fact(each.f_locals.get(name))
        for each, _ in own
        for name in (named if each.f_locals is each.f_globals else each.f_code.co_varnames)
    }
    return replace(
        facts, line=line, code=frames.code_at(frame, line), source=text or None, cell=cell, inside=inside,
        calls_backward=any("backward" in frame.f_code.co_names for frame, _ in own),
        autocast=any("autocast" in frame.f_code.co_names for frame, _ in own),
        graph_names=tuple(name for name, fact in bound.items() if fact is not None and fact.graph),
    )  # fmt: skip


FIRST = 8
"""How many members of a list are checked to see whether it holds tensors."""

FUNCTIONAL = str(Path("torch", "nn", "functional.py"))


def _with_values(
    facts: Facts, stack: list[FrameLine], own: list[FrameLine], namespace: Mapping[str, object], shell: object | None
) -> Facts:
    import torch

    outermost, (frame, line) = own[0][0], own[-1]
    device = facts.device or "cpu"
    text = _text(outermost, frame, line, shell)
    values = {**dict(_values(_text(outermost, *own[0], shell), outermost)), **dict(_values(text, frame))}
    named = [(name, value, False) for name, value in list(namespace.items()) if not name.startswith("_")]
    for each, _ in own:
        if each.f_locals is not each.f_globals:
            named += [(name, value, True) for name, value in list(each.f_locals.items())]
    # The deepest function of torch.nn.functional with its tensors
    inside = next((each for each, _ in reversed(stack) if each.f_code.co_filename.endswith(FUNCTIONAL)), None)
    criteria = (*((each[0], each[1]) for each in named), *values.items())
    # The module that `Module.to` or its like was moving
    moved = (each.f_locals.get("self") for each, _ in stack if each.f_code.co_name == "_apply")
    moving: Any = next((each for each in moved if issubclass(type(each), torch.nn.Module)), None)
    weights = moving.parameters() if moving is not None else ()
    models, optimizers = ownership.find_models_and_optimizers(named, device)
    return replace(
        facts,
        failing=text,
        tensors=_tensor_facts(values),
        numbers={code: value for code, value in values.items() if type(value) in (int, float)},
        collections=_collections(values, device),
        sums=frozenset(
            name for name, value in criteria
            if ownership.kind_of(value) == "module" and attributes_of(value).get("reduction") == "sum"
        ),
        moving=sum(each.nbytes for each in weights if each.dtype == torch.float32),
        function=inside.f_code.co_name if inside is not None else "",
        operands=_tensor_facts(inside.f_locals) if inside is not None else {},
        models_there=models,
        optimizers_there=optimizers,
    )  # fmt: skip


def _text(outermost: FrameType, frame: FrameType, line: int, shell: object | None) -> CellText | None:
    filename = frame.f_code.co_filename
    if Path(filename).exists():
        return None  # a module's file is not for a cell's advice to change
    known: Any = getattr(getattr(shell, "compile", None), "_filename_map", {})
    number = known.get(filename)
    if number is None and filename.startswith("<ipython-input-"):  # IPython 7 writes it into the name
        number = filename.split("-")[2]
    cell = f"In [{number}]" if number is not None else "another cell"
    source = "".join(linecache.getlines(filename, frame.f_globals))
    return texts.parse(source, "" if filename == outermost.f_code.co_filename else cell, line) if source else None


def _tensor_facts(values: Mapping[str, object]) -> dict[str, TensorFact]:
    facts = {code: _fact(value) for code, value in values.items()}
    return {code: fact for code, fact in facts.items() if fact is not None}


def _collections(values: Mapping[str, Any], device: str) -> dict[str, Collected]:
    """Return the collections of tensors on the device among some values, and those that the notebook's objects have."""
    found = {code: _collected(value, device) for code, value in values.items()}
    for code, value in values.items():
        is_of_the_notebook = dict_of(type(value)).get("__module__") == "__main__"
        if found[code] is None and is_of_the_notebook and ownership.kind_of(value) != "module":
            kept = ((_collected(each, device), f"{code}.{name}") for name, each in attributes_of(value).items())
            largest = max(((each, place) for each, place in kept if each), key=lambda one: one[0].nbytes, default=None)
            found[code] = largest and replace(largest[0], place=largest[1])
    return {code: each for code, each in found.items() if each is not None}


def _collected(value: Any, device: str) -> Collected | None:
    members = list(value) if type(value) in (list, deque) else list(value.values()) if type(value) is dict else []
    records = [each for each in members if type(each) in (dict, list) or issubclass(type(each), tuple)]
    first = [part for record in records[:FIRST] for part in _parts(record)]
    if not any(_fact(each) for each in (*members[:FIRST], *first)):
        return None  # do not read all of a long list of numbers
    parts = {id(part): part for member in members for part in (_parts(member) if records else (member,))}
    facts = [fact for fact in map(_fact, parts.values()) if fact is not None and fact.device == device]
    if not facts or 0 < len(records) < len(members):
        return None
    return Collected(
        len(facts), sum(fact.nbytes for fact in facts), sum(fact.graph for fact in facts),
        not any(fact.shape for fact in facts), by_key=type(value) is dict,
        record="" if not records else "_make" if hasattr(records[0], "_make") else type(records[0]).__name__,
    )  # fmt: skip


def _parts(record: Any) -> Iterable[Any]:
    """Return what a tuple, a list or a dict has; of anything else itself."""
    is_listed = type(record) is list or issubclass(type(record), tuple)
    return record.values() if type(record) is dict else record if is_listed else (record,)


def _values(text: CellText | None, frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame, their stored attributes and the values of dicts, by the text that names them."""
    variables = frame.f_locals
    for node in text.nodes() if text is not None else ():
        if isinstance(node, ast.Name) and node.id in variables:
            yield node.id, variables[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in variables:
            owner: Any = variables[node.value.id]
            read = class_attribute if isinstance(owner, type) else stored_attribute
            yield f"{node.value.id}.{node.attr}", read(owner, node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and text is not None:
            owner, index = variables.get(node.value.id), node.slice
            key: Any = variables.get(index.id) if isinstance(index, ast.Name) else getattr(index, "value", None)
            if issubclass(type(owner), dict) and type(key) in (str, int):
                yield text.code(node), dict.get(owner, key)  # not by its own methods: a defaultdict would grow


def _fact(value: object) -> TensorFact | None:
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    if not issubclass(type(value), torch.Tensor):
        array: Any = value
        package, name = type(value).__module__.partition(".")[0], type(value).__name__
        if (package, name) == ("pandas", "DataFrame"):  # of which `values` makes one array
            dtypes = set(map(str, array.dtypes))
            return TensorFact(array.shape, dtypes.pop() if len(dtypes) == 1 else "object", 8 * array.size, "cpu")
        is_array = (package, name) == ("numpy", "ndarray")
        return TensorFact(array.shape, str(array.dtype), array.nbytes, "cpu") if is_array else None
    tensor: Any = value
    with torch._C.DisableTorchFunction():
        if tensor.is_nested:
            return None  # it has no one shape, and raises where it is asked for one
        return TensorFact(
            shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
            nbytes=tensor.numel() * tensor.element_size(), device=str(tensor.device),
            requires_grad=tensor.requires_grad, graph=tensor.grad_fn is not None,
        )  # fmt: skip


_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


def find_trainer(
    names: Iterable[str], namespace: Mapping[str, object], cell: CellText | None, history: Sequence[str]
) -> Trainer | None:
    """Return the trainer among the names of a cell, where its text or an earlier cell's shows how it was made.

    `history` has the texts of the cells so far, by their numbers.
    """
    for name in sorted(names):
        library, kind = _kind_of(namespace[name])
        for text in (cell, _earlier(name, namespace, kind, history)) if kind else ():
            for node in text.nodes() if text is not None else ():
                if text is not None and isinstance(node, ast.Call) and called_name(node) == kind:
                    return Trainer(library, text, node)
    return None


def _kind_of(value: object) -> tuple[str, str]:
    """Return the library of a trainer or of its arguments, and the class that is told how to train; else nothing."""
    bases = _bases(value)
    if any(str(module).startswith(_LIGHTNING) and name == "Trainer" for module, name in bases):
        return "lightning", name_of_type(type(value))
    if ("transformers.trainer", "Trainer") in bases:
        value = attributes_of(value).get("args")
        bases = _bases(value)
    is_told = ("transformers.training_args", "TrainingArguments") in bases
    return ("transformers", name_of_type(type(value))) if is_told else ("", "")


def _bases(value: object) -> set[tuple[object, str]]:
    """Return the modules and the names of an object's classes, without a word from a metaclass."""
    return {(dict_of(each).get("__module__"), name_of_type(each)) for each in mro_of(type(value))}


def _earlier(name: str, namespace: Mapping[str, object], kind: str, history: Sequence[str]) -> CellText | None:
    """Return the statements of earlier cells that made a trainer and its arguments, as one text."""
    made = _last_made(name, history)
    if made is None:
        return None
    used = sorted(names_in(ast.parse(made[1])) - {name})
    told = [_last_made(each, history) for each in used if name_of_type(type(namespace.get(each))) == kind]
    both = dict.fromkeys(each for each in (*told, made) if each is not None)
    return texts.parse("\n".join(statement for _, statement in both), f"In [{next(iter(both))[0]}]")


def _last_made(name: str, history: Sequence[str]) -> tuple[int, str] | None:
    """Return the last statement outside of functions that bound a variable, and the number of its cell."""
    for number in range(len(history) - 1, 0, -1):
        for text, statement in _statements(history[number]):
            if any(isinstance(each, ast.Name) and each.id == name for each in statement.targets):
                return number, text.code(statement)
    return None


def _statements(source: str) -> Iterator[tuple[CellText, ast.Assign]]:
    """Yield the assignments of a cell, the last one first; also of one that a magic of its first line ran."""
    text = texts.parse(source)
    for node in reversed(text.tree.body) if text is not None else ():
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Call) and called_name(value) == "run_cell_magic":
            inner = value.args[-1]
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield from _statements(inner.value)
        elif isinstance(node, ast.Assign) and text is not None:
            yield text, node

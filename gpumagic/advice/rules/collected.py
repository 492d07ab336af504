"""What a loop collects on the device without need: autograd graphs, results, a tensor that `cat` makes longer."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpumagic.advice.facts import Collection, Facts
from gpumagic.advice.records import FREE, Advice, NoCost
from gpumagic.advice.rules.additions import (
    NOT_ON_DEVICE,
    Addition,
    additions,
    innermost_blocks,
    root,
)
from gpumagic.advice.rules.proposal import propose
from gpumagic.advice.rules.regions import bracketed, does, failed, loop_around
from gpumagic.report.units import LARGE, count, size
from gpumagic.source.text import CellText, Change, called_name, last_line, names_in


def growing(facts: Facts) -> str:
    """Return what grows with every pass of a loop, as a sentence; empty where nothing is known to."""
    for addition in additions(facts):
        evidence = _graphs_of(facts, addition.target)
        if evidence:
            return f"A leak: {evidence}."
    return ""


def _graphs_of(facts: Facts, target: str) -> str:
    """Return what is known of the graphs that a variable of a loop collects; empty where it collects none."""
    collection = facts.frames.collections.get(target)
    total = facts.frames.tensors.get(target)
    if collection is not None and collection.graphs:
        tensors = count(collection.graphs, "tensor")
        return f"{collection.place or target} holds {tensors} with a graph, one more in every pass"
    if total is not None and total.has_graph:
        return f"{target} has a graph that grows in every pass of the loop"
    return ""


def graphs(facts: Facts) -> Iterator[Advice]:
    """Add up numbers, not tensors that drag their graphs along."""
    for addition in additions(facts):
        evidence = _graphs_of(facts, addition.target)
        if not evidence or _is_differentiated(facts, addition):
            continue
        text = addition.text
        values = _values_with_graphs(facts, addition)
        if not values:
            continue
        listed = ", ".join(map(text.code, values))
        its = "their autograd graphs" if len(values) > 1 else "its autograd graph"
        method = ".detach()"
        cost: str | NoCost = FREE
        if _is_number(facts, addition.target):
            method = ".item()"
            cost = "a sync in each pass, for the number"
        yield propose(
            f"Collect {listed} without {its}",
            text=text,
            evidence=evidence,
            cost=cost,
            changes=[
                text.replace(value, bracketed(text, value) + method) for value in values
            ],
        )


def _is_number(facts: Facts, target: str) -> bool:
    """Return whether a variable adds up numbers, or collects them."""
    collection = facts.frames.collections.get(target)
    if collection is not None and collection.graphs:
        return collection.is_of_numbers
    total = facts.frames.tensors.get(target)
    return total is not None and not total.shape


def _values_with_graphs(facts: Facts, addition: Addition) -> list[ast.expr]:
    """Return those of several values that may have a graph; a single one has."""
    if len(addition.values) == 1:
        return list(addition.values)
    values = list[ast.expr]()
    for value in addition.values:
        tensor = facts.frames.tensors.get(addition.text.code(value))
        if tensor is None or tensor.has_graph:
            values.append(value)
    return values


def _is_differentiated(facts: Facts, addition: Addition) -> bool:
    """Return whether gradients may be computed of what is collected: below the loop, or by who calls the function."""
    value = addition.values[0]
    text = addition.text
    if facts.frames.trains:
        around = [node for node in text.nodes() if _is_function_around(node, value)]
        if around and not any(does(function, "backward") for function in around):
            return True
    end = last_line(loop_around(text, value.lineno) or value)
    below = [node for node in text.expressions() if node.lineno > end]
    return any(called_name(node) in ("backward", "grad") for node in below)


def _is_function_around(node: ast.AST, inner: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and inner in ast.walk(node)


@dataclass(frozen=True, slots=True)
class Collecting:
    """A variable that collects tensors on the device, and the code of one text that adds to it."""

    target: str
    text: CellText
    collection: Collection
    is_tensor: bool
    """Whether it is one tensor, which gets longer."""
    values: Sequence[ast.expr]
    """What is added; nothing where the notebook has it, and the text only reads it."""

    @property
    def place(self) -> str:
        """What to call it."""
        return self.collection.place or self.target


def results(facts: Facts) -> Iterator[Advice]:
    """Collect results in the host's memory."""
    for collecting in _collecting(facts):
        joins = Joins()
        if not collecting.is_tensor:
            joins = joins_of(collecting.text, root(collecting.target))
        if not collecting.values and not joins.inside:
            continue
        if joins.after:  # what is made of it on the device may want the graphs
            yield from _on_the_host(
                facts, collecting, [*joins.inside, *joins.after], " until it is joined"
            )
        yield from _on_the_host(facts, collecting, joins.inside)


def _collecting(facts: Facts) -> Iterator[Collecting]:
    """Yield the variables that collect what is large, with the code of each text."""
    frames = facts.frames
    texts = {text.cell: text for text in frames.texts}
    for (target, cell), values in _added_values(facts).items():
        tensor = frames.tensors.get(target)
        collection = frames.collections.get(target)
        if tensor is not None and len(values) > 1:
            collection = Collection(1, tensor.nbytes, graphs=int(tensor.has_graph))
        if collection is not None and _may_go_to_host(collection):
            is_tensor = tensor is not None
            yield Collecting(target, texts[cell], collection, is_tensor, values)


def _added_values(facts: Facts) -> dict[tuple[str, str], list[ast.expr]]:
    """Return what is added to each variable by each cell; nothing where the notebook has it and nothing adds to it."""
    values = dict[tuple[str, str], list[ast.expr]]()
    added_to = set[str]()
    for addition in additions(facts):
        added_to.add(addition.target)
        place = (addition.target, addition.text.cell)
        values.setdefault(place, []).extend(addition.values)
    for target in facts.frames.collections:
        if target not in added_to and _has_already(facts, target):
            for text in facts.frames.texts:
                values[target, text.cell] = []
    return values


def _may_go_to_host(collection: Collection) -> bool:
    """Return whether it is worth it to have a collection in the host's memory, and there is a method that does it."""
    if collection.nbytes < LARGE or collection.member == "optimizer":
        return False
    return not (collection.graphs and collection.is_of_numbers)


def _on_the_host(
    facts: Facts, collecting: Collecting, joined: Sequence[ast.Call], until: str = ""
) -> Iterator[Advice]:
    """Suggest to collect in the host's memory, and to bring back to the device what some calls join."""
    text = collecting.text
    values = collecting.values
    collection = collecting.collection
    place = collecting.place
    to_host = ".detach().cpu()" if collection.graphs else ".cpu()"
    if collection.graphs and joined:
        return
    changes = [
        text.replace(value, bracketed(text, value) + to_host) for value in values
    ]
    changes += [text.append(call, f'.to("{facts.event.device}")') for call in joined]
    first = None
    if (
        _has_already(facts, collecting.target)
        and not collecting.is_tensor
        and not collection.graphs
    ):
        first = _moved(place, collection)
    evidence = f"{place} holds {count(collection.tensors, 'tensor')} with {size(collection.nbytes)}"
    if values and values[0] in innermost_blocks(text):
        evidence += ", more with every pass"
    cost = "a copy in each pass"
    if not joined:
        cost += f"; what uses {place} finds it on the CPU"
    yield propose(
        f"{'Collect' if values else 'Keep'} {place} in the host's memory"
        f"{', without graphs' if collection.graphs else ''}{until}",
        text=text,
        frees=None
        if values
        else collection.nbytes,  # of what grows, no more than the beginning is there
        changes=changes,
        first=first,
        evidence=evidence,
        cost=cost,
    )


def _has_already(facts: Facts, place: str) -> bool:
    """Return whether the cell begins with what a variable of the notebook holds already."""
    name = root(place)
    cell = facts.frames.cell
    if cell is not None and name in cell.bound_first:
        return False
    return any(variable.name == name for variable in facts.notebook.variables_on_device)


_PART_ON_HOST = "part.cpu() if torch.is_tensor(part) else part"
_ON_HOST = {
    "tensor": "each.cpu()",
    "module": "each.cpu()",
    "list": f"[{_PART_ON_HOST} for part in each]",
    "tuple": f"tuple({_PART_ON_HOST} for part in each)",
    "named tuple": f"each._make({_PART_ON_HOST} for part in each)",
    "dict": f"{{name: {_PART_ON_HOST} for name, part in each.items()}}",
}
"""Code for a member of a collection with its tensors in the host's memory, by what the member is."""


def _moved(place: str, collection: Collection) -> str:
    """Return the code that moves what a collection holds already to the host."""
    members = f"{place}.items()" if collection.is_dict else f"enumerate({place})"
    return (
        f"for key, each in {members}:\n    {place}[key] = {_ON_HOST[collection.member]}"
    )


_JOINING = ("stack", "cat", "concat")


@dataclass(frozen=True, slots=True)
class Joins:
    """The calls that join what comes from a collection."""

    inside: list[ast.Call] = field(default_factory=list)
    """Those in loops and functions."""
    after: list[ast.Call] = field(default_factory=list)
    """Those after them."""


def joins_of(text: CellText, name: str) -> Joins:
    """Return the calls that join what comes from a collection."""
    blocks = innermost_blocks(text)
    derived = _derived_from(text, name)
    joins = Joins()
    for node in text.nodes():
        if not isinstance(node, ast.Call) or called_name(node) not in _JOINING:
            continue
        if node.args and names_in(node.args[0]) & derived:
            calls = joins.inside if node in blocks else joins.after
            calls.append(node)
    return joins


def _derived_from(text: CellText, name: str) -> set[str]:
    """Return a variable, and those that loops and functions assign what they take from it."""
    derived = {name}
    blocks = innermost_blocks(text)
    assignments = [node for node in blocks if isinstance(node, ast.Assign)]
    for statement in sorted(assignments, key=lambda statement: statement.lineno):
        is_joined = any(does(statement.value, joining) for joining in _JOINING)
        if not is_joined and names_in(statement.value) & derived:
            for target in statement.targets:
                derived |= names_in(target)
    return derived


def comprehension(facts: Facts) -> Iterator[Advice]:
    """Collect in the host's memory what the failed line makes a list or a dict of."""
    for text, statement in failed(facts):
        for node in ast.walk(statement):
            match node:
                case ast.ListComp(elt=part):
                    made = "list"
                case ast.DictComp(value=part):
                    made = "dict"
                case _:
                    continue
            if _makes_a_tensor(part):
                yield propose(
                    f"Collect what the {made} is made of in the host's memory",
                    text=text,
                    changes=[text.append(part, ".cpu()")],
                    evidence=f"the {made} keeps every part on the device",
                    cost=f"a copy in each pass; what uses the {made} finds it on the CPU",
                )
            return


def _makes_a_tensor(node: ast.expr) -> bool:
    """Return whether code calls what may return a tensor on the device, and no layer of `nn`."""
    if not isinstance(node, ast.Call):
        return False
    return called_name(node) not in NOT_ON_DEVICE and "nn" not in names_in(node.func)


def data_taken_in_parts(facts: Facts) -> Iterator[Advice]:
    """Leave data in the host's memory of which a loop takes a part in each pass, and copy the parts."""
    text = facts.frames.text
    if text is None:
        return
    changes = list[Change]()
    names = list[str]()
    for node in text.nodes():
        match node:
            case ast.Assign(targets=[target, *_], value=call) if _is_copied_to_device(
                text, target, call
            ):
                name = text.code(target)
                copied = _copied_in_parts(facts, text, name, call)
                if copied:
                    names.append(name)
                    changes += copied
    if names:
        yield propose(
            f"Keep {', '.join(names)} in the host's memory and copy what each pass takes",
            text=text,
            changes=changes,
            evidence="a pass takes a part of it",
            cost="a copy in each pass",
        )


def _is_copied_to_device(text: CellText, target: ast.expr, call: ast.expr) -> bool:
    """Return whether a statement is ``x = x.to(device)`` or ``x = x.cuda()``."""
    name = text.code(target)
    return text.code(call).startswith((f"{name}.to(", f"{name}.cuda("))


def _copied_in_parts(
    facts: Facts, text: CellText, name: str, call: ast.expr
) -> list[Change]:
    """Return the changes that leave data on the host and copy the parts that loops take; none where none does."""
    data = facts.frames.tensors.get(name)
    if data is None or data.nbytes < LARGE:
        return []
    to_device = text.code(call).removeprefix(name)
    changes = [text.replace(call, f"{name}.cpu()")]
    of_indices = list[Change]()
    for node in text.expressions():
        if not isinstance(node, ast.Subscript) or text.code(node.value) != name:
            continue
        if loop_around(text, node.lineno) is not None:
            changes.append(text.append(node, to_device))
        match node.slice:
            case ast.Name(id=index) if index not in facts.frames.numbers:
                # What is on the device is no index of what is not
                of_indices.append(text.append(node.slice, ".cpu()"))
    if len(changes) == 1:
        return []
    return [*changes, *of_indices]

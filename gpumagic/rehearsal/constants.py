"""Constants that code gives to a name: found, and put another in their place."""

from __future__ import annotations

import ast


def constant_of(source: str, name: str) -> int | None:
    """Return the whole number that code sets a variable to or passes as an argument of that name; the first one."""
    for node in ast.walk(ast.parse(source)):
        value = _value(node, name)
        if isinstance(value, ast.Constant) and type(value.value) is int:
            return value.value
    return None


def replace(tree: ast.Module, values: dict[str, object]) -> ast.Module:
    """Put values in the place of the constants that the module gives to these names; the module is changed."""
    for node in ast.walk(tree):
        for name, value in values.items():
            found = _value(node, name)
            if isinstance(found, ast.Constant) and type(found.value) is int:
                found.value = value  # type: ignore[assignment]
    return tree


def _value(node: ast.AST, name: str) -> ast.expr | None:
    """Return the expression that a node gives to a name."""
    if isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == name for each in node.targets):
        return node.value
    if isinstance(node, ast.keyword) and node.arg == name:
        return node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
        return node.value
    return None

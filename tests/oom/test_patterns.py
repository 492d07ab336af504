"""A pattern recognises what an expression computes, whichever way it is written, and nothing else."""

from __future__ import annotations

import ast

import pytest

from gpumagic.advice.rules.patterns import match_pattern


def matched(pattern: str, code: str) -> dict[str, str] | None:
    found = match_pattern(pattern, ast.parse(code, mode="eval").body)
    return None if found is None else {name: ast.unparse(node) for name, node in found.items()}


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("softmax(X, -1)", "x.softmax(-1)"),
        ("softmax(X, -1)", "torch.softmax(x, dim=-1)"),
        ("softmax(X, -1)", "torch.nn.functional.softmax(x, -1)"),
        ("square(X)", "x ** 2"),
        ("square(X)", "x.pow(2)"),
        ("square(X)", "torch.square(x)"),
        ("mT(X)", "x.mT"),
        ("mT(X)", "x.transpose(-1, -2)"),
        ("column(X)", "x[:, None]"),
        ("column(X)", "x.unsqueeze(1)"),
        ("row(X)", "x[None, :, :]"),
        ("row(X)", "x.unsqueeze(dim=0)"),
        ("cast(X)", "x.to(torch.float16)"),
        ("cast(X)", "x.half()"),
        ("cat([X, X])", "torch.concat((x, x))"),
    ],
)
def test_ways_to_write_one_thing_are_alike(pattern, code) -> None:
    assert matched(pattern, code) == {"X": "x"}


@pytest.mark.parametrize(
    "code",
    [
        "a @ b",
        "torch.matmul(a, b)",
        "a.matmul(b)",
        "torch.einsum('ij,jk->ik', a, b)",
        "torch.einsum('...ij, ...jk -> ...ik', a, b)",
        "torch.einsum('bhij,bhjk->bhik', a, b)",
    ],
)
def test_products_of_matrices_are_alike(code) -> None:
    assert matched("A @ B", code) == {"A": "a", "B": "b"}


def test_an_einsum_may_transpose_the_second_matrix() -> None:
    assert matched("A @ mT(B)", "torch.einsum('bhid,bhjd->bhij', a, b)") == {"A": "a", "B": "b"}
    assert matched("A @ B", "torch.einsum('bhid,bhjd->bhij', a, b)") is None, (
        "b stands there, not its transpose"
    )


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("A @ B", "torch.einsum('ij,ij->ij', a, b)"),
        ("A @ B", "torch.einsum('i,j->ij', a, b)"),
        ("A @ B", "torch.einsum(equation, a, b)"),
        ("softmax(X, -1)", "x.softmax(1)"),
        ("square(X)", "x ** 3"),
        ("column(X)", "x[:, 0]"),
        ("X - X", "x - y"),
    ],
)
def test_other_things_are_not(pattern, code) -> None:
    assert matched(pattern, code) is None

"""What fakecuda writes down of CUDA's interface, against NVIDIA's own headers, where they lie beside torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpumagic.fakecuda import build

SIZES = [(pattern, kind, [int(each) for each in rest])
         for what, pattern, kind, *rest in build.answers() if what == "size"]  # fmt: skip
STATUSES = [
    (pattern, *map(int, rest)) for what, pattern, *rest in build.answers() if what == "status"
]
SITE = build.installed_torch().folder.parent.parent
TRITON = SITE / "triton/backends/nvidia/include"
STRUCTURES = ("cudaDeviceProp", "cudaPointerAttributes", "cudaFuncAttributes")


def folders() -> list[Path]:
    return sorted(
        {
            path.parent
            for path in (*SITE.glob("nvidia/*/include/driver_types.h"), TRITON / "driver_types.h")
        }
    )


def version(folder: Path) -> int:
    text = (folder / "cuda.h").read_text(encoding="utf-8", errors="replace")
    return int(re.findall(r"define CUDA_VERSION (\d+)", text)[0])


def fields(name: str, number: int) -> list[str]:
    """Return the fields of one of our structures as that version of CUDA has them."""
    command = ["cc", "-E", "-P", f"-DFAKE_CUDA_VERSION={number}", str(build.NATIVE / "cudart.h")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    body = re.findall(rf"struct {name} {{(.*?)}};", text, re.DOTALL)[0]
    return [
        field
        for line in body.split(";")
        for field in re.findall(r"(\w+)(?:\[\w+\])*\s*(?:,|$)", line.strip())
    ]


def layout(folder: Path, header: str, flags: list[str], tmp_path: Path) -> str:
    """Compile a program that prints where each field is, by one of the headers, and run it."""
    lines = [
        f'#include "{header}"',
        "#include <stddef.h>",
        "#include <stdio.h>",
        "int main(void) {",
    ]
    for name in STRUCTURES:
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));'
            for field in fields(name, version(folder))
        ]
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]), encoding="utf-8")
    built = subprocess.run(
        ["cc", *flags, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert not built.returncode, built.stderr
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(SITE)))
def test_the_structures_lie_as_nvidia_has_them(folder: Path, tmp_path: Path) -> None:
    if (
        not (folder / "crt/host_defines.h").exists()
        and not (TRITON / "crt/host_defines.h").exists()
    ):
        pytest.skip("crt/host_defines.h is not beside torch: pip install nvidia-cuda-crt")
    theirs = layout(folder, "driver_types.h", [f"-I{folder}", f"-I{TRITON}"], tmp_path)
    ours = layout(
        folder,
        "cudart.h",
        [f"-I{build.NATIVE}", f"-DFAKE_CUDA_VERSION={version(folder)}"],
        tmp_path,
    )
    assert ours == theirs
    assert len(ours.splitlines()) > 100


def prototypes() -> dict[str, list[str]]:
    """Return the parameters of every function of the compute libraries' headers."""
    names = ("cusolverDn.h", "cusparse.h", "cufft*.h", "cudnn_*.h", "cublas_api.h")
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for name in names
        for path in SITE.glob(f"nvidia/*/include/{name}")
    ]
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", "\n".join(texts), flags=re.DOTALL)
    found = re.findall(r"\b(cu(?:solver|sparse|fft|dnn|blas)\w+)\s*\(([^()]*)\)\s*;", text)
    return {name: [" ".join(part.split()) for part in inside.split(",")] for name, inside in found}


PROTOTYPES = prototypes()
NEEDS_HEADERS = pytest.mark.skipif(
    not PROTOTYPES, reason="no headers of cuSOLVER, cuSPARSE, cuDNN or cuBLAS here"
)


@NEEDS_HEADERS
@pytest.mark.parametrize(
    ("pattern", "kind", "numbers"), SIZES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_size_is_written_where_the_header_has_it(
    pattern: str, kind: str, numbers: list[int]
) -> None:
    found = {name: parts for name, parts in PROTOTYPES.items() if re.fullmatch(pattern, name)}
    assert found
    for name, parts in found.items():
        for number in numbers:
            assert re.fullmatch(
                rf"{kind} ?\* ?\w*(work|size)\w*", parts[number - 1], re.IGNORECASE
            ), (name, parts)


@NEEDS_HEADERS
@pytest.mark.parametrize(
    ("pattern", "number", "count"), STATUSES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_status_is_written_where_the_header_has_it(pattern: str, number: int, count: int) -> None:
    found = {name: parts for name, parts in PROTOTYPES.items() if re.fullmatch(pattern, name)}
    assert found
    for name, parts in found.items():
        assert re.fullmatch(r"int ?\* ?\w*info\w*", parts[number - 1], re.IGNORECASE), (name, parts)
        if count:
            assert re.fullmatch(r"(int|int64_t) batchSize", parts[count - 1]), (name, parts)


@NEEDS_HEADERS
def test_no_argument_before_an_answer_is_a_float() -> None:
    """Numbers and pointers come in other registers than floats; the generated functions know of the first only."""
    for name, parts in PROTOTYPES.items():
        answers = [row[0] for row in (*SIZES, *STATUSES) if re.fullmatch(row[0], name)]
        assert not answers or not any(
            re.match(r"(const )?(float|double|cu\w*Complex) \w", part) for part in parts
        ), name

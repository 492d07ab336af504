"""Compile the fake libraries for the torch that is installed, once, and keep them in the user's cache.

Torch is not imported here: what it asks for is read from its libraries with `nm` and `readelf`, which come with every
C compiler. Functions that `native/` writes are compiled; every other name that the real library exports, or that
torch asks for, is generated: it succeeds and does nothing, or answers "not supported" and is named once on stderr.

Some generated functions answer 0 (`native/answers.txt`). A size that is asked for is one that only the real library
knows; it is counted, and `unknown_sizes` has it. A status is what a factorisation says of its values (whether a matrix
is singular, whether it converged); there are no values here, so all goes well.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpumagic.compiled import cache_folder, load_folder, unfinished
from gpumagic.errors import FakecudaUnavailable

NATIVE = Path(__file__).parent / "native"
MAJOR_VERSIONS = (12, 13)  # of CUDA, whose structures `native/cudart.h` knows
CORE = ("devices.c", "memory.c", "transfers.c", "launches.c", "sizes.c", "errors.c", "finalizing.c")
FLAGS = ("-O1", "-fPIC", "-shared", "-w", "-std=gnu11")


@dataclass(frozen=True)
class Library:
    """A library of CUDA that is exchanged.

    Attributes:
        stem: its name without `lib` and `.so`.
        sources: the files of `native/` that hold its written functions.
        prefix: how the names of its functions begin, as a regular expression.
        unsupported: the status that its other functions return.
        quiet: which of those succeed instead, and do nothing, as a regular expression.
        says: whether what is not supported is named on stderr. NVML's callers ask whether it is, and show why not.
        handles: which of them hand out an opaque structure through their first argument, or free it.
    """

    stem: str
    sources: tuple[str, ...]
    prefix: str
    unsupported: int
    quiet: str = r"(?!)"
    says: bool = True
    handles: str = r"(?!)"


LIBRARIES = (
    Library(
        "cudart",
        ("runtime.c", "streams.c", "kernels.c", "capture.c", "graphs.c", "pools.c"),
        r"(__)?cuda",
        801,
    ),
    Library("cuda", ("driver.c",), r"cu[A-Z](?!ile)", 801),
    Library("cublas", ("cublas.c",), "cublas", 15, quiet=r"cublas(?!Get|Create)"),
    Library(
        "cublasLt",
        ("cublaslt.c",),
        "cublasLt",
        15,
        quiet=r"cublasLt.*(Set|Init|Matmul$|Transform$)",
    ),
    Library(
        "cudnn",
        ("cudnn.c",),
        "cudnn",
        3000,
        r"cudnn(?!Get|Create|Query)",
        handles=r"cudnn(Create|Destroy)",
    ),
    Library(
        "cusolver",
        (),
        "cusolver",
        9,
        r"cusolverDn(?!\w*(Get|[bB]uffer))",
        handles=r"cusolverDn(Create|Destroy)",
    ),
    Library(
        "cusparse",
        ("cusparse.c",),
        "cusparse",
        10,
        r"cusparse(?!Lt|\w*Get|\w*[bB]ufferSize)",
        handles=r"cusparse(Create(?!Identity)|Destroy|Sp(GEMM|SM|SV)_(create|destroy))",
    ),
    Library("cufft", ("cufft.c",), "cufft", 16, r"cufft(Destroy|Set|XtSet|XtExec$|Exec)"),
    Library(
        "nccl",
        ("nccl.c",),
        "p?nccl",
        5,
        r"nccl(Send|Recv|Comm(Finalize|(Window)?Deregister)|RedOpDestroy)",
    ),
    Library("nvidia-ml", ("nvml.c",), "nvml", 3, says=False),  # NVML_ERROR_NOT_SUPPORTED
)


@dataclass(frozen=True)
class Torch:
    """The installed torch, as its files say.

    Attributes:
        version: of torch.
        cuda: the version of CUDA that it was built for, such as `13.0`.
        folder: where its libraries are.
    """

    version: str
    cuda: str
    folder: Path


def installed_torch() -> Torch:
    """Return the torch that `import torch` would import.

    Raises:
        FakecudaUnavailable: there is none, or it is not a CUDA build.
    """
    if sys.platform != "linux":
        raise FakecudaUnavailable("fakecuda runs on Linux only; on Windows, use it in WSL")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise FakecudaUnavailable(
            "fakecuda needs torch, and there is none here; install it with: pip install torch"
        )
    package = Path(spec.origin).parent
    text = (package / "version.py").read_text(encoding="utf-8")
    said = dict(re.findall(r"^(\w+)(?:: [^=]*)? = '([^']*)'", text, re.MULTILINE))
    version, cuda = said.get("__version__", ""), said.get("cuda", "")
    if not cuda:
        raise FakecudaUnavailable(
            f"fakecuda runs torch's CUDA build, and torch {version} here is none; "
            "pip takes one on Linux with: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        )
    if int(cuda.split(".")[0]) not in MAJOR_VERSIONS:
        raise FakecudaUnavailable(
            f"fakecuda stands in for CUDA 12 and 13, and torch {version} here is built for CUDA {cuda}"
        )
    return Torch(version, cuda, package / "lib")


def libraries() -> Path:
    """Return the folder of the fake libraries for the installed torch; the first call compiles them, some seconds.

    Raises:
        FakecudaUnavailable: there is no C compiler, no CUDA build of torch, or they do not compile or cannot be kept.
    """
    torch = installed_torch()
    digest = hashlib.sha256(f"{torch.version} {torch.folder}".encode())
    for source in (*sorted(NATIVE.iterdir()), *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(source.read_bytes())
    home = cache_folder("fakecuda") / f"torch-{torch.version}-{digest.hexdigest()[:16]}"
    if re.search(r"[\s:]", str(home)):
        raise FakecudaUnavailable(
            f"fakecuda cannot be loaded from {home.parent}: LD_PRELOAD takes no path with a space or a colon; "
            "set XDG_CACHE_HOME to one without"
        )
    load_folder(
        home, "fakecuda", FakecudaUnavailable, home.exists, lambda: _build(torch, _compiler(), home)
    )
    return home


def _compiler() -> list[str]:
    for command in os.environ.get("CC", ""), "cc", "gcc", "clang":
        if command.split() and shutil.which(command.split()[0]):
            break
    else:
        raise FakecudaUnavailable(
            "fakecuda is compiled on first use and there is no C compiler (cc) here; "
            "install one, e.g. `apt install gcc`"
        )
    for tool in ("nm", "readelf"):
        if not shutil.which(tool):
            raise FakecudaUnavailable(
                f"fakecuda reads torch's libraries with {tool}; install it: `apt install binutils`"
            )
    return command.split()


def _build(torch: Torch, compiler: list[str], home: Path) -> None:
    asked = {**dict.fromkeys(_asked_by_name(torch), ""), **asked_names(torch)}
    major, minor = torch.cuda.split(".")[:2]
    number = 1000 * int(major) + 10 * int(minor)
    common = [*compiler, *FLAGS, f"-DFAKE_CUDA_VERSION={number}", *_versions(torch), f"-I{NATIVE}"]
    with unfinished(home) as folder, ThreadPoolExecutor() as pool:
        made = folder / "made"
        made.mkdir(mode=0o700)
        core = [str(NATIVE / name) for name in CORE]
        _compile([*common, *core, "-o", str(made / "libfakecuda.so"), "-ldl", "-lpthread"])
        list(
            pool.map(
                _compile, [[*common, *_arguments(each, torch, asked, made)] for each in LIBRARIES]
            )
        )
        (made / "libcuda.so").symlink_to(
            "libcuda.so.1"
        )  # Triton before 3.6 links its launcher with -lcuda
        made.rename(home)


def _compile(command: list[str]) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines() or ["the compiler said nothing"]
        line = next((line for line in lines if "error" in line), lines[-1])
        raise FakecudaUnavailable(f"fakecuda does not compile here: {line.strip()}")


def _versions(torch: Torch) -> list[str]:
    """Return which cuDNN and NCCL lie beside torch, as macros: torch compares them with those it was built for."""
    found = []
    for name, header in (
        ("CUDNN", "nvidia/cudnn/include/cudnn_version*.h"),
        ("NCCL", "nvidia/nccl/include/nccl.h"),
    ):
        for path in sorted(torch.folder.parent.parent.glob(header))[:1]:
            text = path.read_text(encoding="utf-8", errors="replace")
            parts = re.findall(rf"define {name}_(?:MAJOR|MINOR|PATCH|PATCHLEVEL) (\d+)", text)[:3]
            major, minor, patch = map(int, parts) if len(parts) == 3 else (0, 0, 0)
            if major:
                found.append(f"-DFAKE_{name}_VERSION={10000 * major + 100 * minor + patch}")
    return found


def _arguments(library: Library, torch: Torch, asked: dict[str, str], made: Path) -> list[str]:
    """Generate what a library has besides its sources, and return what the compiler makes it of."""
    soname = _soname(library, torch)
    sources = [NATIVE / name for name in library.sources]
    written = set(
        re.findall(
            r"^FAKE_API [^;{]*?\**\b(\w+)\(",
            "\n".join(s.read_text() for s in sources),
            re.MULTILINE,
        )
    )
    wanted = {name for name in asked if _owner(name) == library.stem} | _exported(soname, torch)
    generated = made.parent / f"{library.stem}_generated.c"
    generated.write_text(_generate(library, sorted(wanted - written)), encoding="utf-8")
    script = made.parent / f"{library.stem}.map"
    script.write_text(
        f"{soname if soname in asked.values() else ''} {{ global: *; }};\n", encoding="utf-8"
    )
    return [
        *map(str, sources),
        str(generated),
        "-o",
        str(made / soname),
        f"-Wl,-soname,{soname}",
        f"-Wl,--version-script,{script}",
        f"-L{made}",
        "-lfakecuda",
        "-Wl,-rpath,$ORIGIN",
        "-ldl",
        "-lpthread",
    ]


def _owner(name: str) -> str:
    """Return which library a function is of, by its name."""
    found = [library.stem for library in LIBRARIES if re.match(library.prefix, name)]
    return max(found, key=len, default="")


def asked_names(torch: Torch) -> dict[str, str]:
    """Return the functions of CUDA that torch's libraries link to, each with the version of its symbol or ''."""
    found = {}
    prefixes = re.compile("|".join(library.prefix for library in LIBRARIES))
    for line in _output(
        [
            "nm",
            "-D",
            "--undefined-only",
            "--with-symbol-versions",
            *map(str, _torch_libraries(torch)),
        ]
    ):
        name, _, version = line.split()[-1].partition("@") if line.split() else ("", "", "")
        if prefixes.match(name):
            found[name] = version
    return found


def _torch_libraries(torch: Torch) -> list[Path]:
    others = {"libtorch_python.so", "libcaffe2_nvrtc.so", "libtorch_nvshmem.so", "libtorch.so"}
    return [
        path
        for path in sorted(torch.folder.glob("lib*.so"))
        if "cuda" in path.name or path.name in others
    ]


def _soname(library: Library, torch: Torch) -> str:
    if library.stem in {"cuda", "nvidia-ml"}:
        return f"lib{library.stem}.so.1"
    for line in _output(["readelf", "-d", *map(str, _torch_libraries(torch))]):
        match = re.search(rf"NEEDED.*\[(lib{library.stem}\.so\.[\d.]+)\]", line)
        if match:
            return match[1]
    return f"lib{library.stem}.so"


def _exported(soname: str, torch: Torch) -> set[str]:
    """Return what the real library exports, where it lies beside torch: extensions may ask for more than torch does."""
    for path in torch.folder.parent.parent.glob(f"nvidia/*/lib/{soname}"):
        names = (
            line.split()[-1].partition("@")[0]
            for line in _output(["nm", "-D", "--defined-only", str(path)])
            if line
        )
        return {name for name in names if re.fullmatch(r"(__|p)?(cu|nccl)\w+", name)}
    return set()


def _asked_by_name(torch: Torch) -> set[str]:
    """Return what is looked up by name: of the driver and of NVML by c10, Triton and nvidia-ml-py."""
    held = (torch.folder / "libc10_cuda.so").read_bytes()
    names = {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+|nvml\w+)(?=\0)", held)}
    header = torch.folder.parent.parent / "triton/backends/nvidia/include/cuda.h"
    text = header.read_text(encoding="utf-8", errors="replace") if header.exists() else ""
    binding = importlib.util.find_spec("pynvml")
    if binding is not None and binding.origin is not None:
        source = Path(binding.origin).read_text(encoding="utf-8", errors="replace")
        names.update(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    return {
        *names,
        *re.findall(r"\b(cu[A-Z]\w+)\s*\(", text),
        *re.findall(r"#define \w+\s+(cu[A-Z]\w+_v\d)", text),
    }


def _generate(library: Library, names: list[str]) -> str:
    lines = [
        '#include "fake.h"',
        "#include <stdlib.h>",
        "#include <string.h>",
        "static int succeed(void) { return 0; }",
        "static int make(void **made) { return *made = calloc(1, 512), 0; }",
        "static int discard(void *made) { return free(made), 0; }",
    ]
    return "\n".join([*lines, *(_generate_function(library, name) for name in names)]) + "\n"


def _generate_function(library: Library, name: str) -> str:
    answer = answering(name)
    if answer is not None:
        return answer
    if re.match(library.handles, name):
        parameter, alias = ("void **made", "make") if "reate" in name else ("void *made", "discard")
        return f'FAKE_API int {name}({parameter}) __attribute__((alias("{alias}")));'
    if re.fullmatch(r"\w+Get(Error|Status)(String|Name)", name):
        return f'FAKE_API const char *{name}(int s) {{ return s ? "not supported by fakecuda" : "success"; }}'
    if re.match(library.quiet, name):
        return f'FAKE_API int {name}(void) __attribute__((alias("succeed")));'
    said = f'fake_missing("lib{library.stem}", "{name}"); ' if library.says else ""
    return f"FAKE_API int {name}(void) {{ {said}return {library.unsupported}; }}"


def _output(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


@functools.cache
def answers() -> list[list[str]]:
    """Return what `native/answers.txt` has: what is answered, functions as a regular expression, type, arguments."""
    lines = (NATIVE / "answers.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def answering(name: str) -> str | None:
    """Return a C function of that name that answers 0 and succeeds; None if it has nothing to answer."""
    written, used = [], [0]
    for what, pattern, *rest in answers():
        if not re.fullmatch(pattern, name):
            continue
        numbers = [int(each) for each in rest if each.isdecimal()]
        used += numbers
        if what == "size":
            written += [f"if (a{number}) *({rest[0]} *)a{number} = 0;" for number in numbers]
            written.append(f'fake_unknown_size("{name}");')
        else:
            number, count = numbers
            how_many = f"(unsigned)a{count}" if count else "1"
            written.append(
                f"if (a{number}) memset((void *)a{number}, 0, {how_many} * sizeof(int));"
            )
    if not written:
        return None
    # Numbers and pointers are passed alike, so the arguments need no types of their own. None of these is a float.
    arguments = ", ".join(f"int64_t a{number}" for number in range(1, max(used) + 1))
    return f"FAKE_API int {name}({arguments}) {{ {' '.join(written)} return 0; }}"

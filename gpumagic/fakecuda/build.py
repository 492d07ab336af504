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
CORE = (
    "devices.c",
    "memory.c",
    "transfers.c",
    "launches.c",
    "sizes.c",
    "errors.c",
    "finalizing.c",
)
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
    Library(
        "cufft", ("cufft.c",), "cufft", 16, r"cufft(Destroy|Set|XtSet|XtExec$|Exec)"
    ),
    Library(
        "nccl",
        ("nccl.c",),
        "p?nccl",
        5,
        r"nccl(Send|Recv|Comm(Finalize|(Window)?Deregister)|RedOpDestroy)",
    ),
    Library(
        "nvidia-ml", ("nvml.c",), "nvml", 3, says=False
    ),  # NVML_ERROR_NOT_SUPPORTED
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
        raise FakecudaUnavailable(
            "fakecuda runs on Linux only; on Windows, use it in WSL"
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise FakecudaUnavailable(
            "fakecuda needs torch, and there is none here; install it with: pip install torch"
        )
    package = Path(spec.origin).parent
    text = (package / "version.py").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(\w+)(?:: [^=]*)? = '([^']*)'", text, re.MULTILINE))
    version = variables.get("__version__", "")
    cuda = variables.get("cuda", "")
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
    ours = sorted(Path(__file__).parent.glob("*.py"))
    for source in (*sorted(NATIVE.iterdir()), *ours):
        digest.update(source.read_bytes())
    name = f"torch-{torch.version}-{digest.hexdigest()[:16]}"
    home = cache_folder("fakecuda") / name
    if re.search(r"[\s:]", str(home)):
        raise FakecudaUnavailable(
            f"fakecuda cannot be loaded from {home.parent}: LD_PRELOAD takes no path with a space or a colon; "
            "set XDG_CACHE_HOME to one without"
        )
    load_folder(
        home,
        "fakecuda",
        FakecudaUnavailable,
        home.exists,
        lambda: _build(torch, _compiler(), home),
    )
    return home


def _compiler() -> list[str]:
    """Return the command of the C compiler, whose package also brings what reads torch's libraries."""
    command = _found_compiler()
    for tool in ("nm", "readelf"):
        if not shutil.which(tool):
            raise FakecudaUnavailable(
                f"fakecuda reads torch's libraries with {tool}; install it: `apt install binutils`"
            )
    return command


def _found_compiler() -> list[str]:
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = command.split()
        if words and shutil.which(words[0]):
            return words
    raise FakecudaUnavailable(
        "fakecuda is compiled on first use and there is no C compiler (cc) here; "
        "install one, e.g. `apt install gcc`"
    )


def _build(torch: Torch, compiler: list[str], home: Path) -> None:
    """Compile all libraries into a folder."""
    asked = dict.fromkeys(_asked_by_name(torch), "") | asked_names(torch)
    major, minor = torch.cuda.split(".")[:2]
    number = 1000 * int(major) + 10 * int(minor)
    macros = [f"-DFAKE_CUDA_VERSION={number}", *_versions(torch)]
    common = [*compiler, *FLAGS, *macros, f"-I{NATIVE}"]
    with unfinished(home) as folder, ThreadPoolExecutor() as pool:
        made = folder / "made"
        made.mkdir(mode=0o700)
        core = [str(NATIVE / name) for name in CORE]
        _compile(
            [*common, *core, "-o", str(made / "libfakecuda.so"), "-ldl", "-lpthread"]
        )
        commands: list[list[str]] = []
        for library in LIBRARIES:
            commands.append(common + _arguments(library, torch, asked, made))
        list(pool.map(_compile, commands))  # as a list, so that errors are raised here
        # Triton before 3.6 links its launcher with -lcuda.
        (made / "libcuda.so").symlink_to("libcuda.so.1")
        made.rename(home)


def _compile(command: list[str]) -> None:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines() or ["the compiler said nothing"]
        reasons = [line for line in lines if "error" in line] or lines[-1:]
        raise FakecudaUnavailable(
            f"fakecuda does not compile here: {reasons[0].strip()}"
        )


def _versions(torch: Torch) -> list[str]:
    """Return which cuDNN and NCCL lie beside torch, as macros: torch compares them with those it was built for."""
    macros: list[str] = []
    for name, header in (
        ("CUDNN", "nvidia/cudnn/include/cudnn_version*.h"),
        ("NCCL", "nvidia/nccl/include/nccl.h"),
    ):
        for path in sorted(torch.folder.parent.parent.glob(header))[:1]:
            text = path.read_text(encoding="utf-8", errors="replace")
            parts = re.findall(
                rf"define {name}_(?:MAJOR|MINOR|PATCH|PATCHLEVEL) (\d+)", text
            )
            if len(parts) < 3 or not int(parts[0]):
                continue
            major, minor, patch = map(int, parts[:3])
            version = 10000 * major + 100 * minor + patch
            macros.append(f"-DFAKE_{name}_VERSION={version}")
    return macros


def _arguments(
    library: Library, torch: Torch, asked: dict[str, str], made: Path
) -> list[str]:
    """Generate what a library has besides its sources, and return what the compiler makes it of."""
    soname = _soname(library, torch)
    sources = [NATIVE / name for name in library.sources]
    written: set[str] = set()
    for source in sources:
        text = source.read_text()
        written.update(re.findall(r"^FAKE_API [^;{]*?\**\b(\w+)\(", text, re.MULTILINE))
    wanted = _exported(soname, torch)
    wanted.update(name for name in asked if _owner(name) == library.stem)
    generated = made.parent / f"{library.stem}_generated.c"
    generated.write_text(_generate(library, sorted(wanted - written)), encoding="utf-8")
    script = made.parent / f"{library.stem}.map"
    version = soname if soname in asked.values() else ""
    script.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
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
    """Return which library a function is of, by its name: the one with the longest name that fits."""
    found = [library.stem for library in LIBRARIES if re.match(library.prefix, name)]
    return max(found, key=len, default="")


def asked_names(torch: Torch) -> dict[str, str]:
    """Return the functions of CUDA that torch's libraries link to, each with the version of its symbol or ''."""
    found: dict[str, str] = {}
    prefixes = re.compile("|".join(library.prefix for library in LIBRARIES))
    options = ["-D", "--undefined-only", "--with-symbol-versions"]
    for line in _output(["nm", *options, *map(str, _torch_libraries(torch))]):
        if not line.strip():
            continue
        name, _, version = line.split()[-1].partition("@")
        if prefixes.match(name):
            found[name] = version
    return found


def _torch_libraries(torch: Torch) -> list[Path]:
    others = {
        "libtorch_python.so",
        "libcaffe2_nvrtc.so",
        "libtorch_nvshmem.so",
        "libtorch.so",
    }
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
        names: set[str] = set()
        for line in _output(["nm", "-D", "--defined-only", str(path)]):
            if line:
                name, _, _ = line.split()[-1].partition("@")
                names.add(name)
        return {name for name in names if re.fullmatch(r"(__|p)?(cu|nccl)\w+", name)}
    return set()


def _asked_by_name(torch: Torch) -> set[str]:
    """Return what is looked up by name: of the driver and of NVML by c10, Triton and nvidia-ml-py."""
    c10 = (torch.folder / "libc10_cuda.so").read_bytes()
    names = {
        name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+|nvml\w+)(?=\0)", c10)
    }
    header = torch.folder.parent.parent / "triton/backends/nvidia/include/cuda.h"
    if header.exists():
        text = header.read_text(encoding="utf-8", errors="replace")
        names.update(re.findall(r"\b(cu[A-Z]\w+)\s*\(", text))
        names.update(re.findall(r"#define \w+\s+(cu[A-Z]\w+_v\d)", text))
    binding = importlib.util.find_spec("pynvml")
    if binding is not None and binding.origin is not None:
        source = Path(binding.origin).read_text(encoding="utf-8", errors="replace")
        names.update(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    return names


def _generate(library: Library, names: list[str]) -> str:
    """Return the C code of the functions that are not written."""
    lines = [
        '#include "fake.h"',
        "#include <stdlib.h>",
        "#include <string.h>",
        "static int succeed(void) { return 0; }",
        "static int make(void **made) { return *made = calloc(1, 512), 0; }",
        "static int discard(void *made) { return free(made), 0; }",
    ]
    lines += [_generate_function(library, name) for name in names]
    return "\n".join(lines) + "\n"


def _generate_function(library: Library, name: str) -> str:
    answer = answering(name)
    if answer is not None:
        return answer
    if re.match(library.handles, name):
        if "reate" in name:
            return f'FAKE_API int {name}(void **made) __attribute__((alias("make")));'
        return f'FAKE_API int {name}(void *made) __attribute__((alias("discard")));'
    if re.fullmatch(r"\w+Get(Error|Status)(String|Name)", name):
        return f'FAKE_API const char *{name}(int s) {{ return s ? "not supported by fakecuda" : "success"; }}'
    if re.match(library.quiet, name):
        return f'FAKE_API int {name}(void) __attribute__((alias("succeed")));'
    complaint = f'fake_missing("lib{library.stem}", "{name}"); ' if library.says else ""
    return f"FAKE_API int {name}(void) {{ {complaint}return {library.unsupported}; }}"


def _output(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@functools.cache
def answers() -> list[list[str]]:
    """Return what `native/answers.txt` has: what is answered, functions as a regular expression, type, arguments."""
    lines = (NATIVE / "answers.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def answering(name: str) -> str | None:
    """Return a C function of that name that answers 0 and succeeds; None if it has nothing to answer."""
    statements: list[str] = []
    last = 0
    for what, pattern, *rest in answers():
        if not re.fullmatch(pattern, name):
            continue
        numbers = [int(word) for word in rest if word.isdecimal()]
        last = max([last, *numbers])
        if what == "size":
            kind = rest[0]
            statements += [
                f"if (a{number}) *({kind} *)a{number} = 0;" for number in numbers
            ]
            statements.append(f'fake_unknown_size("{name}");')
        else:
            number, count = numbers
            times = f"(unsigned)a{count}" if count else "1"
            zero = f"memset((void *)a{number}, 0, {times} * sizeof(int));"
            statements.append(f"if (a{number}) {zero}")
    if not statements:
        return None
    # Numbers and pointers are passed alike, so the arguments need no types of their own. None of these is a float.
    arguments = ", ".join(f"int64_t a{number}" for number in range(1, last + 1))
    body = " ".join(statements)
    return f"FAKE_API int {name}({arguments}) {{ {body} return 0; }}"

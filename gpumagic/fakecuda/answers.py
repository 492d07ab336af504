"""What a generated function writes to its caller's memory: always 0.

A size that is asked for is one that only the real library knows; it is counted, and `fakecuda.unknown_sizes` has it.
A status is what a factorisation says of its values (whether a matrix is singular, whether it converged); there are no
values here, so all goes well.
"""

from __future__ import annotations

import re

SIZES = (
    # functions, the type of the answer, the numbers of the arguments that it is written to
    (r"cudnnGetConvolution(Forward|BackwardData|BackwardFilter)WorkspaceSize", "size_t", (7,)),
    (r"cudnnGetBatchNormalizationTrainingExReserveSpaceSize|cudnnGetCTCLossWorkspaceSize_v8", "size_t", (6,)),
    (r"cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize|cudnnGetCTCLossWorkspaceSize", "size_t", (9,)),
    (r"cudnnGetBatchNormalizationBackwardExWorkspaceSize", "size_t", (11,)),
    (r"cusolverDn[SDCZ]gesvd_bufferSize", "int", (4,)),
    (r"cusolverDn[SDCZ]sytrf_bufferSize", "int", (5,)),
    (r"cusolverDn[SDCZ](geqrf|getrf|potrf)_bufferSize", "int", (6,)),
    (r"cusolverDn[SDCZ]((sy|he)ev(d|j|jBatched)|orgqr|ungqr)_bufferSize", "int", (8,)),
    (r"cusolverDn[SDCZ](ormqr|unmqr|gesvdjBatched)_bufferSize", "int", (12,)),
    (r"cusolverDn[SDCZ]gesvdj_bufferSize", "int", (13,)),
    (r"cusolverDn[SDCZ]gesvdaStridedBatched_bufferSize", "int", (17,)),
    (r"cusolverDnXpotrf_bufferSize", "size_t", (9, 10)),
    (r"cusolverDnXgeqrf_bufferSize", "size_t", (11, 12)),
    (r"cusolverDnX(syevd|syevBatched|sytrs)_bufferSize", "size_t", (12, 13)),
    (r"cusolverDnXgeev_bufferSize", "size_t", (18, 19)),
    (r"cusparseX(coo|csr)sort_bufferSizeExt", "size_t", (7,)),
    (r"cusparseSp(MV|SV)_bufferSize", "size_t", (10,)),
    (r"cusparse(SpMM|SDDMM|SpSM)_bufferSize", "size_t", (11,)),
    (r"cusparseSpGEMM_(workEstimation|compute)", "size_t", (12,)),
    (r"cusparse[SDCZ]bsrsv2_bufferSize", "int", (12,)),
    (r"cusparse[SDCZ]bsrsm2_bufferSize", "int", (14,)),
    (r"cusparse[SDCZ]csrgeam2_bufferSizeExt", "size_t", (20,)),
    (r"cufftXtMakePlanMany", "size_t", (13,)),
)

STATUSES = (
    # functions, the number of the argument, the number of the one that says how many there are, or 0 for one
    (r"cublas[SDCZ]getrfBatched", 6, 7),
    (r"cublas[SDCZ]matinvBatched", 7, 8),
    (r"cublas[SDCZ]geqrfBatched", 7, 0),
    (r"cublas[SDCZ]getriBatched", 8, 9),
    (r"cublas[SDCZ](getrs|gels)Batched", 10, 0),
    (r"cublas[SDCZ]gelsBatched", 11, 12),
    (r"cusolverDn[SDCZ]potrfBatched", 6, 7),
    (r"cusolverDn[SDCZ](getrf|potrf)", 8, 0),
    (r"cusolverDn[SDCZ](geqrf|sytrf|potrs|potrsBatched)", 9, 0),
    (r"cusolverDn[SDCZ](getrs|orgqr|ungqr|(sy|he)ev[dj])", 10, 0),
    (r"cusolverDn[SDCZ](sy|he)evjBatched", 10, 12),
    (r"cusolverDn[SDCZ](ormqr|unmqr)", 14, 0),
    (r"cusolverDn[SDCZ]gesvdjBatched", 14, 16),
    (r"cusolverDn[SDCZ]gesvdj", 15, 0),
    (r"cusolverDn[SDCZ]gesvd", 16, 0),
    (r"cusolverDn[SDCZ]gesvdaStridedBatched", 19, 21),
    (r"cusolverDnXpotrs", 12, 0),
    (r"cusolverDnXpotrf", 13, 0),
    (r"cusolverDnXgeqrf", 15, 0),
    (r"cusolverDnX(syevd|sytrs)", 16, 0),
    (r"cusolverDnXsyevBatched", 16, 17),
    (r"cusolverDnXgeev", 22, 0),
)


def answering(name: str) -> str | None:
    """Return a C function of that name that answers 0 and succeeds; None if it has nothing to answer."""
    written, most = [], 0
    for pattern, kind, numbers in SIZES:
        if re.fullmatch(pattern, name):
            written += [f"if (a{number}) *({kind} *)a{number} = 0;" for number in numbers]
            written.append(f'fake_unknown_size("{name}");')
            most = max(most, *numbers)
    for pattern, number, count in STATUSES:
        if re.fullmatch(pattern, name):
            how_many = f"(unsigned)a{count}" if count else "1"
            written.append(f"if (a{number}) memset((void *)a{number}, 0, {how_many} * sizeof(int));")
            most = max(most, number, count)
    if not written:
        return None
    # Numbers and pointers are passed alike, so the arguments need no types of their own. None of these is a float.
    arguments = ", ".join(f"int64_t a{number}" for number in range(1, most + 1))
    return f"FAKE_API int {name}({arguments}) {{ {' '.join(written)} return 0; }}"

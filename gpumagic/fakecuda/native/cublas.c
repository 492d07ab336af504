/* libcublas: handles, and copies of matrices; what multiplies is generated and does nothing. */
#include "fake.h"

#include <stdlib.h>

struct handle {
  void *stream;
  int math_mode, pointer_mode;
};

FAKE_API int cublasCreate_v2(struct handle **handle) {
  if (!fake_enter()) return 1; /* CUBLAS_STATUS_NOT_INITIALIZED */
  *handle = calloc(1, sizeof **handle);
  return OK;
}
FAKE_API int cublasDestroy_v2(struct handle *handle) { return free(handle), OK; }
FAKE_API int cublasSetStream_v2(struct handle *handle, void *stream) { return handle->stream = stream, OK; }
FAKE_API int cublasGetStream_v2(struct handle *handle, void **stream) { return *stream = handle->stream, OK; }
FAKE_API int cublasSetMathMode(struct handle *handle, int mode) { return handle->math_mode = mode, OK; }
FAKE_API int cublasGetMathMode(struct handle *handle, int *mode) { return *mode = handle->math_mode, OK; }
FAKE_API int cublasSetPointerMode_v2(struct handle *handle, int mode) { return handle->pointer_mode = mode, OK; }
FAKE_API int cublasGetPointerMode_v2(struct handle *handle, int *mode) { return *mode = handle->pointer_mode, OK; }
FAKE_API int cublasGetVersion_v2(struct handle *handle, int *version) { return *version = 10 * FAKE_CUDA_VERSION, OK; }
FAKE_API int cublasGetProperty(int which, int *value) {
  *value = which == 0 ? FAKE_CUDA_VERSION / 1000 : which == 1 ? FAKE_CUDA_VERSION % 1000 / 10 : 0;
  return OK;
}
FAKE_API int cublasGetSmCountTarget(struct handle *handle, int *count) { return *count = 0, OK; } /* all */

/* Copies between the host and a device, which MAGMA makes. Matrices are stored by columns. */

FAKE_API int cublasSetMatrixAsync(int rows, int columns, int size, const void *source, int source_rows, void *target,
                                  int target_rows, void *stream) {
  return fake_copy_rows(target, (size_t)target_rows * size, source, (size_t)source_rows * size, (size_t)rows * size,
                        columns, (uintptr_t)stream);
}
FAKE_API int cublasGetMatrixAsync(int rows, int columns, int size, const void *source, int source_rows, void *target,
                                  int target_rows, void *stream) {
  return cublasSetMatrixAsync(rows, columns, size, source, source_rows, target, target_rows, stream);
}
FAKE_API int cublasSetVectorAsync(int count, int size, const void *source, int source_step, void *target,
                                  int target_step, void *stream) {
  return fake_copy_rows(target, (size_t)target_step * size, source, (size_t)source_step * size, size, count,
                        (uintptr_t)stream);
}
FAKE_API int cublasGetVectorAsync(int count, int size, const void *source, int source_step, void *target,
                                  int target_step, void *stream) {
  return cublasSetVectorAsync(count, size, source, source_step, target, target_step, stream);
}

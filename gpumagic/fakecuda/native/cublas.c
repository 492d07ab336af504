/* libcublas: handles; what multiplies is generated and does nothing. */
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
FAKE_API const char *cublasGetStatusString(int status) { return status ? "not supported by fakecuda" : "success"; }

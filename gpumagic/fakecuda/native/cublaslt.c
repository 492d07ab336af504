/* libcublasLt: descriptors, and one algorithm without a workspace of its own for every product. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

struct result {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

static int make(void **descriptor) { return *descriptor = calloc(1, 256), OK; }

FAKE_API size_t cublasLtGetVersion(void) { return 10 * FAKE_CUDA_VERSION; }
FAKE_API size_t cublasLtGetCudartVersion(void) { return FAKE_CUDA_VERSION; }
FAKE_API int cublasLtCreate(void **handle) { return make(handle); }
FAKE_API int cublasLtDestroy(void *handle) { return free(handle), OK; }
FAKE_API int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return make(made); }
FAKE_API int cublasLtMatmulDescDestroy(void *made) { return free(made), OK; }
FAKE_API int cublasLtMatmulPreferenceCreate(void **made) { return make(made); }
FAKE_API int cublasLtMatmulPreferenceDestroy(void *made) { return free(made), OK; }
FAKE_API int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  return make(made);
}
FAKE_API int cublasLtMatrixLayoutDestroy(void *made) { return free(made), OK; }
FAKE_API int cublasLtMatrixTransformDescCreate(void **made, int scale) { return make(made); }
FAKE_API int cublasLtMatrixTransformDescDestroy(void *made) { return free(made), OK; }

FAKE_API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d,
                                            void *preference, int wanted, struct result *results, int *count) {
  *count = wanted > 0;
  if (*count) memset(results, 0, sizeof *results);
  return OK;
}

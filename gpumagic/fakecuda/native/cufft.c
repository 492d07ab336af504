/* libcufft: plans are numbers; what transforms is generated and does nothing. */
#include "fake.h"

FAKE_API int cufftCreate(int *plan) {
  static int plans;
  *plan = __atomic_add_fetch(&plans, 1, __ATOMIC_RELAXED);
  return OK;
}

FAKE_API int cufftGetVersion(int *version) { return *version = FAKE_CUDA_VERSION, OK; }

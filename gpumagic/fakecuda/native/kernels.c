/* libcudart: kernels. They are registered by the constructors of the libraries that hold them, and launched to be
 * counted; and the driver's functions by name. */
#define _GNU_SOURCE
#include "cudart.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

FAKE_API void **__cudaRegisterFatBinary(void *binary) {
  void **handle = calloc(1, sizeof *handle);
  if (handle) *handle = binary;
  return handle;
}
FAKE_API void __cudaRegisterFatBinaryEnd(void **handle) {}
FAKE_API void __cudaUnregisterFatBinary(void **handle) { free(handle); }
FAKE_API char __cudaInitModule(void **handle) { return 1; }
FAKE_API void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t size,
                                int constant, int global) {}

FAKE_API void __cudaRegisterFunction(void **handle, const char *function, char *stub, const char *name, int threads,
                                     void *tid, void *bid, void *block, void *grid, int *size) {
  fake_name_kernel(function, name, handle ? *handle : NULL);
}

static _Thread_local struct {
  struct fake_dims grid, block;
  size_t shared;
  void *stream;
} configuration;

FAKE_API unsigned __cudaPushCallConfiguration(struct fake_dims grid, struct fake_dims block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

FAKE_API int __cudaPopCallConfiguration(struct fake_dims *grid, struct fake_dims *block, size_t *shared, void **stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return OK;
}

FAKE_API int cudaLaunchKernel(const void *function, struct fake_dims grid, struct fake_dims block, void **arguments,
                              size_t shared, void *stream) {
  struct fake_device *device = fake_enter();
  if (!device) RESULT(fake_why_not());
  if (!function) RESULT(INVALID_FUNCTION);
  if (stream_of(stream) && stream_of(stream)->device != fake_current) RESULT(INVALID_HANDLE);
  if (!fake_is_launchable(grid, block)) RESULT(INVALID_CONFIGURATION);
  if ((int64_t)shared > device->shared_per_block_optin) RESULT(INVALID_VALUE);
  fake_launch(function, stream);
  return OK;
}

FAKE_API int cudaLaunchCooperativeKernel(const void *function, struct fake_dims grid, struct fake_dims block, void **arguments,
                                         size_t shared, void *stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

struct launch_config {
  struct fake_dims grid, block;
  size_t shared;
  void *stream;
};

FAKE_API int cudaLaunchKernelExC(const struct launch_config *config, const void *function, void **arguments) {
  return cudaLaunchKernel(function, config->grid, config->block, arguments, config->shared, config->stream);
}

FAKE_API int __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }

FAKE_API int __cudaLaunchKernel(const void *kernel, struct fake_dims grid, struct fake_dims block, void **arguments,
                                size_t shared, void *stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

FAKE_API int cudaGetFuncBySymbol(const void **found, const void *symbol) { return *found = symbol, OK; }

FAKE_API int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  struct fake_device *device = fake_enter();
  if (!device) RESULT(fake_why_not());
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  /* CUB refuses an architecture that it was not compiled for: on an L4 torch runs what it has for 8.6. */
  attributes->ptxVersion = attributes->binaryVersion = fake_kernel_architecture(function, device);
  attributes->maxDynamicSharedSizeBytes = 49152;
  return OK;
}

FAKE_API int cudaFuncSetAttribute(const void *function, int attribute, int value) { return OK; }
FAKE_API int cudaFuncSetCacheConfig(const void *function, int config) { return OK; }
FAKE_API int cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int ordinal) { return OK; }

FAKE_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                    size_t shared, unsigned flags) {
  ENTER();
  *blocks = fake_resident_blocks(threads, (int64_t)shared);
  return OK;
}

FAKE_API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                           size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

FAKE_API int cudaLibraryLoadData(void **library, const void *code, void *options, void **values, unsigned count,
                                 void *more, void **more_values, unsigned more_count) {
  return *library = (void *)code, OK;
}
FAKE_API int cudaLibraryUnload(void *library) { return OK; }
FAKE_API int cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return *kernel = library, OK; }

FAKE_API int cudaProfilerStart(void) { return OK; }
FAKE_API int cudaProfilerStop(void) { return OK; }

/* The driver's functions by name, for those who ask the runtime for them */

static int entry_point(const char *symbol, void **function, int *status) {
  enum { FOUND, SYMBOL_NOT_FOUND };
  char later[128];
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  snprintf(later, sizeof later, "%s_v2", symbol);
  *function = driver ? dlsym(driver, later) : NULL;
  if (driver && !*function) *function = dlsym(driver, symbol);
  if (status) *status = *function ? FOUND : SYMBOL_NOT_FOUND;
  return OK;
}

FAKE_API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                              unsigned long long flags, int *status) {
  return entry_point(symbol, function, status);
}

FAKE_API int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
  return entry_point(symbol, function, status);
}

/* libcuda: what torch, Triton and NVRTC's callers ask of the driver itself. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char context_of[FAKE_MOST_DEVICES]; /* the address of an element is the context of that device */

static void *context(int ordinal) { return &context_of[ordinal]; }
static int ordinal_of(void *context) { return context ? (int)((char *)context - context_of) : fake_current; }

FAKE_API int cuInit(unsigned flags) { return fake_device_count() ? OK : NO_DEVICE; }
FAKE_API int cuDriverGetVersion(int *version) { return *version = FAKE_CUDA_VERSION, OK; }
FAKE_API int cuDeviceGetCount(int *count) { return *count = fake_device_count(), OK; }

FAKE_API int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return fake_device(ordinal) ? OK : INVALID_DEVICE;
}

FAKE_API int cuDeviceGetName(char *name, int length, int device) {
  if (!fake_device(device)) return INVALID_DEVICE;
  snprintf(name, length, "%s", fake_device(device)->name);
  return OK;
}

FAKE_API int cuDeviceTotalMem_v2(size_t *nbytes, int device) {
  if (!fake_device(device)) return INVALID_DEVICE;
  *nbytes = fake_device(device)->capacity;
  return OK;
}

FAKE_API int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  if (!fake_device(device)) return INVALID_DEVICE;
  memcpy(uuid, fake_device(device)->uuid, 16);
  return OK;
}
FAKE_API int cuDeviceGetUuid(unsigned char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

FAKE_API int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (!fake_device(device)) return INVALID_DEVICE;
  *value = fake_attribute(device, attribute);
  return OK;
}

FAKE_API int cuDeviceCanAccessPeer(int *can, int device, int peer) {
  return *can = device != peer && fake_peer_access(), OK;
}

/* Contexts: a device's primary one is there once the runtime or its retention made it */

FAKE_API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (!fake_device(device)) return INVALID_DEVICE;
  *flags = 0;
  *active = fake_device(device)->context;
  return OK;
}

FAKE_API int cuDevicePrimaryCtxRetain(void **made, int device) {
  if (!fake_device(device)) return INVALID_DEVICE;
  fake_device(device)->context = 1;
  *made = context(device);
  return OK;
}
FAKE_API int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }

FAKE_API int cuCtxGetCurrent(void **current) {
  struct fake_device *device = fake_device(fake_current);
  *current = device && device->context ? context(fake_current) : NULL;
  return OK;
}

FAKE_API int cuCtxSetCurrent(void *current) {
  if (current) fake_current = ordinal_of(current);
  return OK;
}
FAKE_API int cuCtxPushCurrent_v2(void *current) { return cuCtxSetCurrent(current); }
FAKE_API int cuCtxPopCurrent_v2(void **current) { return cuCtxGetCurrent(current); }
FAKE_API int cuCtxGetDevice(int *device) { return *device = fake_current, OK; }
FAKE_API int cuCtxSynchronize(void) { return fake_count_sync(0), OK; }
FAKE_API int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }

FAKE_API int cuGetErrorString(int error, const char **text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : error == NOT_SUPPORTED ? "operation not supported" : "no error";
  return OK;
}
FAKE_API int cuGetErrorName(int error, const char **name) {
  *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_SUCCESS";
  return OK;
}

/* Modules and kernels: Triton and NVRTC compile for real, what they made is counted and not run */

struct function {
  char name[1]; /* as long as it is */
};

FAKE_API int cuModuleLoadData(void **module, const void *image) { return *module = malloc(1), OK; }
FAKE_API int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) {
  return cuModuleLoadData(module, image);
}
FAKE_API int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }
FAKE_API int cuModuleUnload(void *module) { return free(module), OK; }
FAKE_API int cuLibraryLoadData(void **library, const void *image, void *options, void **values, unsigned count,
                               void *more, void **more_values, unsigned more_count) {
  return cuModuleLoadData(library, image);
}
FAKE_API int cuLibraryUnload(void *library) { return cuModuleUnload(library); }

FAKE_API int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = strdup(name);
  return *function ? OK : OUT_OF_MEMORY;
}
FAKE_API int cuLibraryGetKernel(void **function, void *library, const char *name) {
  return cuModuleGetFunction(function, library, name);
}
FAKE_API int cuKernelGetFunction(void **function, void *kernel) { return *function = kernel, OK; }

FAKE_API int cuModuleGetGlobal_v2(uint64_t *pointer, size_t *nbytes, void *module, const char *name) {
  void *made = NULL;
  int error = fake_allocate(fake_current, 256, &made);
  *pointer = (uintptr_t)made;
  if (nbytes) *nbytes = 256;
  return error;
}

FAKE_API int cuFuncGetAttribute(int *value, int attribute, void *function) {
  struct fake_device *device = fake_enter();
  if (!device) return NO_DEVICE;
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : attribute == 5 || attribute == 6 ? 10 * device->major : 0;
  return OK;
}
FAKE_API int cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }
FAKE_API int cuFuncSetCacheConfig(void *function, int config) { return OK; }
FAKE_API int cuFuncSetSharedMemConfig(void *function, int config) { return OK; }

FAKE_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  struct fake_device *device = fake_enter();
  if (!device) return NO_DEVICE;
  *blocks = threads ? device->threads_per_multiprocessor / threads : 0;
  return OK;
}
FAKE_API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *function, int threads,
                                                                  size_t shared, unsigned flags) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
FAKE_API int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
  return *clusters = 1, OK;
}

static int launch(void *function) {
  if (!fake_enter()) return NO_DEVICE;
  fake_count_launch(function, function);
  return OK;
}

FAKE_API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                            void **more) {
  return launch(function);
}
FAKE_API int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                       void *stream, void **arguments) {
  return launch(function);
}
FAKE_API int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **more) {
  return launch(function);
}
FAKE_API int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address) {
  memset(map, 0, 128);
  return OK;
}

/* Memory */

FAKE_API int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
  void *start;
  size_t nbytes;
  int ordinal = fake_find((void *)(uintptr_t)pointer, &start, &nbytes);
  if (ordinal == FAKE_HOST && !fake_is_pinned((void *)(uintptr_t)pointer)) return INVALID_VALUE;
  switch (attribute) {
  case 1: *(void **)value = context(ordinal < 0 ? 0 : ordinal); return OK;
  case 2: *(unsigned *)value = ordinal < 0 ? 1 : 2; return OK; /* host, device */
  case 3: case 4: *(uint64_t *)value = pointer; return OK;
  case 7: *(uint64_t *)value = (uintptr_t)start; return OK; /* the buffer's number */
  case 8: *(int *)value = 0; return OK;                     /* managed */
  case 9: *(int *)value = ordinal; return OK;
  case 11: *(uint64_t *)value = (uintptr_t)start; return OK;
  case 12: *(size_t *)value = nbytes; return OK;
  default: return NOT_SUPPORTED;
  }
}

FAKE_API int cuMemGetAddressRange_v2(uint64_t *start, size_t *nbytes, uint64_t pointer) {
  void *found = NULL;
  size_t size = 0;
  fake_find((void *)(uintptr_t)pointer, &found, &size);
  if (!found) return INVALID_VALUE;
  if (start) *start = (uintptr_t)found;
  if (nbytes) *nbytes = size;
  return OK;
}

FAKE_API int cuMemGetInfo_v2(size_t *available, size_t *total) {
  struct fake_device *device = fake_enter();
  if (!device) return NO_DEVICE;
  *available = fake_free_bytes(device);
  *total = device->capacity;
  return OK;
}

FAKE_API int cuMemAlloc_v2(uint64_t *pointer, size_t nbytes) {
  void *made = NULL;
  if (!fake_enter()) return NO_DEVICE;
  int error = fake_allocate(fake_current, nbytes, &made);
  *pointer = (uintptr_t)made;
  return error;
}
FAKE_API int cuMemFree_v2(uint64_t pointer) { return fake_release((void *)(uintptr_t)pointer); }

FAKE_API int cuMemsetD8Async(uint64_t target, unsigned char value, size_t count, void *stream) {
  return fake_set_bytes((void *)(uintptr_t)target, value, count);
}
FAKE_API int cuMemsetD32Async(uint64_t target, unsigned value, size_t count, void *stream) {
  if (!value) return fake_set_bytes((void *)(uintptr_t)target, 0, 4 * count);
  for (size_t i = 0; i < count; i++) ((unsigned *)(uintptr_t)target)[i] = value;
  return OK;
}
FAKE_API int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t nbytes, void *stream) {
  return fake_copy_bytes(target, (void *)(uintptr_t)source, nbytes, (uintptr_t)stream);
}
FAKE_API int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t nbytes, void *stream) {
  return fake_copy_bytes((void *)(uintptr_t)target, source, nbytes, (uintptr_t)stream);
}
FAKE_API int cuStreamSynchronize(void *stream) { return fake_count_sync((uintptr_t)stream), OK; }
FAKE_API int cuStreamGetCtx(void *stream, void **found) { return *found = context(fake_current), OK; }

/* Virtual memory, for expandable_segments: addresses are reserved, bytes of the card are taken by cuMemCreate */

struct piece {
  int ordinal, holders;
  size_t nbytes;
};

struct properties {
  int type, handle_types;
  struct {
    int type, id;
  } location;
};

FAKE_API int cuMemGetAllocationGranularity(size_t *nbytes, const struct properties *wanted, int option) {
  return *nbytes = 2 << 20, OK;
}

FAKE_API int cuMemAddressReserve(uint64_t *pointer, size_t nbytes, size_t alignment, uint64_t where,
                                 unsigned long long flags) {
  void *made = NULL;
  int error = fake_reserve(fake_current, nbytes, &made);
  *pointer = (uintptr_t)made;
  return error;
}
FAKE_API int cuMemAddressFree(uint64_t pointer, size_t nbytes) { return fake_unreserve((void *)(uintptr_t)pointer); }

FAKE_API int cuMemCreate(struct piece **handle, size_t nbytes, const struct properties *wanted,
                         unsigned long long flags) {
  if (!fake_device(wanted->location.id)) return INVALID_DEVICE;
  if (fake_take(wanted->location.id, (int64_t)nbytes)) return OUT_OF_MEMORY;
  *handle = malloc(sizeof **handle);
  **handle = (struct piece){wanted->location.id, 1, nbytes};
  return OK;
}

static void let_go(struct piece *handle) {
  if (--handle->holders) return;
  fake_give(handle->ordinal, (int64_t)handle->nbytes);
  free(handle);
}

static struct mapping {
  uint64_t start;
  struct piece *handle;
} *mappings;
static size_t mapping_count, mapping_room;

FAKE_API int cuMemRelease(struct piece *handle) { return let_go(handle), OK; }

FAKE_API int cuMemMap(uint64_t pointer, size_t nbytes, size_t offset, struct piece *handle, unsigned long long flags) {
  if (mapping_count == mapping_room) {
    mapping_room = mapping_room ? 2 * mapping_room : 256;
    mappings = realloc(mappings, mapping_room * sizeof *mappings);
  }
  handle->holders++;
  mappings[mapping_count++] = (struct mapping){pointer, handle};
  return OK;
}

FAKE_API int cuMemSetAccess(uint64_t pointer, size_t nbytes, const void *access, size_t count) {
  return fake_back((void *)(uintptr_t)pointer, nbytes, 1);
}

FAKE_API int cuMemUnmap(uint64_t pointer, size_t nbytes) {
  for (size_t i = mapping_count; i-- > 0;)
    if (mappings[i].start >= pointer && mappings[i].start < pointer + nbytes) {
      let_go(mappings[i].handle);
      mappings[i] = mappings[--mapping_count];
    }
  return fake_back((void *)(uintptr_t)pointer, nbytes, 0);
}

/* What is asked of a driver by name */
FAKE_API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);
#include <dlfcn.h>
FAKE_API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  char later[128];
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  snprintf(later, sizeof later, "%s_v2", symbol);
  *function = driver ? dlsym(driver, later) : NULL;
  if (driver && !*function) *function = dlsym(driver, symbol);
  if (status) *status = *function ? 0 : 1;
  return *function ? OK : 500; /* CUDA_ERROR_NOT_FOUND */
}
FAKE_API int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* libcuda: what torch, Triton and NVRTC's callers ask of the driver itself. */
#define _GNU_SOURCE
#include "fake.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char context_of[FAKE_MOST_DEVICES]; /* the address of an element is the context of that device */

static void *context(int ordinal) { return &context_of[ordinal]; }
#define ENTER() \
  if (!fake_enter()) return fake_why_not()

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
  int ordinal = current ? (int)((char *)current - context_of) : fake_current;
  if (!fake_device(ordinal)) return INVALID_CONTEXT;
  fake_current = ordinal;
  return OK;
}
FAKE_API int cuCtxPushCurrent_v2(void *current) { return cuCtxSetCurrent(current); }
FAKE_API int cuCtxPopCurrent_v2(void **current) { return cuCtxGetCurrent(current); }
FAKE_API int cuCtxGetDevice(int *device) {
  *device = fake_current;
  return fake_device(fake_current) && fake_device(fake_current)->context ? OK : INVALID_CONTEXT;
}
FAKE_API int cuCtxSynchronize(void) { return fake_count_sync(0), OK; }
FAKE_API int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }

FAKE_API int cuGetErrorString(int error, const char **text) {
  return (*text = fake_error_text(error)) ? OK : INVALID_VALUE;
}
FAKE_API int cuGetErrorName(int error, const char **name) {
  return (*name = fake_driver_error_name(error)) ? OK : INVALID_VALUE;
}

/* Modules and kernels: Triton and NVRTC compile for real, what they made is counted and not run */

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

/* A function is the text of its name, so each has an address of its own. */
FAKE_API int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = strdup(name);
  if (!*function) return OUT_OF_MEMORY;
  fake_name_kernel(*function, *function, NULL);
  return OK;
}
FAKE_API int cuLibraryGetKernel(void **function, void *library, const char *name) {
  return cuModuleGetFunction(function, library, name);
}
FAKE_API int cuKernelGetFunction(void **function, void *kernel) { return *function = kernel, OK; }

FAKE_API int cuFuncGetAttribute(int *value, int attribute, void *function) {
  struct fake_device *device = fake_enter();
  if (!device) return fake_why_not();
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : attribute == 5 || attribute == 6 ? 10 * device->major : 0;
  return OK;
}
FAKE_API int cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }
FAKE_API int cuFuncSetCacheConfig(void *function, int config) { return OK; }
FAKE_API int cuFuncSetSharedMemConfig(void *function, int config) { return OK; }

FAKE_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  ENTER();
  *blocks = fake_resident_blocks(threads, (int64_t)shared);
  return OK;
}
FAKE_API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *function, int threads,
                                                                  size_t shared, unsigned flags) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
FAKE_API int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
  return *clusters = 1, OK;
}

static int launch(void *function, struct fake_dims grid, struct fake_dims block, unsigned shared, void *stream) {
  const struct fake_device *device = fake_enter();
  if (!device) return fake_why_not();
  if (!fake_is_launchable(grid, block) || shared > device->shared_per_block_optin) return INVALID_VALUE;
  fake_launch(function, stream);
  return OK;
}

FAKE_API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                            void **more) {
  struct fake_dims grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
  return launch(function, grid, block, shared, stream);
}
FAKE_API int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                       void *stream, void **arguments) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments, NULL);
}

struct launch_config {
  struct fake_dims grid, block;
  unsigned shared;
  void *stream;
};

FAKE_API int cuLaunchKernelEx(const struct launch_config *config, void *function, void **arguments, void **more) {
  return launch(function, config->grid, config->block, config->shared, config->stream);
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
  if (!device) return fake_why_not();
  *available = fake_free_bytes(device);
  *total = device->capacity;
  return OK;
}

FAKE_API int cuMemAlloc_v2(uint64_t *pointer, size_t nbytes) {
  void *made = NULL;
  ENTER();
  int error = fake_allocate(fake_current, nbytes, &made);
  *pointer = (uintptr_t)made;
  return error;
}
FAKE_API int cuMemFree_v2(uint64_t pointer) { return fake_release((void *)(uintptr_t)pointer); }

FAKE_API int cuMemsetD8Async(uint64_t target, unsigned char value, size_t count, void *stream) {
  return fake_set_bytes((void *)(uintptr_t)target, value, count);
}
FAKE_API int cuMemsetD32Async(uint64_t target, unsigned value, size_t count, void *stream) {
  int error = fake_set_bytes((void *)(uintptr_t)target, 0, 4 * count);
  if (error || !value) return error;
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
  int error = nbytes % FAKE_STEP ? INVALID_VALUE : fake_reserve(fake_current, nbytes, &made);
  *pointer = (uintptr_t)made;
  return error;
}
FAKE_API int cuMemAddressFree(uint64_t pointer, size_t nbytes) { return fake_unreserve((void *)(uintptr_t)pointer); }

FAKE_API int cuMemCreate(struct piece **handle, size_t nbytes, const struct properties *wanted,
                         unsigned long long flags) {
  if (wanted->location.type != 1) return NOT_SUPPORTED; /* memory of the host */
  if (!nbytes || nbytes % FAKE_STEP) return INVALID_VALUE;
  int error = fake_take(wanted->location.id, (int64_t)nbytes);
  if (error) return error;
  *handle = malloc(sizeof **handle);
  if (*handle) **handle = (struct piece){wanted->location.id, 1, nbytes};
  else fake_give(wanted->location.id, (int64_t)nbytes);
  return *handle ? OK : OUT_OF_MEMORY;
}

static void hold(struct piece *handle) { __atomic_add_fetch(&handle->holders, 1, __ATOMIC_RELAXED); }

static void let_go(struct piece *handle) {
  if (__atomic_sub_fetch(&handle->holders, 1, __ATOMIC_ACQ_REL)) return;
  fake_give(handle->ordinal, (int64_t)handle->nbytes);
  free(handle);
}

FAKE_API int cuMemRelease(struct piece *handle) { return let_go(handle), OK; }

static struct mapping {
  uint64_t start;
  struct piece *handle;
} *mappings; /* by address */
static size_t mapping_count, mapping_room;
static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;

/* The index of the first mapping at or after an address. */
static size_t first_mapping(uint64_t pointer) {
  size_t low = 0, high = mapping_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (mappings[middle].start < pointer) low = middle + 1;
    else high = middle;
  }
  return low;
}

static int insert_mapping(struct mapping mapping) {
  if (mapping_count == mapping_room) {
    size_t room = mapping_room ? 2 * mapping_room : 256;
    struct mapping *wider = realloc(mappings, room * sizeof *wider);
    if (!wider) return OUT_OF_MEMORY;
    mappings = wider;
    mapping_room = room;
  }
  size_t at = first_mapping(mapping.start);
  memmove(mappings + at + 1, mappings + at, (mapping_count - at) * sizeof mapping);
  mappings[at] = mapping;
  mapping_count++;
  return OK;
}

FAKE_API int cuMemMap(uint64_t pointer, size_t nbytes, size_t offset, struct piece *handle, unsigned long long flags) {
  void *reserved = NULL;
  fake_find((void *)(uintptr_t)pointer, &reserved, NULL);
  if (!reserved || offset || nbytes != handle->nbytes) return INVALID_VALUE;
  pthread_mutex_lock(&mapping_lock);
  int error = insert_mapping((struct mapping){pointer, handle});
  if (!error) hold(handle);
  pthread_mutex_unlock(&mapping_lock);
  return error;
}

FAKE_API int cuMemSetAccess(uint64_t pointer, size_t nbytes, const void *access, size_t count) {
  return fake_back((void *)(uintptr_t)pointer, nbytes, 1);
}

FAKE_API int cuMemUnmap(uint64_t pointer, size_t nbytes) {
  pthread_mutex_lock(&mapping_lock);
  size_t from = first_mapping(pointer), to = first_mapping(pointer + nbytes);
  int error = from == to ? INVALID_VALUE : fake_back((void *)(uintptr_t)pointer, nbytes, 0);
  for (size_t i = from; i < to; i++) let_go(mappings[i].handle);
  memmove(mappings + from, mappings + to, (mapping_count - to) * sizeof *mappings);
  mapping_count -= to - from;
  pthread_mutex_unlock(&mapping_lock);
  return error;
}

/* What is asked of a driver by name */

/* The tables that NVIDIA's own libraries look for are not documented; they do without. */
FAKE_API int cuGetExportTable(const void **table, const void *uuid) { return *table = NULL, INVALID_VALUE; }

FAKE_API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  enum { FOUND, SYMBOL_NOT_FOUND };
  char later[128];
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  snprintf(later, sizeof later, "%s_v2", symbol);
  *function = driver ? dlsym(driver, later) : NULL;
  if (driver && !*function) *function = dlsym(driver, symbol);
  if (status) *status = *function ? FOUND : SYMBOL_NOT_FOUND;
  return *function ? OK : NOT_FOUND;
}
FAKE_API int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

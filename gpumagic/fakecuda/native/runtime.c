/* libcudart: devices, memory, streams, events and launches. Capture and graphs are in graphs.c.
 *
 * Work is done when the call returns, so streams order nothing and events are clocks.
 */
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static _Thread_local int last_error;

int runtime_result(int error) {
  if (error && error != NOT_READY) last_error = error;
  return error;
}

#define RESULT(error) return runtime_result(error)
#define ENTER() \
  if (!fake_enter()) return runtime_result(NO_DEVICE)

/* Versions and devices */

FAKE_API int cudaRuntimeGetVersion(int *version) { return *version = FAKE_CUDA_VERSION, OK; }
FAKE_API int cudaDriverGetVersion(int *version) { return *version = FAKE_CUDA_VERSION, OK; }

FAKE_API int cudaGetDeviceCount(int *count) {
  *count = fake_device_count();
  RESULT(*count ? OK : NO_DEVICE);
}

FAKE_API int cudaGetDevice(int *ordinal) {
  if (!fake_device_count()) RESULT(NO_DEVICE);
  *ordinal = fake_current;
  return OK;
}

FAKE_API int cudaSetDevice(int ordinal) {
  if (!fake_device(ordinal)) RESULT(fake_device_count() ? INVALID_DEVICE : NO_DEVICE);
  fake_current = ordinal;
  fake_enter(); /* since CUDA 12 this creates the context */
  return OK;
}

FAKE_API int cudaInitDevice(int ordinal, unsigned flags, unsigned more) {
  if (!fake_device(ordinal)) RESULT(INVALID_DEVICE);
  fake_device(ordinal)->context = 1;
  return OK;
}

FAKE_API int cudaSetValidDevices(int *ordinals, int count) { return OK; }
FAKE_API int cudaSetDeviceFlags(unsigned flags) { return OK; }
FAKE_API int cudaGetDeviceFlags(unsigned *flags) { return *flags = 0, OK; }
FAKE_API int cudaDeviceReset(void) { return OK; }
FAKE_API int cudaDeviceSetLimit(int limit, size_t value) { return OK; }
FAKE_API int cudaDeviceGetLimit(size_t *value, int limit) { return *value = 0, OK; }
FAKE_API int cudaDeviceSetCacheConfig(int config) { return OK; }

FAKE_API int cudaDeviceGetAttribute(int *value, int attribute, int ordinal) {
  if (!fake_device(ordinal)) RESULT(INVALID_DEVICE);
  *value = fake_attribute(ordinal, attribute);
  return OK;
}

FAKE_API int cudaDeviceGetPCIBusId(char *id, int length, int ordinal) {
  if (!fake_device(ordinal)) RESULT(INVALID_DEVICE);
  snprintf(id, length, "0000:%02X:00.0", fake_attribute(ordinal, 33));
  return OK;
}

FAKE_API int cudaDeviceGetByPCIBusId(int *ordinal, const char *id) {
  unsigned bus;
  if (sscanf(id, "%*x:%x", &bus) == 1)
    for (*ordinal = 0; *ordinal < fake_device_count(); ++*ordinal)
      if (fake_attribute(*ordinal, 33) == (int)bus) return OK;
  RESULT(INVALID_DEVICE);
}

FAKE_API int cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  if (!fake_device(ordinal) || !fake_device(peer)) RESULT(INVALID_DEVICE);
  *can = ordinal != peer && fake_peer_access();
  return OK;
}

FAKE_API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  if (!fake_device(peer)) RESULT(INVALID_DEVICE);
  return fake_peer_access() ? OK : 217; /* cudaErrorPeerAccessUnsupported */
}

FAKE_API int cudaDeviceDisablePeerAccess(int peer) { return OK; }

FAKE_API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  ENTER();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}

static void fill(struct cudaDeviceProp *prop, int ordinal) {
  const struct fake_device *device = fake_device(ordinal);
  memset(prop, 0, sizeof *prop);
  snprintf(prop->name, sizeof prop->name, "%s", device->name);
  memcpy(prop->uuid, device->uuid, sizeof prop->uuid);
  prop->totalGlobalMem = device->capacity;
  prop->sharedMemPerBlock = fake_attribute(ordinal, 8);
  prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
  prop->warpSize = 32;
  prop->memPitch = 2147483647;
  prop->maxThreadsPerBlock = 1024;
  for (int axis = 0; axis < 3; axis++) {
    prop->maxThreadsDim[axis] = fake_attribute(ordinal, 2 + axis);
    prop->maxGridSize[axis] = fake_attribute(ordinal, 5 + axis);
  }
  prop->totalConstMem = 65536;
  prop->major = device->major;
  prop->minor = device->minor;
  prop->textureAlignment = 512;
  prop->texturePitchAlignment = 32;
  prop->multiProcessorCount = device->multiprocessors;
  prop->canMapHostMemory = prop->concurrentKernels = prop->unifiedAddressing = prop->managedMemory = 1;
  prop->pciBusID = fake_attribute(ordinal, 33);
  prop->asyncEngineCount = 3;
  prop->memoryBusWidth = device->memory_bus_width;
  prop->l2CacheSize = (int)device->l2_cache;
  prop->maxThreadsPerMultiProcessor = device->threads_per_multiprocessor;
  prop->streamPrioritiesSupported = prop->globalL1CacheSupported = prop->localL1CacheSupported = 1;
  prop->sharedMemPerMultiprocessor = device->shared_per_multiprocessor;
  prop->concurrentManagedAccess = prop->computePreemptionSupported = prop->cooperativeLaunch = 1;
  prop->sharedMemPerBlockOptin = device->shared_per_block_optin;
  prop->maxBlocksPerMultiProcessor = device->blocks_per_multiprocessor;
  prop->reservedSharedMemPerBlock = fake_attribute(ordinal, 111);
  prop->hostRegisterSupported = prop->memoryPoolsSupported = 1;
#if FAKE_CUDA_VERSION < 13000
  prop->clockRate = device->clock_rate;
  prop->memoryClockRate = device->memory_clock_rate;
  prop->deviceOverlap = 1;
#endif
}

FAKE_API int cudaGetDeviceProperties(struct cudaDeviceProp *prop, int ordinal) {
  if (!fake_device(ordinal)) RESULT(INVALID_DEVICE);
  fill(prop, ordinal);
  return OK;
}

#if FAKE_CUDA_VERSION < 13000
FAKE_API int cudaGetDeviceProperties_v2(struct cudaDeviceProp *prop, int ordinal) {
  return cudaGetDeviceProperties(prop, ordinal);
}
#endif

FAKE_API int cudaDeviceSynchronize(void) {
  ENTER();
  if (capture_forbids(NULL)) RESULT(CAPTURE_UNSUPPORTED);
  fake_count_sync(0);
  return OK;
}

/* Errors */

static const struct {
  int error;
  const char *name, *text;
} ERRORS[] = {
    {OK, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {217, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {PEER_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
};

static int row(int error) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].error == error) return (int)i;
  return -1;
}

FAKE_API const char *cudaGetErrorName(int error) { return row(error) < 0 ? "cudaErrorUnknown" : ERRORS[row(error)].name; }
FAKE_API const char *cudaGetErrorString(int error) { return row(error) < 0 ? "unknown error" : ERRORS[row(error)].text; }
FAKE_API int cudaPeekAtLastError(void) { return last_error; }

FAKE_API int cudaGetLastError(void) {
  int error = last_error;
  last_error = OK;
  return error;
}

/* Memory */

FAKE_API int cudaMalloc(void **pointer, size_t nbytes) {
  ENTER();
  if (capture_forbids(NULL)) RESULT(CAPTURE_UNSUPPORTED);
  RESULT(fake_allocate(fake_current, nbytes, pointer));
}

FAKE_API int cudaMallocManaged(void **pointer, size_t nbytes, unsigned flags) { return cudaMalloc(pointer, nbytes); }

FAKE_API int cudaFree(void *pointer) {
  ENTER();
  if (pointer && capture_forbids(NULL)) RESULT(CAPTURE_UNSUPPORTED);
  RESULT(fake_release(pointer));
}

FAKE_API int cudaMemGetInfo(size_t *available, size_t *total) {
  ENTER();
  *available = fake_free_bytes(fake_device(fake_current));
  *total = fake_device(fake_current)->capacity;
  return OK;
}

FAKE_API int cudaHostAlloc(void **pointer, size_t nbytes, unsigned flags) {
  ENTER();
  void *at = mmap(NULL, nbytes ? nbytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) RESULT(OUT_OF_MEMORY);
  *pointer = at;
  RESULT(fake_pin(at, nbytes, 1));
}

FAKE_API int cudaMallocHost(void **pointer, size_t nbytes) { return cudaHostAlloc(pointer, nbytes, 0); }

FAKE_API int cudaFreeHost(void *pointer) {
  size_t nbytes = 0;
  if (!pointer) return OK;
  if (fake_unpin(pointer, &nbytes)) RESULT(INVALID_VALUE);
  if (nbytes) munmap(pointer, nbytes);
  return OK;
}

FAKE_API int cudaHostRegister(void *pointer, size_t nbytes, unsigned flags) {
  ENTER();
  if (fake_is_pinned(pointer)) RESULT(712);
  RESULT(fake_pin(pointer, nbytes, 0));
}

FAKE_API int cudaHostUnregister(void *pointer) {
  size_t nbytes;
  RESULT(fake_unpin(pointer, &nbytes) ? 713 : OK);
}

FAKE_API int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { return *device = host, OK; }
FAKE_API int cudaHostGetFlags(unsigned *flags, void *host) { return *flags = 0, OK; }

FAKE_API int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  if (!fake_device_count()) RESULT(NO_DEVICE);
  int ordinal = fake_find(pointer, NULL, NULL);
  if (ordinal != FAKE_HOST) {
    attributes->type = 2; /* cudaMemoryTypeDevice */
    attributes->device = ordinal;
    attributes->devicePointer = (void *)pointer;
  } else {
    attributes->type = fake_is_pinned(pointer); /* cudaMemoryTypeHost, or cudaMemoryTypeUnregistered */
    attributes->device = attributes->type ? fake_current : -2;
    attributes->hostPointer = (void *)pointer;
    attributes->devicePointer = attributes->type ? (void *)pointer : NULL;
  }
  return OK;
}

FAKE_API int cudaMemcpyAsync(void *target, const void *source, size_t nbytes, int kind, void *stream) {
  ENTER();
  if (capture_take_copy(stream, target, source, nbytes)) return OK;
  RESULT(fake_copy_bytes(target, source, nbytes, (uintptr_t)stream));
}

FAKE_API int cudaMemcpy(void *target, const void *source, size_t nbytes, int kind) {
  ENTER();
  if (capture_forbids(NULL)) RESULT(CAPTURE_UNSUPPORTED);
  fake_count_sync(0);
  RESULT(fake_copy_bytes(target, source, nbytes, 0));
}

FAKE_API int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t nbytes, void *stream) {
  return cudaMemcpyAsync(target, source, nbytes, 4, stream);
}

FAKE_API int cudaMemcpyPeer(void *target, int to, const void *source, int from, size_t nbytes) {
  return cudaMemcpy(target, source, nbytes, 4);
}

FAKE_API int cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                               size_t height, int kind, void *stream) {
  ENTER();
  RESULT(fake_copy_rows(target, target_pitch, source, source_pitch, width, height, (uintptr_t)stream));
}

FAKE_API int cudaMemcpy2D(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                          size_t height, int kind) {
  fake_count_sync(0);
  return cudaMemcpy2DAsync(target, target_pitch, source, source_pitch, width, height, kind, NULL);
}

FAKE_API int cudaMemsetAsync(void *target, int value, size_t nbytes, void *stream) {
  ENTER();
  RESULT(fake_set_bytes(target, value, nbytes));
}

FAKE_API int cudaMemset(void *target, int value, size_t nbytes) { return cudaMemsetAsync(target, value, nbytes, NULL); }

/* Variables of the device: each is a piece of the host that stands for it. */

FAKE_API int cudaMemcpyToSymbol(const void *symbol, const void *source, size_t nbytes, size_t offset, int kind) {
  ENTER();
  return OK;
}

FAKE_API int cudaMemcpyToSymbolAsync(const void *symbol, const void *source, size_t nbytes, size_t offset, int kind,
                                     void *stream) {
  ENTER();
  return OK;
}

FAKE_API int cudaGetSymbolAddress(void **pointer, const void *symbol) { return *pointer = (void *)symbol, OK; }

/* Pools: the allocator that torch calls backend:cudaMallocAsync */

struct pool {
  int64_t used, used_peak;
};
static struct pool pools[FAKE_MOST_DEVICES];

FAKE_API int cudaDeviceGetDefaultMemPool(void **pool, int ordinal) {
  if (!fake_device(ordinal)) RESULT(INVALID_DEVICE);
  *pool = &pools[ordinal];
  return OK;
}

FAKE_API int cudaDeviceGetMemPool(void **pool, int ordinal) { return cudaDeviceGetDefaultMemPool(pool, ordinal); }
FAKE_API int cudaDeviceSetMemPool(int ordinal, void *pool) { return OK; }
FAKE_API int cudaMemPoolSetAccess(void *pool, const void *accesses, size_t count) { return OK; }
FAKE_API int cudaMemPoolTrimTo(void *pool, size_t kept) { return OK; }

FAKE_API int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  struct pool *found = pool;
  if (attribute < 4) *(int *)value = 1;
  else *(uint64_t *)value = attribute == 4 ? 0 : attribute % 2 ? found->used : found->used_peak;
  return OK;
}

FAKE_API int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
  struct pool *found = pool;
  if (attribute == 6 || attribute == 8) found->used_peak = found->used;
  return OK;
}

FAKE_API int cudaMallocAsync(void **pointer, size_t nbytes, void *stream) {
  ENTER();
  int error = fake_allocate(fake_current, nbytes, pointer);
  if (!error && *pointer) {
    size_t taken;
    fake_find(*pointer, NULL, &taken);
    struct pool *pool = &pools[fake_current];
    pool->used += (int64_t)taken;
    if (pool->used > pool->used_peak) pool->used_peak = pool->used;
  }
  RESULT(error);
}

FAKE_API int cudaFreeAsync(void *pointer, void *stream) {
  ENTER();
  size_t taken = 0;
  int ordinal = fake_find(pointer, NULL, &taken);
  if (pointer && ordinal != FAKE_HOST) pools[ordinal].used -= (int64_t)taken;
  RESULT(fake_release(pointer));
}

/* Streams and events */

FAKE_API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  ENTER();
  struct stream *made = calloc(1, sizeof *made);
  made->flags = flags;
  made->priority = priority;
  made->device = fake_current;
  *stream = made;
  return OK;
}

FAKE_API int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
FAKE_API int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

FAKE_API int cudaStreamDestroy(void *stream) {
  if (stream_of(stream)) free(stream);
  return OK;
}

FAKE_API int cudaStreamGetPriority(void *stream, int *priority) {
  *priority = stream_of(stream) ? stream_of(stream)->priority : 0;
  return OK;
}

FAKE_API int cudaStreamGetFlags(void *stream, unsigned *flags) {
  *flags = stream_of(stream) ? stream_of(stream)->flags : 0;
  return OK;
}

FAKE_API int cudaStreamGetDevice(void *stream, int *ordinal) {
  *ordinal = stream_of(stream) ? stream_of(stream)->device : fake_current;
  return OK;
}

FAKE_API int cudaStreamGetId(void *stream, unsigned long long *id) { return *id = (uintptr_t)stream, OK; }

FAKE_API int cudaStreamQuery(void *stream) {
  ENTER();
  RESULT(capture_forbids(stream) ? CAPTURE_UNSUPPORTED : OK);
}

FAKE_API int cudaStreamSynchronize(void *stream) {
  ENTER();
  if (capture_forbids(stream)) RESULT(CAPTURE_UNSUPPORTED);
  fake_count_sync((uintptr_t)stream);
  return OK;
}

FAKE_API int cudaStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *data, unsigned flags) {
  call(stream, OK, data);
  return OK;
}

FAKE_API int cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) {
  call(data);
  return OK;
}

struct event {
  struct timespec at;
  unsigned flags;
  int recorded;
  struct stream *capturing;
};

FAKE_API int cudaEventCreateWithFlags(void **event, unsigned flags) {
  ENTER();
  struct event *made = calloc(1, sizeof *made);
  made->flags = flags;
  *event = made;
  return OK;
}

FAKE_API int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
FAKE_API int cudaEventDestroy(void *event) { return free(event), OK; }

FAKE_API int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
  ENTER();
  struct event *recorded = event;
  clock_gettime(CLOCK_MONOTONIC, &recorded->at);
  recorded->recorded = 1;
  recorded->capturing = capture_origin(stream);
  return OK;
}

FAKE_API int cudaEventRecord(void *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }

FAKE_API int cudaEventQuery(void *event) {
  RESULT(((struct event *)event)->capturing && capture_forbids(NULL) ? CAPTURE_UNSUPPORTED : OK);
}

FAKE_API int cudaEventSynchronize(void *event) {
  fake_count_sync(0);
  return OK;
}

FAKE_API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  capture_join(stream, ((struct event *)event)->capturing);
  return OK;
}

FAKE_API int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
  const struct event *from = start, *to = end;
  if (!from->recorded || !to->recorded || (from->flags | to->flags) & 2) RESULT(INVALID_HANDLE);
  *milliseconds = (float)((to->at.tv_sec - from->at.tv_sec) * 1e3 + (to->at.tv_nsec - from->at.tv_nsec) / 1e6);
  return OK;
}

#if FAKE_CUDA_VERSION < 13000
FAKE_API int cudaEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
  return cudaEventElapsedTime(milliseconds, start, end);
}
#endif

/* Kernels: registered by the constructors of the libraries that hold them, launched to be counted */

struct kernel {
  const void *function;
  const char *name;
};
static struct kernel *kernels;
static size_t kernel_count, kernel_room;
static int sorted;

FAKE_API void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
FAKE_API void __cudaRegisterFatBinaryEnd(void **handle) {}
FAKE_API void __cudaUnregisterFatBinary(void **handle) { free(handle); }
FAKE_API char __cudaInitModule(void **handle) { return 1; }
FAKE_API void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t size,
                                int constant, int global) {}

FAKE_API void __cudaRegisterFunction(void **handle, const char *function, char *stub, const char *name, int threads,
                                     void *tid, void *bid, void *block, void *grid, int *size) {
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 4096;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
  }
  kernels[kernel_count++] = (struct kernel){function, name};
  sorted = 0;
}

static int by_address(const void *a, const void *b) {
  const struct kernel *left = a, *right = b;
  return left->function < right->function ? -1 : left->function > right->function;
}

static const char *name_of(const void *function) {
  if (!sorted) {
    qsort(kernels, kernel_count, sizeof *kernels, by_address);
    sorted = 1;
  }
  struct kernel wanted = {function, NULL}, *found;
  found = kernel_count ? bsearch(&wanted, kernels, kernel_count, sizeof wanted, by_address) : NULL;
  return found ? found->name : NULL;
}

struct dim3 {
  unsigned x, y, z;
};

static _Thread_local struct {
  struct dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

FAKE_API unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

FAKE_API int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void **stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return OK;
}

FAKE_API int cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                              size_t shared, void *stream) {
  struct fake_device *device = fake_enter();
  if (!device) RESULT(NO_DEVICE);
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || block.z > 64 || grid.x > 2147483647u ||
      grid.y > 65535 || grid.z > 65535)
    RESULT(INVALID_CONFIGURATION);
  if ((int64_t)shared > device->shared_per_block_optin) RESULT(INVALID_VALUE);
  fake_count_launch(function, name_of(function));
  capture_take_launch(stream);
  return OK;
}

FAKE_API int cudaLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                                         size_t shared, void *stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

struct launch_config {
  struct dim3 grid, block;
  size_t shared;
  void *stream;
};

FAKE_API int cudaLaunchKernelExC(const struct launch_config *config, const void *function, void **arguments) {
  return cudaLaunchKernel(function, config->grid, config->block, arguments, config->shared, config->stream);
}

FAKE_API int __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }

FAKE_API int __cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
                                size_t shared, void *stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

FAKE_API int cudaGetFuncBySymbol(const void **found, const void *symbol) { return *found = symbol, OK; }

FAKE_API int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  struct fake_device *device = fake_enter();
  if (!device) RESULT(NO_DEVICE);
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 10 * device->major + device->minor;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return OK;
}

FAKE_API int cudaFuncSetAttribute(const void *function, int attribute, int value) { return OK; }
FAKE_API int cudaFuncSetCacheConfig(const void *function, int config) { return OK; }
FAKE_API int cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int ordinal) { return OK; }

FAKE_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                    size_t shared, unsigned flags) {
  struct fake_device *device = fake_enter();
  if (!device) RESULT(NO_DEVICE);
  int64_t fitting = threads ? device->threads_per_multiprocessor / threads : 0;
  if (shared && device->shared_per_multiprocessor / (int64_t)shared < fitting)
    fitting = device->shared_per_multiprocessor / (int64_t)shared;
  *blocks = (int)(fitting < device->blocks_per_multiprocessor ? fitting : device->blocks_per_multiprocessor);
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

static int not_supported(void) { return NOT_SUPPORTED; }

static int entry_point(const char *symbol, void **function, int *status) {
  char later[128];
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY);
  snprintf(later, sizeof later, "%s_v2", symbol);
  *function = driver ? dlsym(driver, later) : NULL;
  if (driver && !*function) *function = dlsym(driver, symbol);
  if (!*function) {
    fake_missing("libcuda", symbol);
    *function = (void *)not_supported;
  }
  if (status) *status = 0;
  return OK;
}

FAKE_API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                              unsigned long long flags, int *status) {
  return entry_point(symbol, function, status);
}

FAKE_API int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
  return entry_point(symbol, function, status);
}

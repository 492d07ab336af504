/* libcudart: devices, memory and copies. What is asked for is done when the call returns. */
#define _GNU_SOURCE
#include "capture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Versions and devices */

FAKE_API int cudaRuntimeGetVersion(int *version) { return *version = FAKE_CUDA_VERSION, OK; }
FAKE_API int cudaDriverGetVersion(int *version) { return *version = FAKE_CUDA_VERSION, OK; }

FAKE_API int cudaGetDeviceCount(int *count) {
  *count = fake_device_count();
  RESULT(*count && !fake_forked() ? OK : fake_why_not());
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

static char peers[FAKE_MOST_DEVICES][FAKE_MOST_DEVICES]; /* whether the first reads the memory of the second */

FAKE_API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  ENTER();
  if (!fake_device(peer) || peer == fake_current) RESULT(INVALID_DEVICE);
  if (!fake_peer_access()) RESULT(PEER_UNSUPPORTED);
  if (peers[fake_current][peer]) RESULT(PEER_ALREADY_ENABLED);
  peers[fake_current][peer] = 1;
  return OK;
}

FAKE_API int cudaDeviceDisablePeerAccess(int peer) {
  ENTER();
  if (!fake_device(peer) || !peers[fake_current][peer]) RESULT(PEER_NOT_ENABLED);
  peers[fake_current][peer] = 0;
  return OK;
}

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
  prop->memoryBusWidth = fake_attribute(ordinal, 37);
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
  prop->clockRate = fake_attribute(ordinal, 13);
  prop->memoryClockRate = fake_attribute(ordinal, 36);
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
  if (capture_forbids_unsafe()) RESULT(CAPTURE_UNSUPPORTED);
  fake_count_sync(0);
  return OK;
}

/* Errors */

FAKE_API const char *cudaGetErrorName(int error) {
  return fake_error_name(error) ? fake_error_name(error) : "cudaErrorUnknown";
}
FAKE_API const char *cudaGetErrorString(int error) {
  return fake_error_text(error) ? fake_error_text(error) : "unknown error";
}
FAKE_API int cudaPeekAtLastError(void) { return fake_last_error; }

FAKE_API int cudaGetLastError(void) {
  int error = fake_last_error;
  fake_last_error = OK;
  return error;
}

/* Memory */

FAKE_API int cudaMalloc(void **pointer, size_t nbytes) {
  ENTER();
  if (capture_forbids_unsafe()) RESULT(CAPTURE_UNSUPPORTED);
  RESULT(fake_allocate(fake_current, nbytes, pointer));
}

FAKE_API int cudaMallocManaged(void **pointer, size_t nbytes, unsigned flags) { return cudaMalloc(pointer, nbytes); }

FAKE_API int cudaFree(void *pointer) {
  ENTER();
  if (pointer && capture_forbids_unsafe()) RESULT(CAPTURE_UNSUPPORTED);
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
  if (capture_forbids_unsafe()) RESULT(CAPTURE_UNSUPPORTED);
  *pointer = NULL;
  if (!nbytes) return OK;
  void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED || fake_pin(at, nbytes, 1)) RESULT(OUT_OF_MEMORY);
  *pointer = at;
  return OK;
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
  RESULT(pointer && nbytes ? fake_pin(pointer, nbytes, 0) : INVALID_VALUE);
}

FAKE_API int cudaHostUnregister(void *pointer) {
  size_t nbytes;
  RESULT(fake_unpin(pointer, &nbytes) ? HOST_NOT_REGISTERED : OK);
}

FAKE_API int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = fake_is_pinned(host) ? host : NULL;
  RESULT(*device ? OK : INVALID_VALUE);
}
FAKE_API int cudaHostGetFlags(unsigned *flags, void *host) { return *flags = 0, OK; }

FAKE_API int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  if (!fake_device_count()) RESULT(NO_DEVICE);
  void *start = NULL;
  int ordinal = fake_find(pointer, &start, NULL);
  attributes->type = start ? 2 : fake_is_pinned(pointer); /* of a device, of the host and pinned, or unknown to CUDA */
  attributes->device = start ? ordinal : attributes->type ? fake_current : -2;
  attributes->hostPointer = start ? NULL : (void *)pointer;
  attributes->devicePointer = attributes->type ? (void *)pointer : NULL;
  return OK;
}

FAKE_API int cudaMemcpyAsync(void *target, const void *source, size_t nbytes, int kind, void *stream) {
  ENTER();
  if (capture_take(stream, (struct node){COPY, target, source, nbytes})) return OK;
  RESULT(fake_copy_bytes(target, source, nbytes, (uintptr_t)stream));
}

FAKE_API int cudaMemcpy(void *target, const void *source, size_t nbytes, int kind) {
  ENTER();
  int error = capture_forbids_wait(NULL);
  if (error) RESULT(error);
  fake_count_sync(0);
  RESULT(fake_copy_bytes(target, source, nbytes, 0));
}

FAKE_API int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t nbytes, void *stream) {
  if (!fake_device(to) || !fake_device(from)) RESULT(INVALID_DEVICE);
  return cudaMemcpyAsync(target, source, nbytes, 4, stream);
}

FAKE_API int cudaMemcpyPeer(void *target, int to, const void *source, int from, size_t nbytes) {
  if (!fake_device(to) || !fake_device(from)) RESULT(INVALID_DEVICE);
  return cudaMemcpy(target, source, nbytes, 4);
}

FAKE_API int cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                               size_t height, int kind, void *stream) {
  ENTER();
  if (capture_take(stream, (struct node){ROWS, target, source, width, target_pitch, source_pitch, height})) return OK;
  RESULT(fake_copy_rows(target, target_pitch, source, source_pitch, width, height, (uintptr_t)stream));
}

FAKE_API int cudaMemcpy2D(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                          size_t height, int kind) {
  ENTER();
  int error = capture_forbids_wait(NULL);
  if (error) RESULT(error);
  fake_count_sync(0);
  RESULT(fake_copy_rows(target, target_pitch, source, source_pitch, width, height, 0));
}

FAKE_API int cudaMemsetAsync(void *target, int value, size_t nbytes, void *stream) {
  ENTER();
  if (capture_take(stream, (struct node){SET, target, NULL, nbytes, .value = value})) return OK;
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

/* The structures of the runtime's interface, as CUDA 12 and 13 lay them out, and what the files of libcudart share. */
#ifndef GPUMAGIC_RUNTIME_H
#define GPUMAGIC_RUNTIME_H

#include "fake.h"

#if FAKE_CUDA_VERSION < 13000
#define BEFORE_13(field) field
#else
#define BEFORE_13(field)
#endif

struct cudaDeviceProp {
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
  BEFORE_13(int clockRate;)
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
  BEFORE_13(int deviceOverlap;)
  int multiProcessorCount;
  BEFORE_13(int kernelExecTimeoutEnabled;)
  int integrated, canMapHostMemory;
  BEFORE_13(int computeMode;)
  int maxTexture1D, maxTexture1DMipmap;
  BEFORE_13(int maxTexture1DLinear;)
  int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3];
  int maxTexture3DAlt[3], maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3];
  int maxTextureCubemapLayered[2], maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2];
  int maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing;
  BEFORE_13(int memoryClockRate;)
  int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported;
  int globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
  BEFORE_13(int singleToDoublePrecisionPerfRatio;)
  int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem;
  int cooperativeLaunch;
  BEFORE_13(int cooperativeMultiDeviceLaunch;)
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
  int accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported;
  int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
  unsigned gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering;
  unsigned memoryPoolSupportedHandleTypes;
  int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
#if FAKE_CUDA_VERSION >= 13000
  int deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId;
  unsigned gpuPciDeviceID, gpuPciSubsystemID;
  int hostNumaMultinodeIpcSupported, reserved[56];
#else
  int reserved[63];
#endif
};

struct cudaPointerAttributes {
  int type, device;
  void *devicePointer, *hostPointer;
#if FAKE_CUDA_VERSION >= 13000
  long reserved[8];
#endif
};

struct cudaFuncAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
  int preferredShmemCarveout, clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
  int clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed, reserved[16];
};

/* NULL, 1 and 2 are the default streams: they have no state of their own and cannot be captured. */
struct stream {
  unsigned flags;
  int priority, device;
  uint64_t capture; /* the capture that it takes part in, or took part in */
};

static inline struct stream *stream_of(void *stream) { return (uintptr_t)stream > 2 ? stream : NULL; }

int runtime_result(int error); /* remember an error as the thread's last one, and return it */
#define RESULT(error) return runtime_result(error)
#define ENTER() \
  if (!fake_enter()) return runtime_result(fake_why_not())

/* What a graph does when it is launched. */
enum { LAUNCH, COPY, ROWS, SET, CALL, RECORD };

struct node {
  int kind;
  void *target;       /* of a call its argument, of a record the event */
  const void *source; /* of a launch the kernel, of a call the function */
  size_t nbytes;      /* of rows, of each */
  size_t target_pitch, source_pitch, height;
  int value;
};

/* graphs.c */
uint64_t capture_of(void *stream); /* the capture that a stream takes part in now, 0 if none */
int capture_is_active(uint64_t capture);
int capture_take(void *stream, struct node node); /* 1: it is in the graph now, and is not to be done */
int capture_join(void *stream, uint64_t capture);
int capture_break(void *stream, int error); /* the capture of a stream fails, with this error */
int capture_forbids_wait(void *stream);     /* the error of waiting for a stream now, or OK */
int capture_forbids_unsafe(void);           /* whether a call that may wait for every stream may not be made now */

/* streams.c */
void event_happens(void *event);

#endif

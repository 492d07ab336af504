/* The structures of the runtime's interface, as CUDA 12 and 13 lay them out, and what runtime.c and graphs.c share. */
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
  int reserved[63];
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

struct graph;

struct stream {
  unsigned flags;
  int priority, device;
  struct stream *origin; /* the stream whose capture this one takes part in; itself where it began there */
  struct graph *graph;   /* what the capture that began here has recorded */
  uint64_t capture_id;
  int capture_mode;
};

/* NULL, 1 and 2 are the default streams: they have no state of their own and cannot be captured. */
static inline struct stream *stream_of(void *stream) { return (uintptr_t)stream > 2 ? stream : NULL; }

int runtime_result(int error); /* remember an error as the thread's last one, and return it */

/* graphs.c */
int capture_forbids(void *stream); /* whether a call that waits or allocates may not be made now */
int capture_take_copy(void *stream, void *target, const void *source, size_t nbytes); /* 1: it is in the graph now */
void capture_take_launch(void *stream);
struct stream *capture_origin(void *stream);
void capture_join(void *stream, struct stream *origin);

#endif

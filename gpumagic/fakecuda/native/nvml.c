/* libnvidia-ml: what torch asks and what a monitor shows first; everything else is "not supported". */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_SHORT = 7 };

FAKE_API int nvmlInit_v2(void) { return OK; }
FAKE_API int nvmlInitWithFlags(unsigned flags) { return OK; }
FAKE_API int nvmlInit(void) { return OK; }
FAKE_API int nvmlShutdown(void) { return OK; }
FAKE_API const char *nvmlErrorString(int error) { return error == OK ? "Success" : "Not Supported"; }

static int put(char *into, unsigned length, const char *text) {
  return snprintf(into, length, "%s", text) < (int)length ? OK : NVML_SHORT;
}

FAKE_API int nvmlSystemGetDriverVersion(char *version, unsigned length) { return put(version, length, "fakecuda"); }
FAKE_API int nvmlSystemGetNVMLVersion(char *version, unsigned length) { return put(version, length, "fakecuda"); }
FAKE_API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = FAKE_CUDA_VERSION, OK; }
FAKE_API int nvmlSystemGetCudaDriverVersion(int *version) { return *version = FAKE_CUDA_VERSION, OK; }

FAKE_API int nvmlDeviceGetCount_v2(unsigned *count) { return *count = fake_physical_count(), OK; }
FAKE_API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

FAKE_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct fake_device **handle) {
  *handle = fake_physical((int)index);
  return *handle ? OK : NVML_INVALID;
}
FAKE_API int nvmlDeviceGetHandleByIndex(unsigned index, struct fake_device **handle) {
  return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

static int index_of(const struct fake_device *device) { return (int)(device - fake_physical(0)); }

static void write_uuid(char *into, const struct fake_device *device) {
  const unsigned char *u = device->uuid;
  sprintf(into, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
          u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

FAKE_API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct fake_device **handle) {
  unsigned bus;
  if (sscanf(id, "%*x:%x", &bus) != 1) return NVML_INVALID;
  *handle = fake_physical((int)bus - 16);
  return *handle ? OK : NVML_NOT_FOUND;
}

FAKE_API int nvmlDeviceGetHandleByUUID(const char *uuid, struct fake_device **handle) {
  char own[64];
  for (int index = 0; (*handle = fake_physical(index)); index++) {
    write_uuid(own, *handle);
    if (!strcmp(own, uuid)) return OK;
  }
  return NVML_NOT_FOUND;
}

FAKE_API int nvmlDeviceGetIndex(struct fake_device *device, unsigned *index) { return *index = index_of(device), OK; }
FAKE_API int nvmlDeviceGetMinorNumber(struct fake_device *device, unsigned *minor) {
  return *minor = index_of(device), OK;
}
FAKE_API int nvmlDeviceGetName(struct fake_device *device, char *name, unsigned length) {
  return put(name, length, device->name);
}
FAKE_API int nvmlDeviceGetUUID(struct fake_device *device, char *uuid, unsigned length) {
  char own[64];
  write_uuid(own, device);
  return put(uuid, length, own);
}
FAKE_API int nvmlDeviceGetCudaComputeCapability(struct fake_device *device, int *major, int *minor) {
  *major = device->major;
  *minor = device->minor;
  return OK;
}

struct pci {
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};

FAKE_API int nvmlDeviceGetPciInfo_v3(struct fake_device *device, struct pci *pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = 16 + index_of(device);
  sprintf(pci->legacy, "0000:%02X:00.0", pci->bus);
  sprintf(pci->id, "00000000:%02X:00.0", pci->bus);
  return OK;
}

struct memory {
  unsigned long long total, available, used;
};

FAKE_API int nvmlDeviceGetMemoryInfo(struct fake_device *device, struct memory *memory) {
  memory->total = device->capacity;
  memory->available = fake_free_bytes(device);
  memory->used = memory->total - memory->available;
  return OK;
}

struct memory_v2 {
  unsigned version;
  unsigned long long total, reserved, available, used;
};

FAKE_API int nvmlDeviceGetMemoryInfo_v2(struct fake_device *device, struct memory_v2 *memory) {
  memory->total = device->capacity;
  memory->reserved = 0;
  memory->available = fake_free_bytes(device);
  memory->used = memory->total - memory->available;
  return OK;
}

struct process {
  unsigned pid;
  unsigned long long used;
  unsigned instance, compute_instance;
};

FAKE_API int nvmlDeviceGetComputeRunningProcesses_v3(struct fake_device *device, unsigned *count,
                                                     struct process *processes) {
  unsigned room = *count;
  *count = device->context != 0;
  if (*count > room) return NVML_SHORT;
  if (*count) processes[0] = (struct process){(unsigned)getpid(), (unsigned long long)device->used, ~0u, ~0u};
  return OK;
}
FAKE_API int nvmlDeviceGetComputeRunningProcesses_v2(struct fake_device *device, unsigned *count,
                                                     struct process *processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}

struct process_v1 {
  unsigned pid;
  unsigned long long used;
};

FAKE_API int nvmlDeviceGetComputeRunningProcesses(struct fake_device *device, unsigned *count,
                                                  struct process_v1 *processes) {
  unsigned room = *count;
  *count = device->context != 0;
  if (*count > room) return NVML_SHORT;
  if (*count) processes[0] = (struct process_v1){(unsigned)getpid(), (unsigned long long)device->used};
  return OK;
}

static int none(unsigned *count) { return *count = 0, OK; }
FAKE_API int nvmlDeviceGetGraphicsRunningProcesses_v3(struct fake_device *device, unsigned *count, void *processes) {
  return none(count);
}
FAKE_API int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct fake_device *device, unsigned *count, void *processes) {
  return none(count);
}

/* The first field is the version; zeros are a GPU in no NVLink fabric. c10 insists on an answer before it maps memory
 * into a segment that grows. */
struct fabric {
  unsigned version, rest[8];
};

FAKE_API int nvmlDeviceGetGpuFabricInfoV(struct fake_device *device, struct fabric *fabric) {
  memset(fabric->rest, 0, sizeof fabric->rest);
  return OK;
}

/* The kernels: what they are called, and how often each was launched. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>

/* The binary that nvcc wraps a kernel in, as far as it is read here: for each architecture, a header and the code. */
struct wrapper {
  uint32_t magic, version;
  const struct binary *binary;
};
struct binary {
  uint32_t magic;
  uint16_t version, header_size;
  uint64_t size;
};
struct image {
  uint16_t kind, version;
  uint32_t header_size;
  uint64_t size;
  uint32_t unused[3], architecture;
};

struct kernel {
  const void *function;
  const char *name;
  int64_t count;
  const struct wrapper *binary;
};

static struct kernel *kernels; /* open addressing by the function's address; torch registers some 20,000 */
static size_t room, kinds;

static struct kernel *slot(struct kernel *table, size_t size, const void *function) {
  size_t at = ((uintptr_t)function >> 4) * 11400714819323198485ull & (size - 1);
  while (table[at].function && table[at].function != function) at = (at + 1) & (size - 1);
  return &table[at];
}

static int widen(void) {
  size_t wider = room ? 2 * room : 32768;
  struct kernel *table = calloc(wider, sizeof *table);
  if (!table) return OUT_OF_MEMORY;
  for (size_t i = 0; i < room; i++)
    if (kernels[i].function) *slot(table, wider, kernels[i].function) = kernels[i];
  free(kernels);
  kernels = table;
  room = wider;
  return OK;
}

/* The entry of a function, made if need be; NULL without memory for it. Call it with the lock held. */
static struct kernel *entry(const void *function) {
  if (2 * kinds >= room && widen()) return NULL;
  struct kernel *found = slot(kernels, room, function);
  if (!found->function) {
    kinds++;
    found->function = function;
  }
  return found;
}

void fake_name_kernel(const void *function, const char *name, const void *binary) {
  fake_lock();
  struct kernel *found = entry(function);
  if (found) {
    found->name = name;
    found->binary = binary;
  }
  fake_unlock();
}

int fake_kernel_architecture(const void *function, const struct fake_device *device) {
  enum { WRAPPER = 0x466243b1, BINARY = 0xba55ed50 };
  fake_lock();
  struct kernel *kernel = entry(function);
  const struct wrapper *wrapper = kernel ? kernel->binary : NULL;
  fake_unlock();
  int wanted = 10 * device->major + device->minor, found = 0, least = 0;
  if (!wrapper || wrapper->magic != WRAPPER || !wrapper->binary || wrapper->binary->magic != BINARY) return wanted;
  const char *at = (const char *)wrapper->binary + wrapper->binary->header_size, *end = at + wrapper->binary->size;
  while (at + sizeof(struct image) <= end) {
    const struct image *image = (const struct image *)at;
    int architecture = (int)image->architecture;
    if (architecture / 10 == device->major && architecture <= wanted && architecture > found) found = architecture;
    if (!least || architecture < least) least = architecture;
    if (!image->header_size) break;
    at += image->header_size + image->size;
  }
  return found ? found : least ? least : wanted; /* a GPU that this torch was not built for, such as V100, is let work */
}

void fake_count_launch(const void *function) {
  fake_lock();
  struct kernel *found = entry(function);
  if (found) found->count++;
  fake_unlock();
}

int (*fake_capture_launch)(void *stream, const void *function);

static _Thread_local const void *last_launched;

/* Names of kernels that count what they find: of CUB for nonzero, masks and unique, of torch for any(), with which
 * linalg looks whether something went wrong. The host reads the count next. */
static int counts(const char *name) {
  if (!name) return 0;
  if (strstr(name, "14or_kernel_cuda") || strstr(name, "DeviceReduce")) return 1;
  int is_unique = strstr(name, "UniqueByKey") || strstr(name, "UniqueAgent") ||
                  (strstr(name, "DeviceSelect") && strstr(name, "equal_to")); /* nonzero selects by flags */
  if (is_unique) fake_unknown_size("count");
  return is_unique;
}

int fake_reads_count(void) {
  if (!last_launched) return 0;
  fake_lock();
  struct kernel *found = entry(last_launched);
  const char *name = found ? found->name : NULL;
  fake_unlock();
  last_launched = NULL;
  return counts(name);
}

void fake_launch(const void *function, void *stream) {
  last_launched = function;
  if (!fake_capture_launch || !fake_capture_launch(stream, function)) fake_count_launch(function);
}

int fake_is_launchable(struct fake_dims grid, struct fake_dims block) {
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  return grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535 && threads &&
         threads <= 1024 && block.z <= 64;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int fake_resident_blocks(int threads, int64_t shared) {
  const struct fake_device *device = fake_device(fake_current);
  int64_t warps = (threads + 31) / 32;
  if (!warps) return 0;
  int64_t fitting = least(device->blocks_per_multiprocessor, device->threads_per_multiprocessor / (32 * warps));
  return (int)(shared ? least(fitting, device->shared_per_multiprocessor / shared) : fitting);
}

/* What gpumagic.fakecuda reads through ctypes. */

FAKE_API int64_t fakecuda_launches(struct kernel *into, int64_t most) {
  int64_t count = 0;
  fake_lock();
  for (size_t i = 0; i < room; i++)
    if (kernels[i].count && count++ < most) into[count - 1] = kernels[i];
  fake_unlock();
  return count;
}

FAKE_API void fakecuda_forget_launches(void) {
  fake_lock();
  for (size_t i = 0; i < room; i++) kernels[i].count = 0;
  fake_unlock();
}

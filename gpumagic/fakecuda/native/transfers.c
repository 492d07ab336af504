/* Copies with their contents, and the log of copies and synchronisations. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define MOST_OF_COUNTS 64 /* bytes; nonzero has a count for each 2^31 elements */

static struct fake_copy *copies;
static size_t copy_count, copy_room;
static int64_t syncs;
static size_t least_left_out = SIZE_MAX;

/* Where one side of a copy lies. */
struct side {
  int ordinal;
  int holds; /* whether all its bytes are of one allocation; of the host's memory nothing is known */
};

static struct side side_of(const void *pointer, size_t nbytes) {
  void *start;
  size_t size;
  int ordinal = fake_find(pointer, &start, &size);
  if (ordinal == FAKE_HOST) return (struct side){ordinal, 1};
  return (struct side){ordinal, start && (const char *)pointer + nbytes <= (char *)start + size};
}

static void log_copy(struct fake_copy copy) {
  fake_lock();
  if (copy_count == copy_room) {
    size_t room = copy_room ? 2 * copy_room : 256;
    struct fake_copy *wider = realloc(copies, room * sizeof copy);
    if (!wider) abort(); /* a log with holes is worse than none */
    copies = wider;
    copy_room = room;
  }
  copies[copy_count++] = copy;
  fake_unlock();
}

/* Whether memory of a device has pages: what nothing wrote has none and is zero. */
static int has_pages(const char *start, size_t nbytes) {
  uint64_t entries[1024]; /* of /proc/self/pagemap: bit 63 is "present", bit 62 "swapped" */
  uint64_t first = (uintptr_t)start / PAGE, last = ((uintptr_t)start + nbytes - 1) / PAGE;
  int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), found = pagemap < 0;
  while (!found && first <= last) {
    size_t some = last - first + 1 < 1024 ? last - first + 1 : 1024;
    if (pread(pagemap, entries, some * sizeof *entries, (off_t)(first * sizeof *entries)) !=
        (ssize_t)(some * sizeof *entries))
      found = 1;
    for (size_t i = 0; i < some && !found; i++) found = entries[i] >> 62 != 0;
    first += some;
  }
  if (pagemap >= 0) close(pagemap);
  return found;
}

/* Zeros, given by dropping whole pages, so that large zeros cost no memory. */
static void clear(char *target, size_t nbytes) {
  char *from = (char *)(((uintptr_t)target + PAGE - 1) & ~(PAGE - 1));
  char *end = (char *)((uintptr_t)(target + nbytes) & ~(PAGE - 1));
  if (from >= end || madvise(from, end - from, MADV_DONTNEED)) {
    memset(target, 0, nbytes);
    return;
  }
  memset(target, 0, from - target);
  memset(end, 0, target + nbytes - end);
}

/* Log a copy that can be made; nothing is logged of one that cannot. */
static int begin_copy(const void *target, size_t target_span, const void *source, size_t source_span, size_t nbytes,
                      uint64_t stream, int *within_devices) {
  struct side from = side_of(source, source_span), to = side_of(target, target_span);
  if (!from.holds || !to.holds) return INVALID_VALUE;
  struct fake_copy copy = {from.ordinal, to.ordinal, .nbytes = (int64_t)nbytes, .stream = stream};
  if (from.ordinal == FAKE_HOST) copy.pinned = fake_is_pinned(source);
  if (to.ordinal == FAKE_HOST) copy.pinned |= fake_is_pinned(target);
  log_copy(copy);
  *within_devices = from.ordinal != FAKE_HOST && to.ordinal != FAKE_HOST;
  return OK;
}

static void move(void *target, const void *source, size_t nbytes, int within_devices) {
  if (nbytes >= least_left_out) clear(target, nbytes);
  else if (within_devices && nbytes >= 64 * PAGE && !has_pages(source, nbytes)) clear(target, nbytes);
  else memmove(target, source, nbytes);
}

int fake_copy_bytes(void *target, const void *source, size_t nbytes, uint64_t stream) {
  int within_devices;
  if (!nbytes) return OK;
  if (begin_copy(target, nbytes, source, nbytes, nbytes, stream, &within_devices)) return INVALID_VALUE;
  if (nbytes <= MOST_OF_COUNTS && fake_find(target, NULL, NULL) == FAKE_HOST && fake_reads_count())
    memset(target, 0, nbytes); /* nothing was found: what the memory held before could be billions */
  else move(target, source, nbytes, within_devices);
  return OK;
}

int fake_move_bytes(void *target, const void *source, size_t nbytes) {
  if (!nbytes || target == source) return OK;
  struct side from = side_of(source, nbytes), to = side_of(target, nbytes);
  if (!from.holds || !to.holds) return INVALID_VALUE;
  move(target, source, nbytes, from.ordinal != FAKE_HOST && to.ordinal != FAKE_HOST);
  return OK;
}

int fake_copy_rows(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                   size_t height, uint64_t stream) {
  int within_devices;
  if (!width || !height) return OK;
  size_t target_span = (height - 1) * target_pitch + width, source_span = (height - 1) * source_pitch + width;
  if (target_pitch < width || source_pitch < width ||
      begin_copy(target, target_span, source, source_span, width * height, stream, &within_devices))
    return INVALID_VALUE;
  for (size_t row = 0; row < height && width * height < least_left_out; row++)
    memmove((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width);
  return OK;
}

int fake_set_bytes(void *target, int value, size_t nbytes) {
  if (!nbytes) return OK;
  if (!side_of(target, nbytes).holds) return INVALID_VALUE;
  if (value & 0xff) memset(target, value, nbytes);
  else clear(target, nbytes);
  return OK;
}

/* Leave out what is in large copies: their targets are zero, and cost no memory where nothing was written before. */
FAKE_API void fakecuda_leave_out(int64_t least) { least_left_out = (size_t)least; }

void fake_count_sync(uint64_t stream) { __atomic_add_fetch(&syncs, 1, __ATOMIC_RELAXED); }

/* What gpumagic.fakecuda reads through ctypes. */

FAKE_API int64_t fakecuda_copies(struct fake_copy *into, int64_t most) {
  fake_lock();
  int64_t count = (int64_t)copy_count;
  if (into && copies) memcpy(into, copies, (size_t)(count < most ? count : most) * sizeof *copies);
  fake_unlock();
  return count;
}

FAKE_API void fakecuda_forget_copies(void) {
  fake_lock();
  copy_count = 0;
  fake_unlock();
  __atomic_store_n(&syncs, 0, __ATOMIC_RELAXED);
}

FAKE_API int64_t fakecuda_syncs(void) { return __atomic_load_n(&syncs, __ATOMIC_RELAXED); }

FAKE_API int64_t fakecuda_memory(int ordinal, int what) {
  struct fake_device *device = fake_glance(ordinal);
  if (!device) return -1;
  switch (what) {
  case 0: return device->capacity;
  case 1: return device->others;
  case 2: return device->used;
  case 3: return device->peak;
  default: return device->context;
  }
}

FAKE_API int fakecuda_set_memory(int ordinal, int64_t capacity, int64_t others, int64_t limit) {
  struct fake_device *device = fake_glance(ordinal);
  if (!device) return INVALID_DEVICE;
  fake_lock();
  if (capacity >= 0) device->capacity = capacity;
  if (others >= 0) device->others = others;
  if (limit >= 0) device->limit = limit;
  device->peak = device->used;
  fake_unlock();
  return OK;
}

/* Copies with their contents, and the log of copies, launches and synchronisations. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)

struct launch {
  const void *function;
  const char *name;
  int64_t count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_copy *copies;
static size_t copy_count, copy_room;
static struct launch *launches; /* open addressing by the function's address */
static size_t launch_room, launch_kinds;
static int64_t syncs;

static void log_copy(const void *target, const void *source, size_t nbytes, uint64_t stream) {
  struct fake_copy copy = {.nbytes = (int64_t)nbytes, .stream = stream};
  copy.source = fake_find(source, NULL, NULL);
  copy.target = fake_find(target, NULL, NULL);
  if (copy.source == FAKE_HOST) copy.pinned = fake_is_pinned(source);
  if (copy.target == FAKE_HOST) copy.pinned |= fake_is_pinned(target);
  pthread_mutex_lock(&lock);
  if (copy_count == copy_room) {
    copy_room = copy_room ? 2 * copy_room : 256;
    copies = realloc(copies, copy_room * sizeof copy);
  }
  copies[copy_count++] = copy;
  pthread_mutex_unlock(&lock);
}

/* Whether memory of a device has pages: what nothing wrote has none and is zero. */
static int has_pages(const char *start, size_t nbytes) {
  unsigned char present[256];
  char *from = (char *)((uintptr_t)start & ~(PAGE - 1));
  size_t pages = (start + nbytes - from + PAGE - 1) / PAGE;
  for (size_t done = 0; done < pages; done += sizeof present) {
    size_t some = pages - done < sizeof present ? pages - done : sizeof present;
    if (mincore(from + done * PAGE, some * PAGE, present)) return 1;
    for (size_t i = 0; i < some; i++)
      if (present[i] & 1) return 1;
  }
  return 0;
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

static int inside(const void *pointer, size_t nbytes) {
  void *start;
  size_t size;
  if (fake_find(pointer, &start, &size) == FAKE_HOST) return 1;
  return start && (const char *)pointer + nbytes <= (char *)start + size;
}

int fake_copy_bytes(void *target, const void *source, size_t nbytes, uint64_t stream) {
  if (!nbytes) return OK;
  if (!inside(target, nbytes) || !inside(source, nbytes)) return INVALID_VALUE;
  log_copy(target, source, nbytes, stream);
  int on_device = fake_find(source, NULL, NULL) != FAKE_HOST && fake_find(target, NULL, NULL) != FAKE_HOST;
  if (on_device && nbytes >= 64 * PAGE && !has_pages(source, nbytes)) clear(target, nbytes);
  else memmove(target, source, nbytes);
  return OK;
}

int fake_copy_rows(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                   size_t height, uint64_t stream) {
  if (!width || !height) return OK;
  if (!inside(target, (height - 1) * target_pitch + width) || !inside(source, (height - 1) * source_pitch + width))
    return INVALID_VALUE;
  log_copy(target, source, width * height, stream);
  for (size_t row = 0; row < height; row++)
    memmove((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width);
  return OK;
}

int fake_set_bytes(void *target, int value, size_t nbytes) {
  if (!inside(target, nbytes)) return INVALID_VALUE;
  if (value & 0xff) memset(target, value, nbytes);
  else clear(target, nbytes);
  return OK;
}

static struct launch *slot(struct launch *table, size_t room, const void *function) {
  size_t at = ((uintptr_t)function >> 4) * 11400714819323198485ull % room;
  while (table[at].function && table[at].function != function) at = (at + 1) % room;
  return &table[at];
}

void fake_count_launch(const void *function, const char *name) {
  pthread_mutex_lock(&lock);
  if (2 * launch_kinds >= launch_room) {
    size_t room = launch_room ? 2 * launch_room : 512;
    struct launch *wider = calloc(room, sizeof *wider);
    for (size_t i = 0; i < launch_room; i++)
      if (launches[i].function) *slot(wider, room, launches[i].function) = launches[i];
    free(launches);
    launches = wider;
    launch_room = room;
  }
  struct launch *found = slot(launches, launch_room, function);
  if (!found->function) {
    launch_kinds++;
    found->function = function;
    found->name = name;
  }
  found->count++;
  pthread_mutex_unlock(&lock);
}

void fake_count_sync(uint64_t stream) { __atomic_add_fetch(&syncs, 1, __ATOMIC_RELAXED); }

/* What gpumagic.fakecuda reads through ctypes. */

FAKE_API int64_t fakecuda_copies(struct fake_copy *into, int64_t most) {
  pthread_mutex_lock(&lock);
  int64_t count = (int64_t)copy_count;
  if (into) memcpy(into, copies, (size_t)(count < most ? count : most) * sizeof *copies);
  pthread_mutex_unlock(&lock);
  return count;
}

FAKE_API void fakecuda_reset_log(void) {
  pthread_mutex_lock(&lock);
  copy_count = 0;
  syncs = 0;
  for (size_t i = 0; i < launch_room; i++) launches[i].count = 0;
  pthread_mutex_unlock(&lock);
}

FAKE_API int64_t fakecuda_syncs(void) { return syncs; }

FAKE_API void fakecuda_each_launch(void (*call)(const void *function, const char *name, int64_t count)) {
  for (size_t i = 0; i < launch_room; i++)
    if (launches[i].count) call(launches[i].function, launches[i].name, launches[i].count);
}

FAKE_API int64_t fakecuda_memory(int ordinal, int what) {
  struct fake_device *device = fake_device(ordinal);
  if (!device) return -1;
  switch (what) {
  case 0: return device->capacity;
  case 1: return device->others;
  case 2: return device->used;
  case 3: return device->peak;
  default: return device->context;
  }
}

FAKE_API int fakecuda_set_memory(int ordinal, int64_t capacity, int64_t others) {
  struct fake_device *device = fake_device(ordinal);
  if (!device) return INVALID_DEVICE;
  if (capacity >= 0) device->capacity = capacity;
  if (others >= 0) device->others = others;
  device->peak = device->used;
  return OK;
}

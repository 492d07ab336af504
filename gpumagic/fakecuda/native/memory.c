/* Device memory: addresses of this process without pages behind them until something is written.
 *
 * Each device has a range of addresses of its own, so the device of a pointer is found by division. A card is as full
 * as its allocations say, in steps of 2 MiB as cudaMalloc takes them. No kernel writes, so 80 GiB cost nothing.
 * Addresses are used again, the lowest first, as CUDA does.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SPAN ((size_t)1 << 41) /* addresses of a device: 2 TiB */

enum { RESERVED, HELD };        /* of device memory: addresses alone, or bytes of the card too */
enum { REGISTERED, ALLOCATED }; /* of the host's */

struct range {
  char *start;
  size_t nbytes;
  int kind;
};

struct ranges {
  struct range *all; /* by address */
  size_t count, room;
  size_t packed; /* so many of the first have no gap between them: the search for one begins there */
};

static char *base;
static struct ranges on_device[FAKE_MOST_DEVICES], pinned;

/* The index of the last range that starts at or before an address, or -1. */
static long find(const struct ranges *ranges, const void *pointer) {
  long low = 0, high = (long)ranges->count - 1;
  while (low <= high) {
    long middle = (low + high) / 2;
    if (ranges->all[middle].start <= (const char *)pointer) low = middle + 1;
    else high = middle - 1;
  }
  return high;
}

static struct range *range_of(const struct ranges *ranges, const void *pointer) {
  long at = find(ranges, pointer);
  if (at < 0 || (const char *)pointer >= ranges->all[at].start + ranges->all[at].nbytes) return NULL;
  return &ranges->all[at];
}

static int insert(struct ranges *ranges, struct range range) {
  if (ranges->count == ranges->room) {
    size_t room = ranges->room ? 2 * ranges->room : 64;
    struct range *wider = realloc(ranges->all, room * sizeof *wider);
    if (!wider) return OUT_OF_MEMORY;
    ranges->all = wider;
    ranges->room = room;
  }
  long at = find(ranges, range.start) + 1;
  memmove(ranges->all + at + 1, ranges->all + at, (ranges->count - at) * sizeof range);
  ranges->all[at] = range;
  ranges->count++;
  return OK;
}

static void drop(struct ranges *ranges, const struct range *range) {
  size_t at = range - ranges->all;
  ranges->count--;
  if (ranges->packed > at) ranges->packed = at;
  memmove(ranges->all + at, ranges->all + at + 1, (ranges->count - at) * sizeof *range);
}

static char *find_base(void) {
  if (base) return base;
  char *made = mmap(NULL, FAKE_MOST_DEVICES * SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) {
    perror("fakecuda: this process may not have the addresses of the devices (ulimit -v)");
    return NULL;
  }
  return base = made;
}

static char *first_gap(int ordinal, size_t nbytes) {
  struct ranges *ranges = &on_device[ordinal];
  if (!find_base()) return NULL;
  char *first = base + ordinal * SPAN, *end = first + SPAN, *from = first;
  if (ranges->packed) from = ranges->all[ranges->packed - 1].start + ranges->all[ranges->packed - 1].nbytes;
  for (size_t i = ranges->packed; i < ranges->count; i++) {
    const struct range *range = &ranges->all[i];
    if (range->start == from && i == ranges->packed) ranges->packed++;
    else if ((size_t)(range->start - from) >= nbytes) return from;
    from = range->start + range->nbytes;
  }
  return (size_t)(end - from) >= nbytes ? from : NULL;
}

int fake_back(void *pointer, size_t nbytes, int backed) {
  /* Its pages are given back and it is zero when it is read again; that it can still be read harms nobody here. */
  int failed = backed ? mprotect(pointer, nbytes, PROT_READ | PROT_WRITE) : madvise(pointer, nbytes, MADV_DONTNEED);
  return failed ? OUT_OF_MEMORY : OK;
}

static int take(struct fake_device *device, int64_t nbytes) {
  int64_t left = device->limit ? device->limit - device->used : fake_free_bytes(device);
  if (nbytes > left) return OUT_OF_MEMORY;
  device->used += nbytes;
  if (device->used > device->peak) device->peak = device->used;
  return OK;
}

int fake_take(int ordinal, int64_t nbytes) {
  struct fake_device *device = fake_device(ordinal);
  if (!device) return INVALID_DEVICE;
  fake_lock();
  int error = take(device, nbytes);
  fake_unlock();
  return error;
}

void fake_give(int ordinal, int64_t nbytes) {
  fake_lock();
  fake_device(ordinal)->used -= nbytes;
  fake_unlock();
}

static int place_locked(int ordinal, size_t nbytes, void **pointer, int kind) {
  char *start = first_gap(ordinal, nbytes);
  if (!start || (kind == HELD && fake_back(start, nbytes, 1))) return OUT_OF_MEMORY;
  if (insert(&on_device[ordinal], (struct range){start, nbytes, kind})) return OUT_OF_MEMORY;
  *pointer = start;
  return OK;
}

static int place(int ordinal, size_t nbytes, void **pointer, int kind) {
  struct fake_device *device = fake_device(ordinal);
  *pointer = NULL;
  if (!device) return INVALID_DEVICE;
  if (!nbytes) return OK; /* as cudaMalloc: success, and no address */
  if (nbytes > SPAN) return OUT_OF_MEMORY;
  nbytes = (nbytes + FAKE_STEP - 1) / FAKE_STEP * FAKE_STEP;
  fake_lock();
  int error = kind == HELD ? take(device, (int64_t)nbytes) : OK;
  if (!error) {
    error = place_locked(ordinal, nbytes, pointer, kind);
    if (error && kind == HELD) device->used -= (int64_t)nbytes;
  }
  fake_unlock();
  return error;
}

static int ordinal_of(const void *pointer) {
  if (!base || (const char *)pointer < base || (const char *)pointer >= base + FAKE_MOST_DEVICES * SPAN)
    return FAKE_HOST;
  return (int)(((const char *)pointer - base) / SPAN);
}

static int displace(void *pointer, int kind) {
  int ordinal = ordinal_of(pointer), error = INVALID_VALUE;
  fake_lock();
  struct range *range = ordinal == FAKE_HOST ? NULL : range_of(&on_device[ordinal], pointer);
  if (range && range->start == pointer && range->kind == kind) {
    if (kind == HELD) fake_device(ordinal)->used -= (int64_t)range->nbytes;
    error = fake_back(range->start, range->nbytes, 0);
    drop(&on_device[ordinal], range);
  }
  fake_unlock();
  return error;
}

int fake_allocate(int ordinal, size_t nbytes, void **pointer) { return place(ordinal, nbytes, pointer, HELD); }
int fake_release(void *pointer) { return pointer ? displace(pointer, HELD) : OK; }
int fake_reserve(int ordinal, size_t nbytes, void **pointer) { return place(ordinal, nbytes, pointer, RESERVED); }
int fake_unreserve(void *pointer) { return displace(pointer, RESERVED); }

int fake_find(const void *pointer, void **start, size_t *nbytes) {
  int ordinal = ordinal_of(pointer);
  if (ordinal == FAKE_HOST) return FAKE_HOST;
  fake_lock();
  struct range *range = range_of(&on_device[ordinal], pointer);
  if (start) *start = range ? range->start : NULL;
  if (nbytes) *nbytes = range ? range->nbytes : 0;
  fake_unlock();
  return ordinal;
}

/* Pages of the host that the devices can reach */

int fake_pin(void *pointer, size_t nbytes, int allocated) {
  fake_lock();
  long before = find(&pinned, (char *)pointer + (nbytes ? nbytes - 1 : 0));
  int overlaps = before >= 0 && pinned.all[before].start + pinned.all[before].nbytes > (char *)pointer;
  int error = overlaps ? HOST_ALREADY_REGISTERED
                       : insert(&pinned, (struct range){pointer, nbytes, allocated ? ALLOCATED : REGISTERED});
  fake_unlock();
  return error;
}

int fake_unpin(void *pointer, size_t *allocated) {
  fake_lock();
  struct range *range = range_of(&pinned, pointer);
  int error = range && range->start == pointer ? OK : INVALID_VALUE;
  if (!error) {
    *allocated = range->kind == ALLOCATED ? range->nbytes : 0;
    drop(&pinned, range);
  }
  fake_unlock();
  return error;
}

int fake_is_pinned(const void *pointer) {
  fake_lock();
  int found = range_of(&pinned, pointer) != NULL;
  fake_unlock();
  return found;
}

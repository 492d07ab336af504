/* Device memory: addresses of this process without pages behind them until something is written.
 *
 * Each device has a range of addresses of its own, so the device of a pointer is found by division. A card is as full
 * as its allocations say, in steps of 2 MiB as cudaMalloc takes them. No kernel writes, so 80 GiB cost nothing.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SPAN ((size_t)1 << 41) /* addresses of a device: 2 TiB */
#define STEP ((size_t)2 << 20)

struct range {
  char *start;
  size_t nbytes;
  int flag; /* of device memory: whether it holds bytes of the card; of the host's: whether it was allocated here */
};

struct ranges {
  struct range *all;
  size_t count, room;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
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

static void insert(struct ranges *ranges, struct range range) {
  if (ranges->count == ranges->room) {
    ranges->room = ranges->room ? 2 * ranges->room : 64;
    ranges->all = realloc(ranges->all, ranges->room * sizeof(struct range));
  }
  long at = find(ranges, range.start) + 1;
  memmove(ranges->all + at + 1, ranges->all + at, (ranges->count - at) * sizeof(struct range));
  ranges->all[at] = range;
  ranges->count++;
}

static void drop(struct ranges *ranges, const struct range *range) {
  size_t at = range - ranges->all;
  ranges->count--;
  memmove(ranges->all + at, ranges->all + at + 1, (ranges->count - at) * sizeof(struct range));
}

static char *first_gap(int ordinal, size_t nbytes) {
  if (!base) {
    base = mmap(NULL, FAKE_MOST_DEVICES * SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return base = NULL;
  }
  char *from = base + ordinal * SPAN, *end = from + SPAN;
  for (size_t i = 0; i < on_device[ordinal].count; i++) {
    const struct range *range = &on_device[ordinal].all[i];
    if ((size_t)(range->start - from) >= nbytes) return from;
    from = range->start + range->nbytes;
  }
  return (size_t)(end - from) >= nbytes ? from : NULL;
}

static int map(void *start, size_t nbytes, int protection) {
  void *at = mmap(start, nbytes, protection, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

static size_t rounded(size_t nbytes) { return (nbytes + STEP - 1) / STEP * STEP; }

static int take(struct fake_device *device, int64_t nbytes) {
  if (nbytes > fake_free_bytes(device)) return OUT_OF_MEMORY;
  device->used += nbytes;
  if (device->used > device->peak) device->peak = device->used;
  return OK;
}

int fake_take(int ordinal, int64_t nbytes) {
  pthread_mutex_lock(&lock);
  int error = take(fake_device(ordinal), nbytes);
  pthread_mutex_unlock(&lock);
  return error;
}

void fake_give(int ordinal, int64_t nbytes) {
  pthread_mutex_lock(&lock);
  fake_device(ordinal)->used -= nbytes;
  pthread_mutex_unlock(&lock);
}

static int place(int ordinal, size_t nbytes, void **pointer, int held) {
  struct fake_device *device = fake_device(ordinal);
  *pointer = NULL;
  if (!nbytes) return OK;
  if (!device || nbytes > SPAN) return device ? OUT_OF_MEMORY : INVALID_DEVICE;
  nbytes = rounded(nbytes);
  pthread_mutex_lock(&lock);
  int error = held ? take(device, nbytes) : OK;
  char *start = error ? NULL : first_gap(ordinal, nbytes);
  if (!error && (!start || (held && map(start, nbytes, PROT_READ | PROT_WRITE)))) {
    if (held) device->used -= nbytes;
    error = OUT_OF_MEMORY;
  }
  if (!error) {
    insert(&on_device[ordinal], (struct range){start, nbytes, held});
    *pointer = start;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

static int ordinal_of(const void *pointer) {
  if (!base || (const char *)pointer < base || (const char *)pointer >= base + FAKE_MOST_DEVICES * SPAN)
    return FAKE_HOST;
  return (int)(((const char *)pointer - base) / SPAN);
}

static int displace(void *pointer) {
  int ordinal = ordinal_of(pointer), error = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  struct range *range = ordinal == FAKE_HOST ? NULL : range_of(&on_device[ordinal], pointer);
  if (range && range->start == pointer) {
    if (range->flag) fake_device(ordinal)->used -= range->nbytes;
    error = map(range->start, range->nbytes, PROT_NONE);
    drop(&on_device[ordinal], range);
  }
  pthread_mutex_unlock(&lock);
  return error;
}

int fake_allocate(int ordinal, size_t nbytes, void **pointer) { return place(ordinal, nbytes, pointer, 1); }
int fake_release(void *pointer) { return pointer ? displace(pointer) : OK; }
int fake_reserve(int ordinal, size_t nbytes, void **pointer) { return place(ordinal, nbytes, pointer, 0); }
int fake_unreserve(void *pointer) { return displace(pointer); }
int fake_back(void *pointer, size_t nbytes, int backed) {
  return map(pointer, nbytes, backed ? PROT_READ | PROT_WRITE : PROT_NONE);
}

int fake_find(const void *pointer, void **start, size_t *nbytes) {
  int ordinal = ordinal_of(pointer);
  if (ordinal == FAKE_HOST) return FAKE_HOST;
  pthread_mutex_lock(&lock);
  struct range *range = range_of(&on_device[ordinal], pointer);
  if (start) *start = range ? range->start : NULL;
  if (nbytes) *nbytes = range ? range->nbytes : 0;
  pthread_mutex_unlock(&lock);
  return ordinal;
}

int fake_pin(void *pointer, size_t nbytes, int allocated) {
  pthread_mutex_lock(&lock);
  insert(&pinned, (struct range){pointer, nbytes, allocated});
  pthread_mutex_unlock(&lock);
  return OK;
}

int fake_unpin(void *pointer, size_t *allocated) {
  pthread_mutex_lock(&lock);
  struct range *range = range_of(&pinned, pointer);
  int error = range && range->start == pointer ? OK : INVALID_VALUE;
  if (!error) {
    *allocated = range->flag ? range->nbytes : 0;
    drop(&pinned, range);
  }
  pthread_mutex_unlock(&lock);
  return error;
}

int fake_is_pinned(const void *pointer) {
  pthread_mutex_lock(&lock);
  int found = range_of(&pinned, pointer) != NULL;
  pthread_mutex_unlock(&lock);
  return found;
}

/* libcudart: memory pools, the allocator that torch calls backend:cudaMallocAsync.
 *
 * A pool takes the card in chunks and gives them away in blocks; what is freed is joined with its free
 * neighbours. A chunk goes back to the card when nothing of it is used and the pool holds more
 * than it was told to keep.
 */
#define _GNU_SOURCE
#include "capture.h"

#include <pthread.h>
#include <search.h>
#include <stdlib.h>

#define CHUNK ((size_t)32 << 20) /* what a pool takes at once: its reserved bytes are a multiple of it, as with CUDA */
#define ALIGNMENT 512

struct block {
  char *start;
  size_t nbytes;
  int used, begins_chunk;
  struct block *before, *after;           /* by their place in the pool */
  struct block *free_before, *free_after; /* where it is not used */
};

struct pool {
  int64_t reserved, reserved_peak, used, used_peak;
  uint64_t kept; /* the release threshold */
  struct block *first, *first_free;
  void *by_start; /* a tree of the blocks that are used */
};
static struct pool pools[FAKE_MOST_DEVICES];

static int compare(const void *a, const void *b) {
  const struct block *left = a, *right = b;
  return left->start < right->start ? -1 : left->start > right->start;
}

static void count(struct pool *pool, int64_t reserved, int64_t used) {
  pool->reserved += reserved;
  pool->used += used;
  if (pool->reserved > pool->reserved_peak) pool->reserved_peak = pool->reserved;
  if (pool->used > pool->used_peak) pool->used_peak = pool->used;
}

static int begins_chunk(const struct block *block) { return !block || block->begins_chunk; }

static void add_free(struct pool *pool, struct block *block) {
  block->used = 0;
  block->free_before = NULL;
  block->free_after = pool->first_free;
  if (pool->first_free) pool->first_free->free_before = block;
  pool->first_free = block;
}

static void remove_free(struct pool *pool, struct block *block) {
  if (block->free_before) block->free_before->free_after = block->free_after;
  else pool->first_free = block->free_after;
  if (block->free_after) block->free_after->free_before = block->free_before;
}

/* Forget a free block. */
static void forget(struct pool *pool, struct block *block) {
  remove_free(pool, block);
  if (block->before) block->before->after = block->after;
  else pool->first = block->after;
  if (block->after) block->after->before = block->before;
  free(block);
}

/* Give chunks back of which nothing is used, until the pool holds no more than `kept`. */
static void trim(struct pool *pool, uint64_t kept) {
  for (struct block *block = pool->first_free, *after; block && (uint64_t)pool->reserved > kept; block = after) {
    after = block->free_after;
    if (!block->begins_chunk || !begins_chunk(block->after)) continue;
    count(pool, -(int64_t)block->nbytes, 0);
    fake_release(block->start);
    forget(pool, block);
  }
}

/* Take a chunk of the card for a block; NULL where it is full. */
static struct block *grow(struct pool *pool, int ordinal, size_t nbytes) {
  struct block *made = calloc(1, sizeof *made);
  void *start = NULL;
  nbytes = (nbytes + CHUNK - 1) / CHUNK * CHUNK;
  if (!made || fake_allocate(ordinal, nbytes, &start)) {
    free(made);
    return NULL;
  }
  *made = (struct block){start, nbytes, 0, 1, NULL, pool->first};
  if (pool->first) pool->first->before = made;
  pool->first = made;
  add_free(pool, made);
  count(pool, (int64_t)nbytes, 0);
  return made;
}

static struct block *wide_enough(struct pool *pool, size_t nbytes) {
  struct block *block = pool->first_free;
  while (block && block->nbytes < nbytes) block = block->free_after;
  return block;
}

/* Use the beginning of a free block; what is left of it is a block of its own. */
static int use(struct pool *pool, struct block *block, size_t nbytes) {
  if (block->nbytes > nbytes) {
    struct block *rest = calloc(1, sizeof *rest);
    if (!rest) return OUT_OF_MEMORY;
    *rest = (struct block){block->start + nbytes, block->nbytes - nbytes, 0, 0, block, block->after};
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->nbytes = nbytes;
    add_free(pool, rest);
  }
  if (!tsearch(block, &pool->by_start, compare)) return OUT_OF_MEMORY;
  remove_free(pool, block);
  block->used = 1;
  count(pool, 0, (int64_t)nbytes);
  return OK;
}

static void join_next(struct pool *pool, struct block *block) {
  if (block->used || begins_chunk(block->after) || block->after->used) return;
  block->nbytes += block->after->nbytes;
  forget(pool, block->after);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the pools; held, the lock of the memory is taken too */

FAKE_API int cudaMallocAsync(void **pointer, size_t nbytes, void *stream) {
  ENTER();
  *pointer = NULL;
  if (!nbytes) return OK;
  const struct fake_device *device = fake_device(fake_current);
  if (nbytes > (size_t)(device->limit ? device->limit : device->capacity)) RESULT(OUT_OF_MEMORY);
  if (capture_of(stream)) {
    fake_missing("libcudart", "cudaMallocAsync in a capture");
    RESULT(capture_break(stream, NOT_SUPPORTED));
  }
  struct pool *pool = &pools[fake_current];
  nbytes = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  pthread_mutex_lock(&lock);
  struct block *block = wide_enough(pool, nbytes);
  if (!block) block = grow(pool, fake_current, nbytes);
  if (!block) {
    trim(pool, 0);
    block = grow(pool, fake_current, nbytes);
  }
  int error = block ? use(pool, block, nbytes) : OUT_OF_MEMORY;
  if (!error) *pointer = block->start;
  pthread_mutex_unlock(&lock);
  RESULT(error);
}

FAKE_API int cudaFreeAsync(void *pointer, void *stream) {
  ENTER();
  int ordinal = fake_find(pointer, NULL, NULL);
  if (!pointer) return OK;
  if (ordinal == FAKE_HOST) RESULT(INVALID_VALUE);
  struct pool *pool = &pools[ordinal];
  struct block wanted = {pointer}, **found;
  pthread_mutex_lock(&lock);
  found = tfind(&wanted, &pool->by_start, compare);
  struct block *block = found ? *found : NULL;
  if (block) {
    tdelete(block, &pool->by_start, compare);
    add_free(pool, block);
    count(pool, 0, -(int64_t)block->nbytes);
    join_next(pool, block);
    if (!block->begins_chunk) join_next(pool, block->before);
    trim(pool, pool->kept);
  }
  pthread_mutex_unlock(&lock);
  RESULT(block ? OK : fake_release(pointer)); /* it may be cudaMalloc's */
}

FAKE_API int cudaDeviceGetDefaultMemPool(void **pool, int ordinal) {
  if (!fake_device(ordinal)) RESULT(INVALID_DEVICE);
  *pool = &pools[ordinal];
  return OK;
}

FAKE_API int cudaDeviceGetMemPool(void **pool, int ordinal) { return cudaDeviceGetDefaultMemPool(pool, ordinal); }
FAKE_API int cudaMemPoolSetAccess(void *pool, const void *accesses, size_t count) { return OK; }

FAKE_API int cudaMemPoolTrimTo(void *pool, size_t kept) {
  ENTER();
  pthread_mutex_lock(&lock);
  trim(pool, kept);
  pthread_mutex_unlock(&lock);
  return OK;
}

enum { RELEASE_THRESHOLD = 4, RESERVED_CURRENT, RESERVED_HIGH, USED_CURRENT, USED_HIGH };

FAKE_API int cudaMemPoolGetAttribute(struct pool *pool, int attribute, void *value) {
  const uint64_t values[] = {pool->kept, pool->reserved, pool->reserved_peak, pool->used, pool->used_peak};
  if (attribute < 1 || attribute > USED_HIGH) RESULT(INVALID_VALUE);
  if (attribute < RELEASE_THRESHOLD) *(int *)value = 1; /* how freed memory may be used again */
  else *(uint64_t *)value = values[attribute - RELEASE_THRESHOLD];
  return OK;
}

FAKE_API int cudaMemPoolSetAttribute(struct pool *pool, int attribute, void *value) {
  if (attribute == RELEASE_THRESHOLD) pool->kept = *(uint64_t *)value;
  if (attribute == RESERVED_HIGH) pool->reserved_peak = pool->reserved;
  if (attribute == USED_HIGH) pool->used_peak = pool->used;
  return OK;
}

/* libnccl: communicators within this process.
 *
 * A broadcast between devices of one process moves its contents, and so does a collective of a single rank. Sums have
 * no values here, and nothing passes between processes: of a small all-gather the other ranks are taken to have sent
 * the same, as they do where they compare what they are about to do. NCCL copies with kernels, so the log of copies has none of it.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22700
#endif

#define MOST_WAITING 4096
#define MIRRORED ((size_t)1 << 20) /* bytes of all ranks together */

struct communicator {
  int rank, ranks, device;
  uint64_t clique; /* equal for those that were made together */
  uint64_t broadcasts;
  int is_part; /* of how many ranks is not known */
};

struct broadcast {
  uint64_t clique, number; /* the ranks' broadcasts of the same number are one */
  const void *source;      /* of the root only */
  void *target;
  size_t nbytes;
};

static _Thread_local int depth, waiting;
static _Thread_local struct broadcast broadcasts[MOST_WAITING];

FAKE_API int ncclGetVersion(int *version) { return *version = FAKE_NCCL_VERSION, OK; }
FAKE_API const char *ncclGetLastError(void *communicator) { return "not supported by fakecuda"; }
FAKE_API int ncclGetUniqueId(char *id) { return memset(id, 0, 128), OK; }

static uint64_t new_clique(void) {
  static uint64_t cliques;
  return __atomic_add_fetch(&cliques, 1, __ATOMIC_RELAXED);
}

static int make(struct communicator **made, int ranks, int rank, int device, uint64_t clique) {
  *made = calloc(1, sizeof **made);
  **made = (struct communicator){rank, ranks, device, clique};
  return OK;
}

FAKE_API int ncclCommInitAll(struct communicator **made, int count, const int *devices) {
  uint64_t clique = new_clique();
  for (int rank = 0; rank < count; rank++) make(&made[rank], count, rank, devices ? devices[rank] : rank, clique);
  return OK;
}

struct unique_id {
  char bytes[128];
};

/* A rank's communicator with others has buffers that only the real library knows. */
static int join(struct communicator **made, int ranks, int rank) {
  if (ranks > 1) fake_unknown_size("NCCL communicator");
  return make(made, ranks, rank, fake_current, new_clique());
}
FAKE_API int ncclCommInitRank(struct communicator **made, int ranks, struct unique_id id, int rank) {
  return join(made, ranks, rank);
}
FAKE_API int ncclCommInitRankConfig(struct communicator **made, int ranks, struct unique_id id, int rank,
                                    void *config) {
  return join(made, ranks, rank);
}
FAKE_API int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int count,
                                      struct unique_id *ids, void *config) {
  return join(made, ranks, rank);
}

/* Which other ranks take the same part cannot be known here: as if all did. */
FAKE_API int ncclCommSplit(struct communicator *whole, int part, int key, struct communicator **made, void *config) {
  *made = NULL;
  if (part < 0) return OK;
  make(made, whole->ranks, whole->rank, whole->device, new_clique());
  (*made)->is_part = 1;
  return OK;
}

static int discard(struct communicator *communicator) { return free(communicator), OK; }

FAKE_API int ncclCommDestroy(struct communicator *communicator) { return discard(communicator); }
FAKE_API int ncclCommAbort(struct communicator *communicator) { return discard(communicator); }
FAKE_API int ncclCommCount(const struct communicator *communicator, int *count) {
  return *count = communicator->ranks, OK;
}
FAKE_API int ncclCommUserRank(const struct communicator *communicator, int *rank) {
  return *rank = communicator->rank, OK;
}
FAKE_API int ncclCommCuDevice(const struct communicator *communicator, int *device) {
  return *device = communicator->device, OK;
}
FAKE_API int ncclCommGetAsyncError(void *communicator, int *error) { return *error = OK, OK; }
FAKE_API int ncclCommRegister(void *communicator, void *buffer, size_t nbytes, void **handle) {
  return *handle = buffer, OK;
}
FAKE_API int ncclCommWindowRegister(void *communicator, void *buffer, size_t nbytes, void **window, int flags) {
  return *window = buffer, OK;
}
FAKE_API int ncclMemAlloc(void **pointer, size_t nbytes) {
  return fake_enter() ? fake_allocate(fake_current, nbytes, pointer) : 1; /* ncclUnhandledCudaError */
}
FAKE_API int ncclMemFree(void *pointer) { return fake_release(pointer); }
FAKE_API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, void *communicator) {
  return *operation = 5, OK; /* the first number after ncclAvg */
}

/* Collectives */

static size_t element_size(int type) {
  static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? SIZES[type] : 1;
}

static int alone(const struct communicator *communicator, void *target, const void *source, size_t count, int type) {
  return communicator->ranks > 1 ? OK : fake_move_bytes(target, source, count * element_size(type));
}

static void deliver(void) {
  for (int i = 0; i < waiting; i++)
    for (int root = 0; root < waiting; root++)
      if (broadcasts[root].source && broadcasts[root].clique == broadcasts[i].clique &&
          broadcasts[root].number == broadcasts[i].number)
        fake_move_bytes(broadcasts[i].target, broadcasts[root].source, broadcasts[i].nbytes);
  waiting = 0;
}

FAKE_API int ncclGroupStart(void) { return depth++, OK; }
FAKE_API int ncclGroupEnd(void) {
  if (--depth == 0) deliver();
  return OK;
}

FAKE_API int ncclBroadcast(const void *source, void *target, size_t count, int type, int root,
                           struct communicator *communicator) {
  if (waiting == MOST_WAITING) return OK;
  broadcasts[waiting++] =
      (struct broadcast){communicator->clique, communicator->broadcasts++,
                         communicator->rank == root ? source : NULL, target, count * element_size(type)};
  if (!depth) deliver();
  return OK;
}
FAKE_API int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *communicator) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator);
}
FAKE_API int ncclAllReduce(const void *source, void *target, size_t count, int type, int operation,
                           struct communicator *communicator) {
  return alone(communicator, target, source, count, type);
}
FAKE_API int ncclReduce(const void *source, void *target, size_t count, int type, int operation, int root,
                        struct communicator *communicator) {
  return alone(communicator, target, source, count, type);
}
FAKE_API int ncclReduceScatter(const void *source, void *target, size_t count, int type, int operation,
                               struct communicator *communicator) {
  return alone(communicator, target, source, count, type);
}
FAKE_API int ncclAllGather(const void *source, void *target, size_t count, int type,
                           struct communicator *communicator) {
  size_t nbytes = count * element_size(type);
  if (communicator->is_part || nbytes * communicator->ranks > MIRRORED) return alone(communicator, target, source, count, type);
  for (int rank = 0; rank < communicator->ranks; rank++) {
    int error = fake_move_bytes((char *)target + rank * nbytes, source, nbytes);
    if (error) return error;
  }
  return OK;
}
FAKE_API int ncclAlltoAll(const void *source, void *target, size_t count, int type,
                          struct communicator *communicator) {
  return alone(communicator, target, source, count, type);
}

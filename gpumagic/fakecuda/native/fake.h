/* What the fake libraries share: the devices, their memory, and the log of what was asked of them.
 *
 * It lives in libfakecuda.so; libcudart, libcuda, libcublas and the others are thin faces of it. No header of CUDA is
 * used: the layouts and numbers that matter are written down where they are needed.
 */
#ifndef GPUMAGIC_FAKE_H
#define GPUMAGIC_FAKE_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))
#define FAKE_MOST_DEVICES 16
#define FAKE_HOST (-1)
#define FAKE_STEP ((size_t)2 << 20) /* the card is given away in steps of 2 MiB, as cudaMalloc does */

/* Error codes that the runtime and the driver have in common; errors.c has their names. */
enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INITIALIZATION = 3,
  INVALID_CONFIGURATION = 9,
  INVALID_FUNCTION = 98,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  PEER_UNSUPPORTED = 217,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  NOT_FOUND = 500,
  NOT_READY = 600,
  PEER_ALREADY_ENABLED = 704,
  PEER_NOT_ENABLED = 705,
  HOST_ALREADY_REGISTERED = 712,
  HOST_NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_MERGE = 902,
  CAPTURE_ISOLATION = 905,
  CAPTURE_IMPLICIT = 906,
  CAPTURED_EVENT = 907,
};

/* A GPU. The first fields are settings, see memory/presets.py; sizes are in bytes, rates in kHz. */
struct fake_device {
  char name[256];
  unsigned char uuid[16];
  int64_t capacity;
  int64_t others; /* what other processes hold */
  int64_t limit;  /* what is given in all, whatever the two above tell of it; 0: as they do */
  int major, minor;
  int multiprocessors;
  int threads_per_multiprocessor;
  int blocks_per_multiprocessor;
  int64_t shared_per_multiprocessor;
  int64_t shared_per_block_optin;
  int64_t l2_cache;
  /* State */
  int64_t used, peak;
  _Atomic int context; /* whether anything was asked that creates a context */
};

struct fake_copy {
  int32_t source, target; /* device ordinals, FAKE_HOST for the host */
  int32_t pinned;         /* whether the host's side is page-locked */
  int32_t unused;
  int64_t nbytes;
  uint64_t stream;
};

/* devices.c */
void fake_lock(void); /* one lock for all that the libraries remember; a fork waits for it */
void fake_unlock(void);
int fake_device_count(void);
struct fake_device *fake_device(int ordinal); /* NULL where there is none of that ordinal */
struct fake_device *fake_glance(int ordinal); /* the same for who only reads the log: CUDA is not initialised by it */
extern _Thread_local int fake_current;
struct fake_device *fake_enter(void); /* the current device, whose context is then there; NULL: fake_why_not() */
int fake_forked(void);
int fake_why_not(void);               /* why there is no current device: none at all, or this is a forked process */
int fake_physical_count(void);
struct fake_device *fake_physical(int index);
int fake_peer_access(void);
int fake_attribute(int ordinal, int attribute); /* CUdevice_attribute and cudaDeviceAttr have the same numbers */
int64_t fake_free_bytes(const struct fake_device *device);

/* memory.c */
int fake_allocate(int ordinal, size_t nbytes, void **pointer);
int fake_release(void *pointer);
int fake_find(const void *pointer, void **start, size_t *nbytes); /* the device of an address, FAKE_HOST if none */
int fake_pin(void *pointer, size_t nbytes, int allocated);
int fake_unpin(void *pointer, size_t *allocated); /* the bytes to unmap, 0 where it was only registered */
int fake_is_pinned(const void *pointer);
int fake_reserve(int ordinal, size_t nbytes, void **pointer); /* addresses without memory */
int fake_unreserve(void *pointer);
int fake_take(int ordinal, int64_t nbytes); /* bytes of the card, without an address */
void fake_give(int ordinal, int64_t nbytes);
int fake_back(void *pointer, size_t nbytes, int backed); /* give addresses memory, or take it from them */

/* transfers.c */
int fake_copy_bytes(void *target, const void *source, size_t nbytes, uint64_t stream);
int fake_move_bytes(void *target, const void *source, size_t nbytes); /* what a kernel would copy: it is not logged */
int fake_copy_rows(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                   size_t height, uint64_t stream);
int fake_set_bytes(void *target, int value, size_t nbytes);
void fake_count_sync(uint64_t stream);

/* launches.c */
void fake_name_kernel(const void *function, const char *name, const void *binary);
int fake_kernel_architecture(const void *function, const struct fake_device *device); /* such as 86 */
void fake_count_launch(const void *function);
void fake_launch(const void *function, void *stream); /* count it, or leave it to the graph that is being captured */
int fake_reads_count(void); /* whether what is read now is how many elements the last kernel found */
extern int (*fake_capture_launch)(void *stream, const void *function); /* of graphs.c: 1 where it was captured */
struct fake_dims {
  unsigned x, y, z;
};
int fake_is_launchable(struct fake_dims grid, struct fake_dims block);
int fake_resident_blocks(int threads, int64_t shared); /* of a multiprocessor of the current device */

/* sizes.c */
void fake_unknown_size(const char *what); /* a literal: what was asked for memory, of which only it knows how much */

/* errors.c */
extern _Thread_local int fake_last_error; /* of the runtime */
int fake_remember_error(int error);           /* as the last one of the thread, unless it is none; returns it */
const char *fake_error_name(int error);        /* the runtime's, cudaErrorNoDevice; NULL where it is unknown */
const char *fake_driver_error_name(int error); /* the driver's, CUDA_ERROR_NO_DEVICE */
const char *fake_error_text(int error);
void fake_missing(const char *library, const char *name); /* a name that was asked for and is not there */

#endif

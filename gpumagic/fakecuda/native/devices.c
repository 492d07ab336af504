/* The devices: read from GPUMAGIC_FAKECUDA once, shown as CUDA_VISIBLE_DEVICES says when CUDA is first asked. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Thread_local int fake_current = 0;

static struct fake_device physical[FAKE_MOST_DEVICES];
static struct fake_device *shown[FAKE_MOST_DEVICES];
static int physical_count, shown_count, peer_access;
static int settings_read;
static int initialised; /* whether CUDA was asked for its devices: then CUDA_VISIBLE_DEVICES is not read again */
static int forked;      /* whether that was so in the process that this one was forked from */
static pthread_once_t settings_once = PTHREAD_ONCE_INIT, visible_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_lock(void) { pthread_mutex_lock(&lock); }
void fake_unlock(void) { pthread_mutex_unlock(&lock); }

/* The lock is taken over a fork, so that the child has it free and what it guards whole. */
static void after_fork(void) {
  forked = initialised; /* as CUDA: what was initialised before a fork cannot be used after it */
  fake_unlock();
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(fake_lock, fake_unlock, after_fork); }

static void set(struct fake_device *device, const char *key, const char *value) {
  int64_t number = strtoll(value, NULL, 10);
  if (!strcmp(key, "name")) snprintf(device->name, sizeof device->name, "%s", value);
  else if (!strcmp(key, "capacity")) device->capacity = number;
  else if (!strcmp(key, "others")) device->others = number;
  else if (!strcmp(key, "major")) device->major = number;
  else if (!strcmp(key, "minor")) device->minor = number;
  else if (!strcmp(key, "multiprocessors")) device->multiprocessors = number;
  else if (!strcmp(key, "threads_per_multiprocessor")) device->threads_per_multiprocessor = number;
  else if (!strcmp(key, "blocks_per_multiprocessor")) device->blocks_per_multiprocessor = number;
  else if (!strcmp(key, "shared_per_multiprocessor")) device->shared_per_multiprocessor = number;
  else if (!strcmp(key, "shared_per_block_optin")) device->shared_per_block_optin = number;
  else if (!strcmp(key, "l2_cache")) device->l2_cache = number;
  else if (!strcmp(key, "uuid"))
    for (int i = 0; i < 16 && sscanf(value + 2 * i, "%2hhx", &device->uuid[i]) == 1; i++) {}
  else fprintf(stderr, "fakecuda: GPUMAGIC_FAKECUDA has an unknown setting: %s\n", key);
}

/* "peer=0|name=NVIDIA A100,capacity=85899345920,...|name=..." : what holds for all, then a part for each device. */
static void read_settings(void) {
  const char *text = getenv("GPUMAGIC_FAKECUDA");
  settings_read = 1;
  char *copy = strdup(text ? text : ""), *rest = copy, *part;
  for (int index = -1; (part = strsep(&rest, "|")); index++) {
    char *pair;
    if (index >= FAKE_MOST_DEVICES) break;
    if (index >= 0) physical_count = index + 1;
    while ((pair = strsep(&part, ","))) {
      char *value = strchr(pair, '=');
      if (!value) continue;
      *value++ = 0;
      if (index >= 0) set(&physical[index], pair, value);
      else if (!strcmp(pair, "peer")) peer_access = atoi(value);
    }
  }
  free(copy);
}

static int of_uuid(const char *token) {
  char digits[40];
  int length = 0, found = -1;
  for (const char *at = token; *at && length < 39; at++)
    if (*at != '-') digits[length++] = *at;
  digits[length] = 0;
  for (int index = 0; index < physical_count; index++) {
    char uuid[40];
    for (int i = 0; i < 16; i++) sprintf(uuid + 2 * i, "%02x", physical[index].uuid[i]);
    if (length && !strncasecmp(uuid, digits, length)) {
      if (found >= 0) return -1; /* a prefix of two is of none */
      found = index;
    }
  }
  return found;
}

/* The device that an entry of the list names, or -1. All are indices, or all are UUIDs; of MIG devices there are none. */
static int of_token(const char *token, int uuids) {
  if (uuids) return strncmp(token, "GPU-", 4) ? -1 : of_uuid(token + 4);
  char *end;
  long index = strtol(token, &end, 10); /* as CUDA: "1st" is 1 */
  return end == token || index < 0 || index >= physical_count ? -1 : (int)index;
}

/* As the CUDA programming guide has it: indices or prefixes of UUIDs; the first that is wrong ends the list. */
static int visible(struct fake_device **devices) {
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  int count = 0;
  if (!text) {
    for (; count < physical_count; count++) devices[count] = &physical[count];
    return count;
  }
  char *copy = strdup(text), *rest = copy, *token;
  int uuids = !strncmp(text, "GPU-", 4);
  while (copy && (token = strsep(&rest, ","))) {
    int index = of_token(token, uuids), before = 0;
    if (index < 0) break;
    while (before < count && devices[before] != &physical[index]) before++;
    if (before < count) { /* named twice: CUDA then shows none */
      count = 0;
      break;
    }
    devices[count++] = &physical[index];
  }
  free(copy);
  return count;
}

static void initialise(void) {
  pthread_once(&settings_once, read_settings);
  shown_count = visible(shown);
  initialised = 1;
}

/* Whether anything has read the settings: they are not read again. */
FAKE_API int fakecuda_was_asked(void) { return settings_read; }

int fake_device_count(void) {
  pthread_once(&visible_once, initialise);
  return shown_count;
}

struct fake_device *fake_device(int ordinal) {
  return ordinal >= 0 && ordinal < fake_device_count() ? shown[ordinal] : NULL;
}

struct fake_device *fake_glance(int ordinal) {
  struct fake_device *devices[FAKE_MOST_DEVICES];
  if (initialised) return fake_device(ordinal);
  pthread_once(&settings_once, read_settings);
  return ordinal >= 0 && ordinal < visible(devices) ? devices[ordinal] : NULL;
}

int fake_physical_count(void) {
  pthread_once(&settings_once, read_settings);
  return physical_count;
}

struct fake_device *fake_physical(int index) {
  return index >= 0 && index < fake_physical_count() ? &physical[index] : NULL;
}

int fake_peer_access(void) {
  pthread_once(&settings_once, read_settings);
  return peer_access;
}

struct fake_device *fake_enter(void) {
  struct fake_device *device = forked ? NULL : fake_device(fake_current);
  if (device) device->context = 1;
  return device;
}

int fake_forked(void) { return forked; }
int fake_why_not(void) { return forked ? INITIALIZATION : NO_DEVICE; }

int64_t fake_free_bytes(const struct fake_device *device) {
  int64_t left = device->capacity - device->others - device->used;
  return left > 0 ? left : 0;
}

int fake_attribute(int ordinal, int attribute) {
  const struct fake_device *device = fake_device(ordinal);
  if (!device) return 0;
  switch (attribute) {
  case 1: return 1024;                          /* threads a block */
  case 2: case 3: return 1024;                  /* block x, y */
  case 4: return 64;                            /* block z */
  case 5: return 2147483647;                    /* grid x */
  case 6: case 7: return 65535;                 /* grid y, z */
  case 8: return 49152;                         /* shared memory a block */
  case 9: return 65536;                         /* constant memory */
  case 10: return 32;                           /* warp */
  case 11: return 2147483647;                   /* pitch */
  case 12: return 65536;                        /* registers a block */
  case 13: return 1500000;                      /* kHz; no allocation depends on it, nor on the memory's below */
  case 14: return 512;                          /* texture alignment */
  case 15: return 1;                            /* overlap */
  case 16: return device->multiprocessors;
  case 19: return 1;                            /* maps host memory */
  case 31: return 1;                            /* concurrent kernels */
  case 33: return 16 + (int)(device - physical); /* PCI bus */
  case 36: return 1215000;                      /* kHz */
  case 37: return 5120;                         /* bits */
  case 38: return (int)device->l2_cache;
  case 39: return device->threads_per_multiprocessor;
  case 40: return 3;                            /* copy engines */
  case 41: return 1;                            /* unified addressing */
  case 75: return device->major;
  case 76: return device->minor;
  case 78: return 1;                            /* stream priorities */
  case 79: case 80: return 1;                   /* L1 caches */
  case 81: return (int)device->shared_per_multiprocessor;
  case 82: return 65536;                        /* registers a multiprocessor */
  case 83: return 1;                            /* managed memory */
  case 89: return 1;                            /* concurrent managed access */
  case 90: return 1;                            /* preemption */
  case 95: return 1;                            /* cooperative launch */
  case 97: return (int)device->shared_per_block_optin;
  case 99: return 1;                            /* cudaHostRegister */
  case 102: return 1;                           /* virtual memory management */
  case 103: return 1;                           /* handles of it as file descriptors */
  case 106: return device->blocks_per_multiprocessor;
  case 111: return device->major >= 8 ? 1024 : 0; /* shared memory that the driver keeps */
  case 115: return 1;                           /* memory pools */
  case 120: return device->major >= 9;          /* clusters */
  default: return 0;
  }
}

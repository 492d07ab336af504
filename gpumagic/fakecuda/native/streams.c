/* libcudart: streams and events. Work is done when it is asked for, so streams order nothing and events are clocks. */
#define _GNU_SOURCE
#include "capture.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

FAKE_API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  ENTER();
  struct stream *made = calloc(1, sizeof *made);
  if (!made) RESULT(OUT_OF_MEMORY);
  made->flags = flags;
  made->priority = priority;
  made->device = fake_current;
  *stream = made;
  return OK;
}

FAKE_API int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
FAKE_API int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

FAKE_API int cudaStreamDestroy(void *stream) {
  if (stream_of(stream)) free(stream);
  return OK;
}

FAKE_API int cudaStreamGetPriority(void *stream, int *priority) {
  *priority = stream_of(stream) ? stream_of(stream)->priority : 0;
  return OK;
}

FAKE_API int cudaStreamGetFlags(void *stream, unsigned *flags) {
  *flags = stream_of(stream) ? stream_of(stream)->flags : 0;
  return OK;
}

FAKE_API int cudaStreamGetDevice(void *stream, int *ordinal) {
  *ordinal = stream_of(stream) ? stream_of(stream)->device : fake_current;
  return OK;
}

FAKE_API int cudaStreamGetId(void *stream, unsigned long long *id) { return *id = (uintptr_t)stream, OK; }

FAKE_API int cudaStreamQuery(void *stream) {
  ENTER();
  RESULT(capture_forbids_wait(stream));
}

FAKE_API int cudaStreamSynchronize(void *stream) {
  ENTER();
  int error = capture_forbids_wait(stream);
  if (error) RESULT(error);
  fake_count_sync((uintptr_t)stream);
  return OK;
}

FAKE_API int cudaStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *data, unsigned flags) {
  if (capture_of(stream)) RESULT(CAPTURE_UNSUPPORTED);
  call(stream, OK, data);
  return OK;
}

FAKE_API int cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) {
  if (capture_take(stream, (struct node){CALL, data, (void *)call})) return OK;
  call(data);
  return OK;
}

/* Events */

enum { NO_TIMING = 2, EXTERNAL = 1 };

struct event {
  struct timespec at;
  unsigned flags;
  int device, recorded;
  uint64_t capture; /* the capture in which it was last recorded, if it was in one */
};

FAKE_API int cudaEventCreateWithFlags(void **event, unsigned flags) {
  ENTER();
  struct event *made = calloc(1, sizeof *made);
  if (!made) RESULT(OUT_OF_MEMORY);
  made->flags = flags;
  made->device = fake_current;
  *event = made;
  return OK;
}

FAKE_API int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
FAKE_API int cudaEventDestroy(void *event) { return free(event), OK; }

static void event_happens(void *event) {
  struct event *recorded = event;
  clock_gettime(CLOCK_MONOTONIC, &recorded->at);
  recorded->recorded = 1;
  recorded->capture = 0;
}

FAKE_API int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
  ENTER();
  struct event *recorded = event;
  if (recorded->device != (stream_of(stream) ? stream_of(stream)->device : fake_current)) RESULT(INVALID_HANDLE);
  if (!capture_of(stream)) event_happens(event);
  else if (flags & EXTERNAL) capture_take(stream, (struct node){RECORD, event, (void *)event_happens});
  else recorded->capture = capture_of(stream);
  return OK;
}

FAKE_API int cudaEventRecord(void *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }

static int is_captured(const struct event *event) { return event->capture && capture_is_active(event->capture); }

/* torch's watchdog over NCCL asks in a thread of its own, and lets go of the tensors of what is finished. */
static int is_ahead;
FAKE_API void fakecuda_run_ahead(int ahead) { __atomic_store_n(&is_ahead, ahead, __ATOMIC_RELAXED); }

static int is_watchdog(void) {
  char name[16] = "";
  return !prctl(PR_GET_NAME, name) && !strncmp(name, "pt_nccl_watch", 13);
}

FAKE_API int cudaEventQuery(void *event) {
  if (__atomic_load_n(&is_ahead, __ATOMIC_RELAXED) && is_watchdog()) RESULT(NOT_READY);
  RESULT(is_captured(event) ? CAPTURED_EVENT : OK);
}

FAKE_API int cudaEventSynchronize(void *event) {
  if (is_captured(event)) RESULT(CAPTURED_EVENT);
  fake_count_sync(0);
  return OK;
}

FAKE_API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  struct event *awaited = event;
  if (is_captured(awaited)) RESULT(capture_join(stream, awaited->capture));
  if (capture_of(stream) && awaited->recorded && !(flags & EXTERNAL)) RESULT(capture_break(stream, CAPTURE_ISOLATION));
  return OK;
}

FAKE_API int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
  const struct event *from = start, *to = end;
  if (is_captured(from) || is_captured(to)) RESULT(CAPTURED_EVENT);
  if (!from->recorded || !to->recorded || (from->flags | to->flags) & NO_TIMING || from->device != to->device)
    RESULT(INVALID_HANDLE);
  *milliseconds = (float)((to->at.tv_sec - from->at.tv_sec) * 1e3 + (to->at.tv_nsec - from->at.tv_nsec) / 1e6);
  return OK;
}

#if FAKE_CUDA_VERSION < 13000
FAKE_API int cudaEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
  return cudaEventElapsedTime(milliseconds, start, end);
}
#endif

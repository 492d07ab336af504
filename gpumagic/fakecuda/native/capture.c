/* libcudart: capture of streams. */
#define _GNU_SOURCE
#include "capture.h"

#include <pthread.h>
#include <stdlib.h>

enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum { NONE, ACTIVE, INVALIDATED };

/* A capture that has begun and not ended. */
struct capture {
  uint64_t id;
  struct stream *origin; /* where it began and is to end */
  struct graph *graph;
  int mode, invalidated, borrowed; /* borrowed: the graph is the caller's */
  pthread_t thread;
};

static struct capture captures[64];
static _Atomic size_t active; /* so many of them */
static uint64_t last_id;
static _Thread_local int thread_mode = GLOBAL;

/* Call it with the lock held. */
static struct capture *by_id(uint64_t id) {
  for (size_t i = 0; id && i < active; i++)
    if (captures[i].id == id) return &captures[i];
  return NULL;
}

int capture_is_active(uint64_t id) {
  if (!active || !id) return 0; /* the common case, without a lock */
  fake_lock();
  int found = by_id(id) != NULL;
  fake_unlock();
  return found;
}

uint64_t capture_of(void *pointer) {
  struct stream *stream = stream_of(pointer);
  return stream && capture_is_active(stream->capture) ? stream->capture : 0;
}

int graph_add(struct graph *graph, struct node node) {
  if (graph->count == graph->room) {
    size_t room = graph->room ? 2 * graph->room : 64;
    struct node *wider = realloc(graph->nodes, room * sizeof node);
    if (!wider) return OUT_OF_MEMORY;
    graph->nodes = wider;
    graph->room = room;
  }
  graph->nodes[graph->count++] = node;
  return OK;
}

void graph_free(struct graph *graph) {
  if (graph) free(graph->nodes);
  free(graph);
}

int capture_take(void *pointer, struct node node) {
  struct stream *stream = stream_of(pointer);
  if (!active || !stream) return 0;
  fake_lock();
  struct capture *capture = by_id(stream->capture);
  if (capture && graph_add(capture->graph, node)) capture->invalidated = 1;
  fake_unlock();
  return capture != NULL;
}

int capture_join(void *pointer, uint64_t id) {
  struct stream *stream = stream_of(pointer);
  if (!stream) return CAPTURE_IMPLICIT;
  if (capture_of(stream) && stream->capture != id) return capture_break(stream, CAPTURE_MERGE);
  stream->capture = id;
  return OK;
}

int capture_break(void *pointer, int error) {
  struct stream *stream = stream_of(pointer);
  fake_lock();
  struct capture *capture = stream ? by_id(stream->capture) : NULL;
  if (capture) capture->invalidated = 1;
  fake_unlock();
  return error;
}

int capture_forbids_wait(void *stream) {
  if (!active) return OK;
  if (stream_of(stream)) return capture_of(stream) ? capture_break(stream, CAPTURE_UNSUPPORTED) : OK;
  int error = OK; /* the default stream waits for all that were not created as non-blocking */
  fake_lock();
  for (size_t i = 0; i < active; i++)
    if (!(captures[i].origin->flags & 1)) {
      captures[i].invalidated = 1;
      error = CAPTURE_IMPLICIT;
    }
  fake_unlock();
  return error;
}

int capture_forbids_unsafe(void) {
  if (!active || thread_mode == RELAXED) return 0;
  int forbidden = 0;
  fake_lock();
  for (size_t i = 0; i < active; i++) {
    struct capture *capture = &captures[i];
    int own = pthread_equal(capture->thread, pthread_self());
    if (capture->mode == RELAXED || (!own && (capture->mode == THREAD_LOCAL || thread_mode == THREAD_LOCAL))) continue;
    forbidden = capture->invalidated = 1;
  }
  fake_unlock();
  return forbidden;
}

static int begin(void *pointer, struct graph *graph, int mode) {
  struct stream *stream = stream_of(pointer);
  if (!stream) RESULT(CAPTURE_UNSUPPORTED);
  if (capture_of(stream)) RESULT(ILLEGAL_STATE);
  int borrowed = graph != NULL, error = OUT_OF_MEMORY;
  if (!graph) graph = calloc(1, sizeof *graph);
  fake_lock();
  if (graph && active < sizeof captures / sizeof *captures) {
    captures[active++] = (struct capture){++last_id, stream, graph, mode, 0, borrowed, pthread_self()};
    stream->capture = last_id;
    error = OK;
  }
  fake_unlock();
  RESULT(error);
}

FAKE_API int cudaStreamBeginCapture(void *stream, int mode) {
  ENTER();
  return begin(stream, NULL, mode);
}

FAKE_API int cudaStreamBeginCaptureToGraph(void *stream, struct graph *graph, const void *dependencies,
                                           const void *data, size_t count, int mode) {
  ENTER();
  return begin(stream, graph, mode);
}

FAKE_API int cudaStreamEndCapture(void *pointer, struct graph **graph) {
  struct stream *stream = stream_of(pointer);
  struct capture ended = {0};
  *graph = NULL;
  fake_lock();
  struct capture *capture = stream ? by_id(stream->capture) : NULL;
  if (capture && capture->origin == stream) {
    ended = *capture;
    *capture = captures[--active];
    stream->capture = 0;
  }
  fake_unlock();
  if (!ended.id) RESULT(ILLEGAL_STATE);
  if (!ended.invalidated) {
    *graph = ended.graph;
    return OK;
  }
  if (!ended.borrowed) graph_free(ended.graph);
  RESULT(CAPTURE_INVALIDATED);
}

static int capture_info(void *pointer, int *status, unsigned long long *id, struct graph **graph,
                        const void ***dependencies, size_t *count) {
  struct stream *stream = stream_of(pointer);
  fake_lock();
  struct capture *capture = stream ? by_id(stream->capture) : NULL;
  *status = !capture ? NONE : capture->invalidated ? INVALIDATED : ACTIVE;
  if (capture && id) *id = capture->id;
  if (capture && graph) *graph = capture->graph;
  fake_unlock();
  if (dependencies) *dependencies = NULL; /* of what comes first nothing is kept: it is done in the order of capture */
  if (count) *count = 0;
  return OK;
}

FAKE_API int cudaStreamIsCapturing(void *stream, int *status) {
  return active ? capture_info(stream, status, NULL, NULL, NULL, NULL) : (*status = NONE, OK);
}

#if FAKE_CUDA_VERSION >= 13000
FAKE_API int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, struct graph **graph,
                                      const void ***dependencies, const void **edges, size_t *count) {
  return capture_info(stream, status, id, graph, dependencies, count);
}
#else
FAKE_API int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  return capture_info(stream, status, id, NULL, NULL, NULL);
}
FAKE_API int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, struct graph **graph,
                                         const void ***dependencies, size_t *count) {
  return capture_info(stream, status, id, graph, dependencies, count);
}
FAKE_API int cudaStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id, struct graph **graph,
                                         const void ***dependencies, const void **edges, size_t *count) {
  return capture_info(stream, status, id, graph, dependencies, count);
}
#endif

FAKE_API int cudaStreamUpdateCaptureDependencies(void *stream) { return OK; }

FAKE_API int cudaThreadExchangeStreamCaptureMode(int *mode) {
  int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return OK;
}

/* libcudart: capture of a stream, and graphs. A graph holds its copies, which are made when it is launched. */
#define _GNU_SOURCE
#include "runtime.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum { NONE, ACTIVE, INVALIDATED };

struct node {
  void *target; /* NULL: a launch */
  const void *source;
  size_t nbytes;
};

struct graph {
  struct node *nodes;
  size_t count, room;
  int invalidated;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *capturing[64]; /* the streams where a capture began and did not end */
static size_t capturing_count;
static uint64_t last_id;
static _Thread_local int thread_mode = GLOBAL;
static _Thread_local int own_captures;

static void add(struct graph *graph, struct node node) {
  pthread_mutex_lock(&lock);
  if (graph->count == graph->room) {
    graph->room = graph->room ? 2 * graph->room : 64;
    graph->nodes = realloc(graph->nodes, graph->room * sizeof node);
  }
  graph->nodes[graph->count++] = node;
  pthread_mutex_unlock(&lock);
}

struct stream *capture_origin(void *pointer) {
  struct stream *stream = stream_of(pointer);
  if (!stream || !stream->origin || !stream->origin->graph) return NULL;
  return stream->origin->capture_id == stream->capture_id ? stream->origin : NULL;
}

void capture_join(void *pointer, struct stream *origin) {
  struct stream *stream = stream_of(pointer);
  if (!stream || !origin || !origin->graph || capture_origin(stream)) return;
  stream->origin = origin;
  stream->capture_id = origin->capture_id;
}

int capture_forbids(void *stream) {
  if (!capturing_count) return 0;
  struct stream *origin = capture_origin(stream);
  if (stream && !origin) return 0;
  if (!stream && thread_mode == RELAXED) return 0;
  int forbidden = origin != NULL;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < capturing_count; i++)
    if (capturing[i] == origin || capturing[i]->capture_mode == GLOBAL ||
        (capturing[i]->capture_mode == THREAD_LOCAL && own_captures))
      forbidden = capturing[i]->graph->invalidated = 1;
  pthread_mutex_unlock(&lock);
  return forbidden;
}

int capture_take_copy(void *stream, void *target, const void *source, size_t nbytes) {
  struct stream *origin = capture_origin(stream);
  if (origin) add(origin->graph, (struct node){target, source, nbytes});
  return origin != NULL;
}

void capture_take_launch(void *stream) {
  struct stream *origin = capture_origin(stream);
  if (origin) add(origin->graph, (struct node){NULL, NULL, 0});
}

FAKE_API int cudaStreamBeginCapture(void *pointer, int mode) {
  struct stream *stream = stream_of(pointer);
  if (!stream) return runtime_result(CAPTURE_UNSUPPORTED); /* the default stream */
  pthread_mutex_lock(&lock);
  int room = capturing_count < sizeof capturing / sizeof *capturing && !stream->graph;
  if (room) {
    stream->graph = calloc(1, sizeof *stream->graph);
    stream->origin = stream;
    stream->capture_id = ++last_id;
    stream->capture_mode = mode;
    capturing[capturing_count++] = stream;
    own_captures++;
  }
  pthread_mutex_unlock(&lock);
  return runtime_result(room ? OK : INVALID_VALUE);
}

FAKE_API int cudaStreamBeginCaptureToGraph(void *stream, void *graph, const void *dependencies, const void *data,
                                           size_t count, int mode) {
  int error = cudaStreamBeginCapture(stream, mode);
  if (!error) {
    free(stream_of(stream)->graph);
    stream_of(stream)->graph = graph;
  }
  return error;
}

FAKE_API int cudaStreamEndCapture(void *pointer, struct graph **graph) {
  struct stream *stream = stream_of(pointer);
  *graph = NULL;
  if (!stream || !stream->graph) return runtime_result(INVALID_VALUE);
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < capturing_count; i++)
    if (capturing[i] == stream) capturing[i] = capturing[--capturing_count];
  own_captures -= own_captures > 0;
  *graph = stream->graph;
  stream->graph = NULL;
  stream->origin = NULL;
  pthread_mutex_unlock(&lock);
  if (!(*graph)->invalidated) return OK;
  free((*graph)->nodes);
  free(*graph);
  *graph = NULL;
  return runtime_result(CAPTURE_INVALIDATED);
}

static int status_of(void *stream) {
  struct stream *origin = capture_origin(stream);
  return !origin ? NONE : origin->graph->invalidated ? INVALIDATED : ACTIVE;
}

FAKE_API int cudaStreamIsCapturing(void *stream, int *status) { return *status = status_of(stream), OK; }

static int capture_info(void *stream, int *status, unsigned long long *id, struct graph **graph,
                        const void ***dependencies, size_t *count) {
  struct stream *origin = capture_origin(stream);
  *status = status_of(stream);
  if (!origin) return OK;
  if (id) *id = origin->capture_id;
  if (graph) *graph = origin->graph;
  if (dependencies) *dependencies = NULL;
  if (count) *count = 0;
  return OK;
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

FAKE_API int cudaThreadExchangeStreamCaptureMode(int *mode) {
  int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return OK;
}

FAKE_API int cudaGraphCreate(struct graph **graph, unsigned flags) {
  *graph = calloc(1, sizeof **graph);
  return OK;
}

FAKE_API int cudaGraphGetNodes(struct graph *graph, void **nodes, size_t *count) {
  for (size_t i = 0; nodes && i < *count && i < graph->count; i++) nodes[i] = &graph->nodes[i];
  *count = graph->count;
  return OK;
}

static int instantiate(struct graph **made, const struct graph *graph) {
  *made = calloc(1, sizeof **made);
  (*made)->nodes = malloc((graph->count + 1) * sizeof(struct node));
  memcpy((*made)->nodes, graph->nodes, graph->count * sizeof(struct node));
  (*made)->count = graph->count;
  return OK;
}

FAKE_API int cudaGraphInstantiateWithFlags(struct graph **made, struct graph *graph, unsigned long long flags) {
  return instantiate(made, graph);
}
FAKE_API int cudaGraphInstantiate(struct graph **made, struct graph *graph, unsigned long long flags) {
  return instantiate(made, graph);
}

FAKE_API int cudaGraphLaunch(struct graph *made, void *stream) {
  if (!fake_enter()) return runtime_result(NO_DEVICE);
  for (size_t i = 0; i < made->count; i++) {
    struct node *node = &made->nodes[i];
    int error = node->target ? fake_copy_bytes(node->target, node->source, node->nbytes, (uintptr_t)stream) : OK;
    if (error) return runtime_result(error);
  }
  fake_count_launch((void *)cudaGraphLaunch, "a CUDA graph");
  return OK;
}

FAKE_API int cudaGraphDestroy(struct graph *graph) {
  free(graph->nodes);
  free(graph);
  return OK;
}

FAKE_API int cudaGraphExecDestroy(struct graph *made) { return cudaGraphDestroy(made); }

FAKE_API int cudaGraphDebugDotPrint(struct graph *graph, const char *path, unsigned flags) {
  FILE *file = fopen(path, "w");
  if (!file) return runtime_result(INVALID_VALUE);
  fprintf(file, "digraph captured {\n");
  for (size_t i = 0; i < graph->count; i++)
    fprintf(file, "  n%zu [label=\"%s\"];\n", i, graph->nodes[i].target ? "copy" : "kernel");
  fprintf(file, "}\n");
  fclose(file);
  return OK;
}

/* libcudart: graphs. What one holds is done each time that it is launched; that one is a copy of what was captured. */
#define _GNU_SOURCE
#include "capture.h"

#include <stdio.h>
#include <stdlib.h>

static int capture_launch(void *stream, const void *function) {
  return capture_take(stream, (struct node){LAUNCH, NULL, function});
}

FAKE_API int cudaGraphLaunch(struct graph *made, void *stream);

__attribute__((constructor)) static void watch_launches(void) {
  fake_capture_launch = capture_launch;
  fake_name_kernel((void *)cudaGraphLaunch, "a CUDA graph", NULL);
}

FAKE_API int cudaGraphCreate(struct graph **graph, unsigned flags) {
  *graph = calloc(1, sizeof **graph);
  RESULT(*graph ? OK : OUT_OF_MEMORY);
}

FAKE_API int cudaGraphDestroy(struct graph *graph) { return graph_free(graph), OK; }

FAKE_API int cudaGraphGetNodes(struct graph *graph, void **nodes, size_t *count) {
  for (size_t i = 0; nodes && i < *count && i < graph->count; i++) nodes[i] = &graph->nodes[i];
  *count = graph->count;
  return OK;
}

static int instantiate(struct graph **made, const struct graph *graph) {
  *made = calloc(1, sizeof **made);
  for (size_t i = 0; *made && i < graph->count; i++)
    if (graph_add(*made, graph->nodes[i])) {
      graph_free(*made);
      *made = NULL;
    }
  RESULT(*made ? OK : OUT_OF_MEMORY);
}

FAKE_API int cudaGraphInstantiateWithFlags(struct graph **made, struct graph *graph, unsigned long long flags) {
  return instantiate(made, graph);
}
FAKE_API int cudaGraphInstantiate(struct graph **made, struct graph *graph, unsigned long long flags) {
  return instantiate(made, graph);
}

static int perform(const struct node *node, uint64_t stream) {
  switch (node->kind) {
  case LAUNCH: return fake_count_launch(node->source), OK;
  case COPY: return fake_copy_bytes(node->target, node->source, node->nbytes, stream);
  case ROWS:
    return fake_copy_rows(node->target, node->target_pitch, node->source, node->source_pitch, node->nbytes,
                          node->height, stream);
  case SET: return fake_set_bytes(node->target, node->value, node->nbytes);
  case CALL:
  case RECORD: return ((void (*)(void *))node->source)(node->target), OK;
  default: return INVALID_VALUE;
  }
}

FAKE_API int cudaGraphLaunch(struct graph *made, void *stream) {
  ENTER();
  for (size_t i = 0; i < made->count; i++) {
    int error = perform(&made->nodes[i], (uintptr_t)stream);
    if (error) RESULT(error);
  }
  fake_count_launch((void *)cudaGraphLaunch);
  return OK;
}

FAKE_API int cudaGraphExecDestroy(struct graph *made) { return cudaGraphDestroy(made); }

FAKE_API int cudaGraphDebugDotPrint(struct graph *graph, const char *path, unsigned flags) {
  static const char *const KINDS[] = {"kernel", "copy", "copy", "memset", "host function", "event"};
  FILE *file = fopen(path, "w");
  if (!file) RESULT(INVALID_VALUE);
  fprintf(file, "digraph captured {\n");
  for (size_t i = 0; i < graph->count; i++) fprintf(file, "  n%zu [label=\"%s\"];\n", i, KINDS[graph->nodes[i].kind]);
  fprintf(file, "}\n");
  fclose(file);
  return OK;
}

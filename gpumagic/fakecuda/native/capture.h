/* Streams that are being captured: what they are asked for goes into a graph and is not done. */
#ifndef GPUMAGIC_CAPTURE_H
#define GPUMAGIC_CAPTURE_H

#include "cudart.h"

/* What a graph does when it is launched. */
enum { LAUNCH, COPY, ROWS, SET, CALL, RECORD };

struct node {
  int kind;
  void *target;       /* of a call its argument, of a record the event */
  const void *source; /* of a launch the kernel, of a call or a record the function */
  size_t nbytes;      /* of rows, of each */
  size_t target_pitch, source_pitch, height;
  int value;
};

struct graph {
  struct node *nodes;
  size_t count, room;
};

int graph_add(struct graph *graph, struct node node);
void graph_free(struct graph *graph);

uint64_t capture_of(void *stream); /* the capture that a stream takes part in now, 0 if none */
int capture_is_active(uint64_t capture);
int capture_take(void *stream, struct node node); /* 1: it is in the graph now, and is not to be done */
int capture_join(void *stream, uint64_t capture);
int capture_break(void *stream, int error); /* the capture of a stream fails, with this error */
int capture_forbids_wait(void *stream);     /* the error of waiting for a stream now, or OK */
int capture_forbids_unsafe(void);           /* whether a call that may wait for every stream may not be made now */

#endif

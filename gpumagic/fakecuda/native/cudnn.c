/* libcudnn: descriptors that remember their shapes, and a backend with one engine for every graph of operations.
 *
 * How much memory cuDNN takes beside the tensors (workspaces, the reserve space of an RNN) only the library itself
 * knows. Here it is what was measured of some 600 convolutions and 200 RNNs on an H200 (cuDNN 9), put into rules, and
 * counted with fake_unknown_size: another GPU or version may take more. Handles and most descriptors are made by
 * generated functions.
 */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_CUDNN_VERSION
#define FAKE_CUDNN_VERSION 91000
#endif

FAKE_API size_t cudnnGetVersion(void) { return FAKE_CUDNN_VERSION; }
FAKE_API size_t cudnnGetCudartVersion(void) { return FAKE_CUDA_VERSION; }
FAKE_API int cudnnGetProperty(int which, int *value) {
  const int parts[] = {FAKE_CUDNN_VERSION / 10000, FAKE_CUDNN_VERSION / 100 % 100, FAKE_CUDNN_VERSION % 100};
  if (which < 0 || which > 2) return 2000; /* CUDNN_STATUS_BAD_PARAM */
  *value = parts[which];
  return OK;
}
FAKE_API void cudnnGetLastErrorString(char *message, size_t room) {
  snprintf(message, room, "not supported by fakecuda");
}

struct handle {
  void *stream;
};

FAKE_API int cudnnCreate(struct handle **handle) {
  if (!fake_enter()) return 1001; /* CUDNN_STATUS_NOT_INITIALIZED */
  *handle = calloc(1, sizeof **handle);
  return OK;
}
FAKE_API int cudnnSetStream(struct handle *handle, void *stream) { return handle->stream = stream, OK; }
FAKE_API int cudnnGetStream(struct handle *handle, void **stream) { return *stream = handle->stream, OK; }

/* Tensors and filters */

#define MOST_DIMENSIONS 8

struct tensor {
  int type, format, dimensions;
  int sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
};

static int set_shape(struct tensor *tensor, int type, int dimensions, const int *sizes, const int *strides) {
  if (dimensions < 0 || dimensions > MOST_DIMENSIONS) return 2000; /* CUDNN_STATUS_BAD_PARAM */
  tensor->type = type;
  tensor->dimensions = dimensions;
  for (int at = dimensions - 1, packed = 1; at >= 0; packed *= sizes[at--]) {
    tensor->sizes[at] = sizes[at];
    tensor->strides[at] = strides ? strides[at] : packed;
  }
  return OK;
}

static int get_shape(const struct tensor *tensor, int wanted, int *type, int *dimensions, int *sizes, int *strides) {
  int some = wanted < tensor->dimensions ? wanted : tensor->dimensions;
  *type = tensor->type;
  *dimensions = tensor->dimensions;
  memcpy(sizes, tensor->sizes, some * sizeof *sizes);
  if (strides) memcpy(strides, tensor->strides, some * sizeof *strides);
  return OK;
}

FAKE_API int cudnnSetTensorNdDescriptor(struct tensor *tensor, int type, int dimensions, const int *sizes,
                                        const int *strides) {
  return set_shape(tensor, type, dimensions, sizes, strides);
}

FAKE_API int cudnnGetTensorNdDescriptor(const struct tensor *tensor, int wanted, int *type, int *dimensions,
                                        int *sizes, int *strides) {
  return get_shape(tensor, wanted, type, dimensions, sizes, strides);
}

FAKE_API int cudnnSetFilterNdDescriptor(struct tensor *filter, int type, int format, int dimensions,
                                        const int *sizes) {
  filter->format = format;
  return set_shape(filter, type, dimensions, sizes, NULL);
}

FAKE_API int cudnnGetFilterNdDescriptor(const struct tensor *filter, int wanted, int *type, int *format,
                                        int *dimensions, int *sizes) {
  *format = filter->format;
  return get_shape(filter, wanted, type, dimensions, sizes, NULL);
}

/* Convolutions as they were asked for before version 8: one algorithm, number 0, without a workspace. */

struct choice {
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math_type, reserved[3];
};

static int choose(int wanted, int *given, struct choice *choices) {
  fake_unknown_size("cudnn convolution");
  *given = wanted > 0;
  if (*given) choices[0] = (struct choice){.determinism = 1};
  return OK;
}

FAKE_API int cudnnGetConvolutionForwardAlgorithm_v7(void *handle, void *x, void *w, void *convolution, void *y,
                                                    int wanted, int *given, struct choice *choices) {
  return choose(wanted, given, choices);
}
FAKE_API int cudnnGetConvolutionBackwardDataAlgorithm_v7(void *handle, void *w, void *dy, void *convolution, void *dx,
                                                         int wanted, int *given, struct choice *choices) {
  return choose(wanted, given, choices);
}
FAKE_API int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void *handle, void *x, void *dy, void *convolution,
                                                           void *dw, int wanted, int *given, struct choice *choices) {
  return choose(wanted, given, choices);
}
FAKE_API int cudnnFindConvolutionForwardAlgorithmEx(void *handle, void *x_shape, void *x, void *w_shape, void *w,
                                                    void *convolution, void *y_shape, void *y, int wanted, int *given,
                                                    struct choice *choices, void *workspace, size_t nbytes) {
  return choose(wanted, given, choices);
}
FAKE_API int cudnnFindConvolutionBackwardDataAlgorithmEx(void *handle, void *w_shape, void *w, void *dy_shape, void *dy,
                                                         void *convolution, void *dx_shape, void *dx, int wanted,
                                                         int *given, struct choice *choices, void *workspace,
                                                         size_t nbytes) {
  return choose(wanted, given, choices);
}
FAKE_API int cudnnFindConvolutionBackwardFilterAlgorithmEx(void *handle, void *x_shape, void *x, void *dy_shape,
                                                           void *dy, void *convolution, void *dw_shape, void *dw,
                                                           int wanted, int *given, struct choice *choices,
                                                           void *workspace, size_t nbytes) {
  return choose(wanted, given, choices);
}

static int64_t element_size(int type) {
  switch (type) {
  case 1: return 8;         /* double */
  case 2: case 9: return 2; /* half, bfloat16 */
  default: return 4;
  }
}

/* The backend: graphs of operations. Its engine has no knobs and no notes.
 *
 * A workspace is passed on from an operation to its graph, to what the heuristics find for that, and to the plan. They
 * find two ways to run a graph, of which the second takes no workspace: torch tries it where there is no room for one.
 */

enum { TYPE_INT64 = 3, TYPE_BACKEND_DESCRIPTOR = 15 };

enum {
  HEURISTICS_RESULTS = 202,
  PLAN_WORKSPACE_SIZE = 402,
  PLAN_JSON = 405,
  FORWARD_W = 703,
  DATA_W = 709,
  FILTER_DW = 715,
  GRAPH_ENGINE_COUNT = 802,
  TENSOR_DATA_TYPE = 901,
  TENSOR_DIMENSIONS = 902,
  TENSOR_STRIDES = 903,
  ENGINE_KNOBS = 1302,
  ENGINE_NUMERICAL_NOTES = 1303,
  ENGINE_LAYOUTS = 1304,
  ENGINE_BEHAVIOR_NOTES = 1305,
};

enum { CONVOLUTION_FORWARD = 10, CONVOLUTION_FILTER = 11, CONVOLUTION_DATA = 12, MATMUL = 19, ATTENTION = 41,
       ATTENTION_BACKWARD = 43 };

struct descriptor {
  int kind, type, operands;
  int64_t dimensions, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
  const struct descriptor *weight, *operand[3];
  int64_t workspace;
};

FAKE_API int cudnnBackendCreateDescriptor(int kind, struct descriptor **made) {
  *made = calloc(1, sizeof **made);
  (*made)->kind = kind;
  return OK;
}
FAKE_API int cudnnBackendDestroyDescriptor(struct descriptor *descriptor) { return free(descriptor), OK; }

static int64_t padded(int64_t channels, int64_t multiple) { return (channels + multiple - 1) / multiple * multiple; }

/* Tensor cores want channels last, in multiples of 16 bytes: what lies otherwise is copied, operands and result alike.
 * Weights are gathered in several parts, which take a quarter more. Without tensor cores, and for a filter of one
 * element or one that has a channel to itself, little is taken or nothing. */
static int64_t workspace_of(const struct descriptor *convolution) {
  const struct descriptor *weight = convolution->weight;
  const struct fake_device *device = fake_device(fake_current);
  if (!weight || convolution->operands != 3) return 0;
  int64_t element = element_size(weight->type), multiple = 16 / element, copies = 0, taps = 1;
  if (element == 8 || (element == 4 && device && device->major < 8) || weight->sizes[1] == 1) return 0;
  for (int64_t i = 2; i < weight->dimensions; i++) taps *= weight->sizes[i];
  if (taps == 1) return convolution->kind == CONVOLUTION_FILTER ? 1 << 20 : 0;
  int lies_right = 1;
  for (int i = 0; i < 3; i++) {
    const struct descriptor *each = convolution->operand[i];
    int64_t nbytes = element * padded(each->sizes[1], multiple);
    nbytes *= each == weight ? padded(each->sizes[0], multiple) : each->sizes[0];
    for (int64_t at = 2; at < each->dimensions; at++) nbytes *= each->sizes[at];
    lies_right &= each->strides[1] == 1 && each->sizes[1] % multiple == 0;
    copies += nbytes;
  }
  if (convolution->kind == CONVOLUTION_FILTER) return lies_right ? copies / 4 : copies + copies / 4;
  return lies_right ? 0 : copies;
}

FAKE_API int cudnnBackendSetAttribute(struct descriptor *into, int attribute, int type, int64_t count,
                                      const void *values) {
  const struct descriptor *const *others = values;
  int64_t some = count < MOST_DIMENSIONS ? count : MOST_DIMENSIONS;
  if (attribute == TENSOR_DATA_TYPE) into->type = *(const int *)values;
  if (attribute == TENSOR_DIMENSIONS) memcpy(into->sizes, values, (into->dimensions = some) * sizeof *into->sizes);
  if (attribute == TENSOR_STRIDES) memcpy(into->strides, values, some * sizeof *into->strides);
  if (type != TYPE_BACKEND_DESCRIPTOR) return OK;
  for (int64_t i = 0; i < count; i++) {
    if (!others[i]) continue;
    if (others[i]->workspace > into->workspace) into->workspace = others[i]->workspace;
    if (others[i]->dimensions && into->operands < 3) into->operand[into->operands++] = others[i];
    if (attribute == FORWARD_W || attribute == DATA_W || attribute == FILTER_DW) into->weight = others[i];
  }
  return OK;
}

FAKE_API int cudnnBackendFinalize(struct descriptor *descriptor) {
  if (descriptor->kind >= CONVOLUTION_FORWARD && descriptor->kind <= CONVOLUTION_DATA)
    descriptor->workspace = workspace_of(descriptor);
  if (descriptor->kind == MATMUL || descriptor->kind == ATTENTION || descriptor->kind == ATTENTION_BACKWARD)
    descriptor->workspace = 16; /* of any size; backward with grouped heads it is more, by what is not known */
  return OK;
}

FAKE_API int cudnnBackendGetAttribute(struct descriptor *descriptor, int attribute, int type, int64_t wanted,
                                      int64_t *given, void *values) {
  int64_t count = 1;
  switch (attribute) {
  case ENGINE_KNOBS: case ENGINE_NUMERICAL_NOTES: case ENGINE_LAYOUTS: case ENGINE_BEHAVIOR_NOTES: case PLAN_JSON:
    count = 0;
    break;
  case HEURISTICS_RESULTS: count = 2;
  }
  if (given) *given = count;
  if (!count || wanted < 1 || !values) return OK;
  if (attribute == PLAN_WORKSPACE_SIZE) fake_unknown_size("cudnn graph");
  /* Descriptors are the caller's own, made beforehand. */
  if (type == TYPE_BACKEND_DESCRIPTOR) {
    struct descriptor *made = *(struct descriptor **)values;
    if (made && descriptor->workspace > made->workspace) made->workspace = descriptor->workspace;
  } else if (type == TYPE_INT64) {
    *(int64_t *)values = attribute == PLAN_WORKSPACE_SIZE ? descriptor->workspace : attribute == GRAPH_ENGINE_COUNT;
  } else {
    memset(values, 0, 4);
  }
  return OK;
}

/* Recurrent networks: the weights are laid out one after the other, matrices and biases of each layer in turn. */

enum { RNN_LSTM = 2, RNN_GRU = 3 };

struct rnn {
  int cell, bias_mode, bidirectional, type;
  int64_t input, hidden, projection, layers;
};

FAKE_API int cudnnSetRNNDescriptor_v8(struct rnn *rnn, int algorithm, int cell, int bias_mode, int direction,
                                      int input_mode, int type, int precision, int math_type, int input, int hidden,
                                      int projection, int layers, void *dropout, unsigned flags) {
  *rnn = (struct rnn){cell, bias_mode, direction == 1, type, input, hidden, projection, layers};
  return OK;
}

static int gates(const struct rnn *rnn) { return rnn->cell == RNN_LSTM ? 4 : rnn->cell == RNN_GRU ? 3 : 1; }

static int projects(const struct rnn *rnn) { return rnn->projection && rnn->projection != rnn->hidden; }

/* The size of a matrix: those of the input are numbered first, then those of the hidden state, then the projection. */
static void matrix(const struct rnn *rnn, int64_t layer, int number, int64_t *rows, int64_t *columns) {
  int64_t output = projects(rnn) ? rnn->projection : rnn->hidden;
  int64_t below = layer <= rnn->bidirectional ? rnn->input : output * (1 + rnn->bidirectional);
  *rows = number == 2 * gates(rnn) ? rnn->projection : rnn->hidden;
  *columns = number < gates(rnn) ? below : number < 2 * gates(rnn) ? output : rnn->hidden;
}

/* Which of a layer's matrices have a bias: none, those of the input, all but the projection, those of the state. */
static int has_bias(const struct rnn *rnn, int number) {
  int of_input = number < gates(rnn);
  if (number >= 2 * gates(rnn)) return 0;
  return rnn->bias_mode == 2 || (rnn->bias_mode == 1 && of_input) || (rnn->bias_mode == 3 && !of_input);
}

/* Where a matrix and its bias begin, in elements; for the layer after the last, where the weights end. */
static void locate(const struct rnn *rnn, int64_t layer, int number, int64_t *at, int64_t *bias_at) {
  int matrices = 2 * gates(rnn) + projects(rnn);
  int64_t rows, columns;
  *at = 0;
  for (int64_t each = 0; each <= layer; each++) {
    int here = each == layer;
    for (int i = 0; i < (here ? number : matrices); i++) {
      matrix(rnn, each, i, &rows, &columns);
      *at += rows * columns;
    }
    if (here) break;
    for (int i = 0; i < matrices; i++) *at += has_bias(rnn, i) * rnn->hidden;
  }
  *bias_at = *at;
  for (int i = number; i < matrices; i++) {
    matrix(rnn, layer, i, &rows, &columns);
    *bias_at += rows * columns;
  }
  for (int i = 0; i < number; i++) *bias_at += has_bias(rnn, i) * rnn->hidden;
}

FAKE_API int cudnnGetRNNWeightSpaceSize(void *handle, const struct rnn *rnn, size_t *nbytes) {
  int64_t end, unused;
  locate(rnn, rnn->layers * (1 + rnn->bidirectional), 0, &end, &unused);
  *nbytes = end * element_size(rnn->type);
  return OK;
}

static void give(const struct rnn *rnn, struct tensor *shape, char *weights, int64_t at, int rows, int columns,
                 void **address) {
  int sizes[] = {1, rows, columns};
  if (shape) set_shape(shape, rnn->type, rows ? 3 : 0, sizes, NULL);
  if (address) *address = rows ? weights + at * element_size(rnn->type) : NULL;
}

FAKE_API int cudnnGetRNNWeightParams(void *handle, const struct rnn *rnn, int layer, size_t nbytes, void *weights,
                                     int number, struct tensor *shape, void **address, struct tensor *bias_shape,
                                     void **bias_address) {
  int64_t rows, columns, at, bias_at;
  int there = number < 2 * gates(rnn) + projects(rnn);
  matrix(rnn, layer, number, &rows, &columns);
  locate(rnn, layer, number, &at, &bias_at);
  give(rnn, shape, weights, at, there ? (int)rows : 0, (int)columns, address);
  give(rnn, bias_shape, weights, bias_at, there && has_bias(rnn, number) ? (int)rnn->hidden : 0, 1, bias_address);
  return OK;
}

struct rnn_data {
  int64_t steps, input;
};

FAKE_API int cudnnSetRNNDataDescriptor(struct rnn_data *data, int type, int layout, int longest, int batch, int input,
                                       const int *lengths, void *padding) {
  *data = (struct rnn_data){0, input};
  for (int i = 0; i < batch; i++) data->steps += lengths[i];
  return OK;
}

/* What backward needs of each step: the gates and, of an LSTM, the cell, for each layer, and what a layer gives the
 * next. While it runs, the gates of one layer, the weights, the input, and 9 MiB for each layer and direction. */
FAKE_API int cudnnGetRNNTempSpaceSizes(void *handle, const struct rnn *rnn, int training, const struct rnn_data *data,
                                       size_t *workspace, size_t *reserve) {
  static const int KEPT[] = {[RNN_LSTM] = 5, [RNN_GRU] = 6};
  int64_t ways = 1 + rnn->bidirectional, state = ways * data->steps * rnn->hidden * element_size(rnn->type);
  int64_t kept = rnn->cell >= RNN_LSTM ? KEPT[rnn->cell] : 1;
  size_t weights;
  fake_unknown_size("cudnnGetRNNTempSpaceSizes");
  cudnnGetRNNWeightSpaceSize(handle, rnn, &weights);
  if (reserve) *reserve = training ? ((kept + 1) * rnn->layers - 1) * state : 0;
  if (workspace)
    *workspace = (gates(rnn) + 2 * ways - 1) * state + weights + data->steps * data->input * element_size(rnn->type) +
                 (rnn->layers * ways * 9 << 20);
  return OK;
}

/* Dropout: torch keeps the states of the generator itself, of a size that depends on the GPU's multiprocessors. */
FAKE_API int cudnnDropoutGetStatesSize(void *handle, size_t *nbytes) {
  struct fake_device *device = fake_enter();
  if (!device) return 1001;
  fake_unknown_size("cudnnDropoutGetStatesSize");
  *nbytes = (size_t)device->multiprocessors * device->threads_per_multiprocessor * 16;
  return OK;
}

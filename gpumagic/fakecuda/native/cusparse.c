/* libcusparse: sparse matrices that remember their size. What multiplies and solves is generated and does nothing. */
#include "fake.h"

#include <stdlib.h>

struct sparse {
  int64_t rows, columns, entries;
};

static int make(struct sparse **made, int64_t rows, int64_t columns, int64_t entries) {
  *made = malloc(sizeof **made);
  **made = (struct sparse){rows, columns, entries};
  return OK;
}

FAKE_API int cusparseCreateCsr(struct sparse **made, int64_t rows, int64_t columns, int64_t entries) {
  return make(made, rows, columns, entries);
}
FAKE_API int cusparseCreateCoo(struct sparse **made, int64_t rows, int64_t columns, int64_t entries) {
  return make(made, rows, columns, entries);
}

/* Of a product of two sparse matrices: how many entries it has depends on where theirs are. None are said here. */
FAKE_API int cusparseSpMatGetSize(const struct sparse *matrix, int64_t *rows, int64_t *columns, int64_t *entries) {
  *rows = matrix->rows;
  *columns = matrix->columns;
  *entries = matrix->entries;
  return OK;
}

FAKE_API int cusparseSpGEMM_copy(void *handle, int a_operation, int b_operation, const void *alpha, void *a, void *b,
                                 const void *beta, void *c) {
  fake_unknown_size("cusparseSpGEMM_copy");
  return OK;
}

/* Of a sum: at most the entries of both, where none are at the same place. */
FAKE_API int cusparseXcsrgeam2Nnz(void *handle, int rows, int columns, void *a, int a_entries, const int *a_rows,
                                  const int *a_columns, void *b, int b_entries, const int *b_rows,
                                  const int *b_columns, void *c, int *c_rows, int *entries) {
  fake_unknown_size("cusparseXcsrgeam2Nnz");
  *entries = a_entries + b_entries;
  return OK;
}

static int no_zero_pivot(int *position) { return *position = -1, OK; }

FAKE_API int cusparseXbsrsm2_zeroPivot(void *handle, void *info, int *position) { return no_zero_pivot(position); }
FAKE_API int cusparseXbsrsv2_zeroPivot(void *handle, void *info, int *position) { return no_zero_pivot(position); }

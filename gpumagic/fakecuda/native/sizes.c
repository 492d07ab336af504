/* Memory of which only the real libraries know how much they take: how often they were asked. */
#include "fake.h"

#include <string.h>

#define MOST_KINDS 256

struct unknown_size {
  const char *what;
  int64_t times;
};

static struct unknown_size unknown[MOST_KINDS];
static int64_t kinds;

void fake_unknown_size(const char *what) {
  fake_lock();
  int64_t at = 0;
  while (at < kinds && strcmp(unknown[at].what, what)) at++;
  if (at == kinds && kinds < MOST_KINDS) unknown[kinds++].what = what;
  if (at < MOST_KINDS) unknown[at].times++;
  fake_unlock();
}

FAKE_API int64_t fakecuda_unknown_sizes(struct unknown_size *into, int64_t most) {
  fake_lock();
  int64_t count = kinds;
  if (into) memcpy(into, unknown, (size_t)(count < most ? count : most) * sizeof *unknown);
  fake_unlock();
  return count;
}

FAKE_API void fakecuda_forget_unknown_sizes(void) {
  fake_lock();
  kinds = 0;
  memset(unknown, 0, sizeof unknown);
  fake_unlock();
}

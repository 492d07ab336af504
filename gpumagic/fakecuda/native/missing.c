/* What was asked of a library and is not there: said once for each name, in one line. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *said[1024];
static int count;

void fake_missing(const char *library, const char *name) {
  pthread_mutex_lock(&lock);
  int before = 0;
  for (int i = 0; i < count; i++) before |= !strcmp(said[i], name);
  if (!before && count < 1024) {
    said[count++] = strdup(name);
    fprintf(stderr, "fakecuda: %s has no %s here: it answers \"not supported\"\n", library, name);
  }
  pthread_mutex_unlock(&lock);
}

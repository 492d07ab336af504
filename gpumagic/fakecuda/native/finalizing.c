/* A thread that asks for the GIL while Python finalizes waits for the end of the process, as in Python 3.14 (gh-87135).

   Before, Python ends it with pthread_exit, which unwinds its stack. Torch's autograd thread of a device lets go of a
   backward pass only after `backward()` has returned, and needs the GIL for it in a destructor: std::terminate. On a
   GPU the script rarely ends so soon after; here the device takes no time. */
#define _GNU_SOURCE
#include "fake.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static int python_finalizes(void) {
  int (*asked)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
  if (!asked) asked = (int (*)(void))dlsym(RTLD_DEFAULT, "_Py_IsFinalizing"); /* before Python 3.13 */
  return asked && asked();
}

FAKE_API void pthread_exit(void *value) {
  if (python_finalizes()) {
    setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0", 1); /* else torch waits 10 s for its threads to end */
    for (;;) pause();
  }
  ((void (*)(void *))dlsym(RTLD_NEXT, "pthread_exit"))(value);
  abort(); /* it does not return, and neither may this */
}

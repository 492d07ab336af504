/* libcudnn: descriptors, and a backend that has one engine for every graph, without a workspace. */
#include "fake.h"

#include <stdlib.h>

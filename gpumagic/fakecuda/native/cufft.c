/* libcufft */
#include "fake.h"

/* libcusparse */
#include "fake.h"

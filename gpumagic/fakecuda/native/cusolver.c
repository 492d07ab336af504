/* libcusolver */
#include "fake.h"

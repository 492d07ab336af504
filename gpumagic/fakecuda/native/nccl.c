/* libnccl */
#include "fake.h"

// What an allocator counts: torch's own records.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7
namespace c10 {
namespace CachingAllocator = CachingDeviceAllocator;
}
#endif

// What an allocator counts: torch's own records, which torch before 2.5 has for CUDA alone.
#pragma once

#if __has_include(<c10/core/CachingDeviceAllocator.h>)
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7
namespace c10 {
namespace CachingAllocator = CachingDeviceAllocator;
}
#endif
#else
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace c10::CachingAllocator {

enum struct StatType : uint64_t { AGGREGATE, SMALL_POOL, LARGE_POOL, NUM_TYPES };

struct Stat {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0;
  int64_t freed = 0;

  void increase(size_t amount) {
    current += static_cast<int64_t>(amount);
    allocated += static_cast<int64_t>(amount);
    peak = std::max(peak, current);
  }
  void decrease(size_t amount) {
    current -= static_cast<int64_t>(amount);
    freed += static_cast<int64_t>(amount);
  }
  void reset_accumulated() {
    allocated = freed = 0;
  }
  void reset_peak() {
    peak = current;
  }
};

using StatArray = std::array<Stat, static_cast<size_t>(StatType::NUM_TYPES)>;

}  // namespace c10::CachingAllocator

namespace c10::CachingDeviceAllocator {

using c10::CachingAllocator::StatArray;

struct DeviceStats {
  StatArray allocation;
  StatArray segment;
  StatArray active;
  StatArray inactive_split;
  StatArray allocated_bytes;
  StatArray reserved_bytes;
  StatArray active_bytes;
  StatArray inactive_split_bytes;
  StatArray requested_bytes;
  int64_t num_alloc_retries = 0;
  int64_t num_ooms = 0;
  int64_t num_device_alloc = 0;
  int64_t num_device_free = 0;
};

}  // namespace c10::CachingDeviceAllocator
#endif

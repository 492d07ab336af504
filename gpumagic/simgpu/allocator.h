// The simulated cards' memory: a caching allocator shaped after CUDA's, over host memory.
//
// What is simulated is the bookkeeping. Segments, blocks, their splitting and reuse, and the statistics are
// those of torch's caching allocator for CUDA; the bytes themselves are an ordinary host allocation per live
// storage, so that a card of many GiB costs nothing until it is written to, and a cached block costs nothing.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/version.h>

#include "statistics.h"

#include <chrono>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#define SIMGPU_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if SIMGPU_TORCH_AT_LEAST(2, 7)
#define SIMGPU_NOEXCEPT
#else
#define SIMGPU_NOEXCEPT noexcept
#endif

namespace simgpu {

using c10::DeviceIndex;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr c10::DeviceType kSimgpu = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMaxDevices = 64;

// CUDA's figures: c10/cuda/CUDACachingAllocator.
constexpr size_t kRounding = 512;
constexpr size_t kSmallSize = 1 << 20;
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kMediumSize = 10 << 20;
constexpr size_t kMediumSegment = 20 << 20;
constexpr size_t kLargeRounding = 2 << 20;

inline size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

inline std::string format_size(size_t size) {
  char text[40];
  if (size < 1024) {
    std::snprintf(text, sizeof(text), "%zu bytes", size);
  } else if (size < (1 << 20)) {
    std::snprintf(text, sizeof(text), "%.2f KiB", size / 1024.0);
  } else if (size < (1 << 30)) {
    std::snprintf(text, sizeof(text), "%.2f MiB", size / 1048576.0);
  } else {
    std::snprintf(text, sizeof(text), "%.2f GiB", size / 1073741824.0);
  }
  return text;
}

// A stretch of a segment, in use or cached. Neighbours within the segment are linked.
struct Block {
  size_t address;
  size_t size;
  size_t requested = 0;
  bool small;
  Block* previous = nullptr;
  Block* next = nullptr;
  const void* host = nullptr;  // where tensors say that it lies, while it is in use

  bool is_whole_segment() const {
    return previous == nullptr && next == nullptr;
  }
};

// A block that was handed out, or given back where `size` is negative.
struct Event {
  uintptr_t address;  // where tensors say that it lies
  int64_t size;
  double seconds;  // of the monotonic clock, which is `time.perf_counter` on Linux
};

constexpr size_t kMaxEvents = 1 << 20;

struct SmallestThenFirst {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
};

using Blocks = std::set<Block*, SmallestThenFirst>;

// One simulated card. Every public method takes the lock itself.
class Card {
 public:
  explicit Card(DeviceIndex index) : index_(index) {}

  // Returns a block of `requested` bytes rounded up to 512, or raises torch.OutOfMemoryError.
  Block* take(size_t requested) {
    std::lock_guard<std::mutex> lock(mutex);
    const size_t size = std::max(kRounding, round_up(requested, kRounding));
    const bool small = size <= kSmallSize;
    Block* block = find_cached(size, small);
    if (block == nullptr) {
      block = new_segment(size, small);
    }
    split(block, size);
    block->requested = requested;
    count_use(block, +1);
    in_use_.insert(block);
    used_ = true;
    return block;
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex);
    count_use(block, -1);
    in_use_.erase(block);
    record(block, -1);
    block->host = nullptr;
    for (Block* neighbour : {block->previous, block->next}) {
      if (neighbour != nullptr && cached(neighbour->small).count(neighbour) != 0) {
        merge(block, neighbour);
      }
    }
    cache(block);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex);
    release_cached_segments();
  }

  void place(Block* block, const void* host) {
    std::lock_guard<std::mutex> lock(mutex);
    block->host = host;
    record(block, +1);
  }

  // Keeps the events from now on, of more than `kMaxEvents` the last; ends and forgets them where `is_on` is false.
  void record_history(bool is_on) {
    std::lock_guard<std::mutex> lock(mutex);
    is_recording_ = is_on;
    history_.clear();
  }

  std::vector<Event> history() {
    std::lock_guard<std::mutex> lock(mutex);
    return {history_.begin(), history_.end()};
  }

  // Returns copies of the blocks of each segment, in their order, and whether they are cached.
  std::vector<std::vector<std::pair<Block, bool>>> segments() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::vector<std::pair<Block, bool>>> found;
    for (const auto* blocks : {&in_use_, &small_cached_, &large_cached_}) {
      for (const Block* head : *blocks) {
        if (head->previous == nullptr) {
          found.emplace_back();
          for (Block* block = const_cast<Block*>(head); block != nullptr; block = block->next) {
            found.back().emplace_back(*block, in_use_.count(block) == 0);
          }
        }
      }
    }
    return found;
  }

  DeviceStats stats() {
    std::lock_guard<std::mutex> lock(mutex);
    return stats_;
  }

  void reset_peaks() {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto* figure : figures()) {
      for (auto& stat : *figure) {
        stat.reset_peak();
      }
    }
  }

  void reset_accumulated() {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto* figure : figures()) {
      for (auto& stat : *figure) {
        stat.reset_accumulated();
      }
    }
    stats_.num_alloc_retries = stats_.num_ooms = 0;
    stats_.num_device_alloc = stats_.num_device_free = 0;
  }

  void set_capacity(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex);
    capacity_ = capacity;
  }

  size_t capacity() const {
    return capacity_;
  }

  size_t allocated() {
    std::lock_guard<std::mutex> lock(mutex);
    return current(stats_.allocated_bytes);
  }

  size_t reserved() {
    std::lock_guard<std::mutex> lock(mutex);
    return current(stats_.reserved_bytes);
  }

  bool used() const {
    return used_;
  }

  std::mutex mutex;

 private:
  using Figure = c10::CachingAllocator::StatArray;

  static size_t current(const Figure& figure) {
    return static_cast<size_t>(figure[static_cast<size_t>(StatType::AGGREGATE)].current);
  }

  Blocks& cached(bool small) {
    return small ? small_cached_ : large_cached_;
  }

  Block* find_cached(size_t size, bool small) {
    Block wanted{0, size, 0, small};
    auto found = cached(small).lower_bound(&wanted);
    if (found == cached(small).end()) {
      return nullptr;
    }
    Block* block = *found;
    uncache(block);
    return block;
  }

  Block* new_segment(size_t size, bool small) {
    const size_t bytes = small ? kSmallSegment
        : size < kMediumSize   ? kMediumSegment
                               : round_up(size, kLargeRounding);
    if (bytes > capacity_ - current(stats_.reserved_bytes)) {
      stats_.num_alloc_retries += 1;
      release_cached_segments();
    }
    if (bytes > capacity_ - current(stats_.reserved_bytes)) {
      stats_.num_ooms += 1;
      out_of_memory(bytes);
    }
    Block* block = new Block{next_address_, bytes, 0, small};
    next_address_ += bytes;
    stats_.num_device_alloc += 1;
    count_segment(block, +1);
    return block;
  }

  // CUDA keeps a remainder below 1 MiB with a large block and counts it as allocated; here every block is cut
  // to size, so that "allocated" is exactly the sum of the rounded live storages.
  void split(Block* block, size_t size) {
    if (block->size == size) {
      return;
    }
    Block* rest = new Block{block->address + size, block->size - size, 0, block->small, block, block->next};
    if (rest->next != nullptr) {
      rest->next->previous = rest;
    }
    block->next = rest;
    block->size = size;
    cache(rest);
  }

  // Grows `block` by its cached neighbour.
  void merge(Block* block, Block* neighbour) {
    uncache(neighbour);
    if (neighbour == block->previous) {
      block->address = neighbour->address;
      block->previous = neighbour->previous;
      if (block->previous != nullptr) {
        block->previous->next = block;
      }
    } else {
      block->next = neighbour->next;
      if (block->next != nullptr) {
        block->next->previous = block;
      }
    }
    block->size += neighbour->size;
    delete neighbour;
  }

  void cache(Block* block) {
    cached(block->small).insert(block);
    count_split(block, +1);
  }

  void uncache(Block* block) {
    count_split(block, -1);
    cached(block->small).erase(block);
  }

  void release_cached_segments() {
    for (Blocks* blocks : {&small_cached_, &large_cached_}) {
      for (auto it = blocks->begin(); it != blocks->end();) {
        Block* block = *it;
        if (!block->is_whole_segment()) {
          ++it;
          continue;
        }
        it = blocks->erase(it);
        stats_.num_device_free += 1;
        count_segment(block, -1);
        delete block;
      }
    }
  }

  [[noreturn]] void out_of_memory(size_t bytes) {
    const size_t allocated = current(stats_.allocated_bytes);
    const size_t reserved = current(stats_.reserved_bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "simgpu out of memory. Tried to allocate ", format_size(bytes),
        ". GPU ", static_cast<int>(index_),
        " has a total capacity of ", format_size(capacity_),
        " of which ", format_size(capacity_ - reserved), " is free. Of the allocated memory ",
        format_size(allocated), " is allocated by PyTorch, and ",
        format_size(reserved - allocated), " is reserved by PyTorch but unallocated.");
    std::abort();
  }

  void count(Figure& figure, const Block* block, int64_t amount) {
    for (StatType type : {StatType::AGGREGATE, block->small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
      auto& stat = figure[static_cast<size_t>(type)];
      if (amount >= 0) {
        stat.increase(static_cast<size_t>(amount));
      } else {
        stat.decrease(static_cast<size_t>(-amount));
      }
    }
  }

  void record(const Block* block, int64_t sign) {
    if (!is_recording_) {
      return;
    }
    const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
    history_.push_back(
        {reinterpret_cast<uintptr_t>(block->host), sign * static_cast<int64_t>(block->size), now.count()});
    if (history_.size() > kMaxEvents) {
      history_.pop_front();
    }
  }

  void count_use(const Block* block, int64_t sign) {
    count(stats_.allocation, block, sign);
    count(stats_.active, block, sign);
    count(stats_.allocated_bytes, block, sign * static_cast<int64_t>(block->size));
    count(stats_.active_bytes, block, sign * static_cast<int64_t>(block->size));
    count(stats_.requested_bytes, block, sign * static_cast<int64_t>(block->requested));
  }

  void count_segment(const Block* block, int64_t sign) {
    count(stats_.segment, block, sign);
    count(stats_.reserved_bytes, block, sign * static_cast<int64_t>(block->size));
  }

  void count_split(const Block* block, int64_t sign) {
    if (!block->is_whole_segment()) {
      count(stats_.inactive_split, block, sign);
      count(stats_.inactive_split_bytes, block, sign * static_cast<int64_t>(block->size));
    }
  }

  std::vector<Figure*> figures() {
    return {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split,
            &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
            &stats_.inactive_split_bytes, &stats_.requested_bytes};
  }

  const DeviceIndex index_;
  size_t capacity_ = 0;
  size_t next_address_ = kLargeRounding;
  bool used_ = false;
  Blocks small_cached_;
  Blocks large_cached_;
  Blocks in_use_;
  bool is_recording_ = false;
  std::deque<Event> history_;
  DeviceStats stats_;
};

// The cards of this process. They are never destroyed: tensors outlive static destructors.
struct Cards {
  std::vector<std::unique_ptr<Card>> all;
  DeviceIndex count = 0;

  Cards() {
    for (DeviceIndex index = 0; index < kMaxDevices; ++index) {
      all.push_back(std::make_unique<Card>(index));
    }
  }
};

inline Cards& cards() {
  static Cards* instance = new Cards();
  return *instance;
}

inline void check_ordinal(int64_t index) {
  if (index >= 0 && index < cards().count) {
    return;
  }
#if SIMGPU_TORCH_AT_LEAST(2, 9)
  constexpr int32_t kInvalidDevice = 101;  // cudaErrorInvalidDevice
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kInvalidDevice, "simgpu error: invalid device ordinal");
#else
  TORCH_CHECK(false, "simgpu error: invalid device ordinal");
#endif
}

inline Card& card(int64_t index) {
  check_ordinal(index);
  return *cards().all[index];
}

// What a DataPtr of a simulated card owns: its block on the card, and the host memory behind it, which is
// either its own or that of a host storage that was taken over with its contents.
struct Memory {
  Card& card;
  Block* block;
  void* host = nullptr;
  c10::Storage taken_over;

  ~Memory() {
    card.give_back(block);  // first: the history would else tell of the next storage there before the end of this one
    if (host != nullptr) {
      c10::free_cpu(host);
    }
  }
};

inline void release(void* memory) {
  delete static_cast<Memory*>(memory);
}

// `seen_as` is the device the pointer claims to be on: the card, or the host while an operator borrows it.
inline c10::DataPtr allocate(DeviceIndex index, size_t size, c10::Device seen_as) {
  Card& target = card(index);
  if (size == 0) {
    return {nullptr, seen_as};
  }
  std::unique_ptr<Memory> memory(new Memory{target, target.take(size)});
  void* host = memory->host = c10::alloc_cpu(size);
  target.place(memory->block, host);
  return {host, memory.release(), &release, seen_as};
}

// Books a host storage on a card without copying it.
inline c10::DataPtr adopt(DeviceIndex index, const c10::Storage& storage) {
  const c10::Device device(kSimgpu, index);
  void* host = const_cast<void*>(storage.data());
  if (host == nullptr || storage.nbytes() == 0) {
    return {nullptr, device};
  }
  Card& target = card(index);
  auto* memory = new Memory{target, target.take(storage.nbytes())};
  memory->taken_over = storage;
  target.place(memory->block, host);
  return {host, memory, &release, device};
}

}  // namespace simgpu

// PyTorch's CPU memory, where blocks that were given back wait for the next tensor of their size.
//
// A step makes hundreds of tensors of a few kilobytes, the same at every call. The C library serves aligned blocks of
// such sizes by its slow path; a list a size and thread takes a few instructions.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <bit>

namespace yggdrasil {

class KeptMemory final : public c10::Allocator {
 public:
  // From now on all tensors on CPUs lie in memory of this allocator; those that are there already keep their own.
  static void install() {
    static auto* allocator = new KeptMemory;  // never destroyed: tensors may be the last to go
    c10::SetCPUAllocator(allocator, /*priority=*/1);
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = num_bytes == 0 ? nullptr : take(num_bytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

 private:
  static constexpr int kSmallest = 8, kSizes = 13;  // kept are 256 bytes to 1 MiB, in powers of two
  static constexpr size_t kMostBytes = 4 << 20;     // that a thread keeps of a size
  static constexpr size_t kHeader = 64;             // before each block: which list it belongs to, then the block behind it

  struct Block {
    int64_t list;  // -1: none
    Block* next;
  };
  static_assert(sizeof(Block) <= kHeader);

  struct Lists {
    std::array<Block*, kSizes> first{};
    std::array<size_t, kSizes> count{};

    ~Lists() {
      is_over() = true;
      for (Block* block : first)
        while (block) c10::free_cpu(std::exchange(block, block->next));
    }
  };

  static Lists& lists() {
    static thread_local Lists all;
    return all;
  }

  // Whether this thread's lists are gone: tensors that end later are freed.
  static bool& is_over() {
    static thread_local bool over = false;
    return over;
  }

  static void* take(size_t num_bytes) {
    const int64_t list = std::max<int64_t>(0, std::bit_width(num_bytes - 1) - kSmallest);
    Block* block = nullptr;
    if (list >= kSizes || is_over()) {
      block = static_cast<Block*>(c10::alloc_cpu(kHeader + num_bytes));
      block->list = -1;
    } else if ((block = lists().first[list])) {
      lists().first[list] = block->next;
      --lists().count[list];
    } else {
      block = static_cast<Block*>(c10::alloc_cpu(kHeader + (size_t{1} << (list + kSmallest))));
      block->list = list;
    }
    return reinterpret_cast<char*>(block) + kHeader;
  }

  static void give_back(void* data) {
    if (!data) return;
    Block* block = reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader);
    const int64_t list = block->list;
    if (list < 0 || is_over() || lists().count[list] << (list + kSmallest) >= kMostBytes) return c10::free_cpu(block);
    block->next = std::exchange(lists().first[list], block);
    ++lists().count[list];
  }
};

}  // namespace yggdrasil

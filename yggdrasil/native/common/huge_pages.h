// Allocator on huge pages, if the system supports them, for tables that are read at random between two passes.
//
// A pass evicts all address translations from the processor's TLB, so every page touched after it needs a page walk, in
// a virtual machine a nested one. For a table of 14 MB these would take most of the time.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace yggdrasil {

// Allocator for standard containers; large allocations get their own pages.
template <typename T>
struct OnHugePages {
  using value_type = T;

  OnHugePages() = default;
  template <typename U>
  OnHugePages(const OnHugePages<U>&) {}

  T* allocate(size_t count) {
    constexpr size_t kPage = 2 << 20, kLine = 64;
    const bool is_large = count * sizeof(T) >= kPage / 8;
    const size_t unit = is_large ? kPage : kLine, num_bytes = (count * sizeof(T) + unit - 1) / unit * unit;
    void* data = std::aligned_alloc(unit, num_bytes);
    if (!data) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (is_large) madvise(data, num_bytes, MADV_HUGEPAGE);  // fails without support for huge pages: small pages are used
#endif
    return static_cast<T*>(data);
  }

  void deallocate(T* data, size_t) { std::free(data); }

  bool operator==(const OnHugePages&) const { return true; }
};

}  // namespace yggdrasil

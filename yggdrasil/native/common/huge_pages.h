// Memory for what is read here and there between two passes: on huge pages where the system has them.
//
// A pass drives every address translation out of the processor, and each page that is touched behind it has to be looked
// up in memory, in a virtual machine twice. Of a table of 14 MB that is most of the time.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace yggdrasil {

// An allocator for containers: what takes much of a huge page, or more, has pages of its own.
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
    if (is_large) madvise(data, num_bytes, MADV_HUGEPAGE);  // a system built without them goes on with small pages
#endif
    return static_cast<T*>(data);
  }

  void deallocate(T* data, size_t) { std::free(data); }

  bool operator==(const OnHugePages&) const { return true; }
};

}  // namespace yggdrasil

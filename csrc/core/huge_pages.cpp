#include "core/huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ascend_attn {

void prefer_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr size_t always_mapped = size_t{32} << 20;  // DEFAULT_MMAP_THRESHOLD_MAX of glibc
  if (bytes < always_mapped) {
    return;
  }
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  // Advice: a kernel without huge pages refuses it, and nothing is lost.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace ascend_attn

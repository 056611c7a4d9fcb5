#include "cpu/common/known_masks.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/memory.h"

namespace ascend_attn::cpu {
namespace {

struct KnownMask {
  at::Tensor mask;
  int64_t version;  // which operations in place raise
};

struct KnownMasks {
  std::mutex mutex;
  std::vector<KnownMask> masks;
};

// Never destroyed: calls may outlive static objects.
KnownMasks& known_masks() {
  static auto* known = new KnownMasks();
  return *known;
}

}  // namespace

void remember_compressed_mask(const at::Tensor& mask) {
  auto& known = known_masks();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.masks,
                [&](const KnownMask& each) { return each.mask.sizes() == mask.sizes(); });
  known.masks.push_back({mask, mask._version()});
}

bool is_known_mask(const at::Tensor& mask) {
  auto& known = known_masks();
  const std::lock_guard lock(known.mutex);
  return std::ranges::any_of(known.masks, [&](const KnownMask& each) {
    return same_elements(each.mask, mask) && each.mask._version() == each.version;
  });
}

}  // namespace ascend_attn::cpu

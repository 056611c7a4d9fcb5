#include "core/pack_hints.h"

#include <c10/util/Exception.h>

namespace ascend_attn {
namespace {

constexpr std::string_view kHintForCounts =
    "; these look like counts: pass torch.cumsum(lengths, 0)";

bool look_like_counts(c10::ArrayRef<int64_t> lengths, int64_t tokens) {
  if (lengths.size() < 2 || lengths.back() == tokens) {
    return false;
  }
  int64_t sum = 0;
  for (const auto length : lengths) {
    if (length < 0 || length > tokens - sum) {
      return false;
    }
    sum += length;
  }
  return sum == tokens;
}

}  // namespace

std::string_view hint_for_counts(c10::ArrayRef<int64_t> lengths, int64_t tokens) {
  return look_like_counts(lengths, tokens) ? kHintForCounts : std::string_view();
}

void warn_of_counts(std::string_view op, c10::ArrayRef<int64_t> lengths, int64_t tokens) {
  if (look_like_counts(lengths, tokens)) [[unlikely]] {
    TORCH_WARN_ONCE("ascend::", op, ": the cumulative sequence lengths end at ", lengths.back(),
                    " of ", tokens, " tokens", kHintForCounts);
  }
}

}  // namespace ascend_attn

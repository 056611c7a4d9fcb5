#include "core/pack_hints.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

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

// Whether the blocks of a row that hold `keys` keys have one of them twice.
bool repeats_a_block(const int32_t* blocks, int64_t keys, int64_t block_size) {
  std::vector<int32_t> read(blocks, blocks + keys / block_size + (keys % block_size != 0));
  std::ranges::sort(read);
  return std::ranges::adjacent_find(read) != read.end();
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

void warn_of_cumulative_counts(std::string_view op, c10::ArrayRef<int64_t> keys,
                               const at::Tensor& block_table, int64_t block_size) {
  const auto not_larger = [](int64_t a, int64_t b) { return b <= a; };
  if (keys.size() < 2 || std::ranges::adjacent_find(keys, not_larger) != keys.end()) {
    return;
  }
  for (size_t b = 0; b < keys.size(); ++b) {
    if (repeats_a_block(block_table.const_data_ptr<int32_t>() + b * block_table.size(1), keys[b],
                        block_size)) {
      TORCH_WARN_ONCE("ascend::", op, ": actual_seq_lengths_key: ", keys,
                      " look cumulative, and sequence ", b,
                      " reads a block twice; beside pages they are counts of keys");
      return;
    }
  }
}

}  // namespace ascend_attn

// Packs of more sequences than one launch of dense attention takes, which are launched in parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "core/sequence_lengths.h"
#include "ops/flash_attention_score.h"

namespace ascend_attn::aclnn {

// CANN documents so many lengths for every version of its functions.
inline constexpr int64_t kMostLengths = 2048;

// A run of the sequences of a pack. The last part also has the padding rows.
struct PackPart {
  // Returns the part's rows of a tensor of all queries, or of all keys.
  at::Tensor queries(const at::Tensor& tensor) const {
    return tensor.narrow(0, query_begin, query_count);
  }
  at::Tensor keys(const at::Tensor& tensor) const { return tensor.narrow(0, key_begin, key_count); }
  std::optional<at::Tensor> queries(const std::optional<at::Tensor>& tensor) const {
    return tensor ? std::optional(queries(*tensor)) : std::nullopt;
  }
  std::optional<at::Tensor> keys(const std::optional<at::Tensor>& tensor) const {
    return tensor ? std::optional(keys(*tensor)) : std::nullopt;
  }

  int64_t query_begin, query_count, key_begin, key_count;
  // Whether a sequence has both queries and keys. Without one, all results are zero.
  bool has_scores;
  FlashAttentionOptions options;
};

// Calls `launch` for each part of a pack that has more lengths than a launch takes, with the 0 that
// closes a padded pack. Returns whether there are such parts; the caller launches any other call
// as it is.
bool for_each_part(const char* op, const at::Tensor& query, const at::Tensor& key,
                   const FlashAttentionOptions& options,
                   const std::function<void(const PackPart&)>& launch);

// Returns the call of one part.
template <typename Op>
Op call_of(const PackPart& part, const Op& op) {
  auto call = op;
  call.query = part.queries(op.query);
  call.key = part.keys(op.key);
  call.value = part.keys(op.value);
  call.options = part.options;
  if constexpr (requires { op.dy; }) {
    // The statistics lie one sequence behind the other, so a part has its own bytes.
    for (auto* tensor : {&*call.dy, &call.softmax_max, &call.softmax_sum, &call.attention_in}) {
      *tensor = part.queries(*tensor);
    }
  }
  if constexpr (requires { op.extra; }) {
    call.extra.query_rope = part.queries(op.extra.query_rope);
    call.extra.key_rope = part.keys(op.extra.key_rope);
  }
  return call;
}

}  // namespace ascend_attn::aclnn

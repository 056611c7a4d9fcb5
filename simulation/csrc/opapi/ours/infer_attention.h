// Attention for inference, with a key/value cache: what FusedInferAttentionScore,
// IncreFlashAttention and PromptFlashAttention share.
#pragma once

#include <ATen/core/TensorBody.h>

#include <limits>

#include "opapi/core/opapi.h"

namespace cann_sim {

inline constexpr Dtypes kInferMask{ACL_BOOL, ACL_INT8, ACL_UINT8};

struct InferAttention {
  using Optional = std::optional<at::Tensor>;
  using Lengths = std::optional<std::vector<int64_t>>;

  at::Tensor query, key, value;
  std::string layout;
  int64_t heads = 1, key_heads = 1;
  double scale = 1;
  std::vector<int64_t> out_sizes;
  Optional pse = {}, mask = {};
  int64_t sparse_mode = 0, pre_tokens = 0, next_tokens = 0;
  // The ends of packed sequences; for keys in a cache their numbers.
  Lengths query_lengths = {}, key_lengths = {};
  Optional block_table = {};
  // The padding behind right-aligned sequences.
  Optional query_padding = {}, key_padding = {};
  // A prefix of keys and values that every batch shares.
  Optional key_prefix = {}, value_prefix = {};
  Lengths prefix_length = {};
  // The rotary part of query and key, beyond D.
  Optional query_rope = {}, key_rope = {};
  // The scales of int8 keys and values, for each channel or for each token.
  Optional key_scale = {}, value_scale = {};
  int64_t scale_mode = 0;
  Optional query_scale = {};
  int64_t query_mode = 0;
  Optional sinks = {};
  // The log-sum-exp of rows without keys.
  float log_sum_exp_without_keys = std::numeric_limits<float>::infinity();
};

// The output, and the log of the sum of exp(score) as (B, N, S, 1), or (T, N, 1) of packed
// sequences. In rows without keys the output is 0. Positions that belong to no
// sequence are such rows.
torch::jit::Stack infer_attention(const InferAttention& arguments);

bool is_packed(std::string_view layout);
// A view as (B, N, S, D); of packed sequences, as (1, N, T, D).
at::Tensor heads_first(const at::Tensor& x, std::string_view layout, int64_t heads);

// The arguments of a call, by the names that the three functions share.
InferAttention arguments_of(const Call& call);

}  // namespace cann_sim

// FlashAttentionScore and its gradient: attention of every query over all keys that a mask keeps,
// for training.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace ascend_attn {

// The keyword arguments, which both operators share.
struct FlashAttentionOptions {
  c10::SymInt num_heads;
  std::string_view layout;
  const std::optional<at::Tensor>& pse_shift;
  const std::optional<at::Tensor>& drop_mask;
  const std::optional<at::Tensor>& atten_mask;
  at::OptionalSymIntArrayRef prefix;
  at::OptionalSymIntArrayRef actual_seq_lengths_query;
  at::OptionalSymIntArrayRef actual_seq_lengths_key;
  at::OptionalSymIntArrayRef q_start_idx;
  at::OptionalSymIntArrayRef kv_start_idx;
  double scale_value;
  double keep_prob;
  int64_t pre_tokens;
  int64_t next_tokens;
  int64_t inner_precise;
  int64_t sparse_mode;
  int64_t pse_type;
};

template <typename Outputs, typename... Tensors>
using FlashAttentionSignature = Outputs(
    Tensors..., c10::SymInt, std::string_view, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, at::OptionalSymIntArrayRef,
    at::OptionalSymIntArrayRef, at::OptionalSymIntArrayRef, at::OptionalSymIntArrayRef,
    at::OptionalSymIntArrayRef, double, double, int64_t, int64_t, int64_t, int64_t, int64_t);

struct FlashAttentionScore {
  static constexpr const char* name = "flash_attention_score";
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, softmax_max, softmax_sum
  using Signature =
      FlashAttentionSignature<Outputs, const at::Tensor&, const at::Tensor&, const at::Tensor&>;

  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  FlashAttentionOptions options;

  Outputs check_and_allocate() const;
};

// The arguments of both gradient operators.
template <typename Outputs>
using FlashAttentionGradSignature =
    FlashAttentionSignature<Outputs, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&>;

struct FlashAttentionGradArguments {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& dy;
  const at::Tensor& softmax_max;
  const at::Tensor& softmax_sum;
  const at::Tensor& attention_in;
  FlashAttentionOptions options;
};

struct FlashAttentionScoreGrad : FlashAttentionGradArguments {
  static constexpr const char* name = "flash_attention_score_grad";
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv
  using Signature = FlashAttentionGradSignature<Outputs>;

  Outputs check_and_allocate() const;
};

// The gradient of pse_shift, which the device's function does not compute: on the CPU, for autograd
// alone.
struct FlashAttentionPseGrad : FlashAttentionGradArguments {
  static constexpr const char* name = "_flash_attention_score_pse_grad";
  using Outputs = std::tuple<at::Tensor>;
  using Signature = FlashAttentionGradSignature<Outputs>;

  Outputs check_and_allocate() const;
};

// Whether `pse_shift`, of queries and keys of these lengths, has the form of 1024 rows that stands
// for values which depend on the distance alone.
bool is_compressed_pse(const at::Tensor& pse_shift, const c10::SymInt& queries,
                       const c10::SymInt& keys);

}  // namespace ascend_attn

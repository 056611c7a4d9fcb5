// FlashAttentionScore and its gradients: attention over all keys that the mask keeps, for training.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "core/text.h"
#include "dispatch/arguments.h"
#include "dispatch/outputs.h"

namespace ascend_attn {

class AutogradContext;
struct OperatorLimits;

// Keyword arguments shared by the forward operator and its gradients.
struct FlashAttentionOptions {
  static constexpr bool is_argument_group = true;

  c10::SymInt num_heads;
  LayoutArgument layout;
  std::optional<at::Tensor> pse_shift, drop_mask, atten_mask;
  OptionalIntListField prefix, actual_seq_lengths_query, actual_seq_lengths_key;
  OptionalIntListField q_start_idx, kv_start_idx;
  double scale_value, keep_prob;
  int64_t pre_tokens, next_tokens, inner_precise, sparse_mode, pse_type;
};

inline constexpr char kFlashAttentionKeywords[] =
    "SymInt num_heads, str layout, Tensor? pse_shift=None, Tensor? drop_mask=None, "
    "Tensor? atten_mask=None, SymInt[]? prefix=None, SymInt[]? actual_seq_lengths_query=None, "
    "SymInt[]? actual_seq_lengths_key=None, SymInt[]? q_start_idx=None, "
    "SymInt[]? kv_start_idx=None, float scale_value, float keep_prob=1.0, "
    "int pre_tokens=2147483647, int next_tokens=2147483647, int inner_precise=0, "
    "int sparse_mode=0, int pse_type=1";

// Keyword arguments that came later, and stand last for the sake of older calls and saved graphs.
struct SinkAndRopes {
  static constexpr bool is_argument_group = true;

  std::optional<at::Tensor> sink, query_rope, key_rope;

  bool given() const { return sink || query_rope || key_rope; }
};

inline constexpr char kSinkAndRopesKeywords[] =
    ", Tensor? sink=None, Tensor? query_rope=None, Tensor? key_rope=None";

struct FlashAttentionScore {
  static constexpr const char* name = "flash_attention_score";
  static constexpr auto schema =
      join("(Tensor query, Tensor key, Tensor value, *, ", kFlashAttentionKeywords,
           kSinkAndRopesKeywords, ") -> (Tensor out, Tensor softmax_max, Tensor softmax_sum)");
  static constexpr std::array functions{
      "aclnnFlashAttentionScoreV2", "aclnnFlashAttentionVarLenScoreV2",
      // With a sink or ropes: in layout TND and in the others, and on Ascend 950.
      "aclnnFlashAttentionVarLenScoreV5", "aclnnFlashAttentionScoreV3",
      "aclnnFlashAttentionScoreV4"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, softmax_max, softmax_sum

  at::Tensor query, key, value;
  FlashAttentionOptions options;
  SinkAndRopes extra;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;

  bool differentiable() const;
  void save(AutogradContext& context, const Outputs& outputs) const;
  static std::vector<at::Tensor> backward(AutogradContext& context,
                                          const std::vector<at::Tensor>& d_outputs);
};

struct FlashAttentionGradArguments {
  at::Tensor query, key, value, dy, softmax_max, softmax_sum, attention_in;
  FlashAttentionOptions options;
};

inline constexpr char kFlashAttentionGradTensors[] =
    "(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor softmax_max, "
    "Tensor softmax_sum, Tensor attention_in, *, ";

struct FlashAttentionScoreGrad : FlashAttentionGradArguments {
  static constexpr const char* name = "flash_attention_score_grad";
  static constexpr auto schema = join(kFlashAttentionGradTensors, kFlashAttentionKeywords,
                                      ") -> (Tensor dq, Tensor dk, Tensor dv)");
  static constexpr std::array functions{"aclnnFlashAttentionScoreGradV2",
                                        "aclnnFlashAttentionUnpaddingScoreGradV2"};
  static const OperatorLimits limits;
  using Fields = FlashAttentionGradArguments;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv
  // Only a graph's replay writes to given tensors, by `relaunch`.
  static constexpr bool has_out_overload = false;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
};

// Arguments of the gradient operators below, which autograd alone calls.
struct FlashAttentionExtendedGradArguments {
  at::Tensor query, key, value, dy, softmax_max, softmax_sum, attention_in;
  FlashAttentionOptions options;
  SinkAndRopes extra;

  FlashAttentionGradArguments without_extra() const {
    return {query, key, value, dy, softmax_max, softmax_sum, attention_in, options};
  }
};

// The gradient of calls with a sink or with ropes.
struct FlashAttentionScoreExtendedGrad : FlashAttentionExtendedGradArguments {
  static constexpr const char* name = "_flash_attention_score_extended_grad";
  static constexpr auto schema =
      join(kFlashAttentionGradTensors, kFlashAttentionKeywords, kSinkAndRopesKeywords,
           ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dq_rope, Tensor dk_rope)");
  static constexpr std::array functions{"aclnnFlashAttentionUnpaddingScoreGradV5",
                                        "aclnnFlashAttentionScoreGradV3",
                                        "aclnnFlashAttentionScoreGradV4"};
  static constexpr const OperatorLimits& limits = FlashAttentionScoreGrad::limits;
  using Fields = FlashAttentionExtendedGradArguments;
  // dq, dk, dv, dsink, dq_rope, dk_rope; the gradient of an absent tensor has shape (0).
  using Outputs =
      std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  static constexpr bool has_out_overload = false;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
};

// The gradient of pse_shift, which the device's function does not compute. CPU only.
struct FlashAttentionPseGrad : FlashAttentionExtendedGradArguments {
  static constexpr const char* name = "_flash_attention_score_pse_grad";
  static constexpr auto schema = join(kFlashAttentionGradTensors, kFlashAttentionKeywords,
                                      kSinkAndRopesKeywords, ") -> Tensor dpse");
  // No function of the device computes it, so it takes what the forward takes.
  static constexpr const OperatorLimits& limits = FlashAttentionScore::limits;
  using Fields = FlashAttentionExtendedGradArguments;
  using Outputs = std::tuple<at::Tensor>;  // dpse

  Outputs check_and_allocate() const;
};

// Each row of the softmax statistics repeats its value this many times, as on the device.
inline constexpr int64_t kStatisticsLanes = 8;

// Returns whether slopes or a mask of a pack have a row for each of several sequences. A 0 that
// closes the lists would need a row too.
bool has_row_per_sequence(const FlashAttentionOptions& options);

// The number of rows in the compressed form of pse_shift.
inline constexpr int64_t kCompressedPseRows = 1024;

// Returns whether `pse_shift`, for queries and keys of these lengths, has the compressed form. Its
// values depend only on the distance between query and key.
bool is_compressed_pse(const at::Tensor& pse_shift, const c10::SymInt& queries,
                       const c10::SymInt& keys);

}  // namespace ascend_attn

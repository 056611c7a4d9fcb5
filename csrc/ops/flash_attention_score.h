// FlashAttentionScore and its gradients: attention over all keys that the mask keeps, for training.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "core/sparse_mode.h"
#include "core/text.h"
#include "dispatch/arguments.h"
#include "dispatch/outputs.h"
#include "ops/dense_defaults.h"

namespace ascend_attn {

struct OperatorLimits;

// Keyword arguments shared by the forward operator and its gradients.
struct FlashAttentionOptions {
  static constexpr bool is_argument_group = true;

  std::optional<c10::SymInt> num_heads;
  LayoutArgument layout;
  std::optional<at::Tensor> pse_shift, drop_mask, atten_mask;
  Lengths prefix, actual_seq_lengths_query, actual_seq_lengths_key;
  OptionalIntListField q_start_idx, kv_start_idx;
  std::optional<double> scale_value;
  double keep_prob;
  int64_t pre_tokens, next_tokens, inner_precise, sparse_mode, pse_type;

  // Whether the sparse_mode excludes keys: a compressed mask, which the modes other than 0, 1 and 5
  // read, may be absent.
  bool masked() const {
    return atten_mask || has_compressed_mask(static_cast<SparseMode>(sparse_mode));
  }
  // Whether batches use only their first tokens, in a layout other than TND.
  bool padded() const {
    return layout != Layout::TND &&
           (actual_seq_lengths_query.given() || actual_seq_lengths_key.given());
  }
  // With the defaults of a call, these are given.
  const c10::SymInt& heads() const { return *num_heads; }
  double scale() const { return *scale_value; }
  bool lacks_defaults() const { return !num_heads || !scale_value; }

  // Returns the first of a list of start indices; none if it is absent, or not known yet.
  static std::optional<int64_t> first_of(const OptionalIntListField& starts) {
    return starts && !starts->empty() ? (*starts)[0].maybe_as_int() : std::nullopt;
  }
};

inline constexpr char kFlashAttentionKeywords[] =
    "SymInt? num_heads=None, str layout, Tensor? pse_shift=None, Tensor? drop_mask=None, "
    "Tensor? atten_mask=None, Tensor? prefix=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, SymInt[]? q_start_idx=None, "
    "SymInt[]? kv_start_idx=None, float? scale_value=None, float keep_prob=1.0, "
    "int pre_tokens=2147483647, int next_tokens=2147483647, int inner_precise=0, "
    "int sparse_mode=0, int pse_type=1";

// Keyword arguments that came later, and stand last for the sake of older calls and saved graphs.
struct SinkAndRopes {
  static constexpr bool is_argument_group = true;

  std::optional<at::Tensor> sink, query_rope, key_rope;

  bool given() const { return sink || query_rope || key_rope; }
};

// Returns a call, forward or backward, with the defaults that depend on its tensors.
template <typename Op>
Op with_attention_defaults(const Op& op) {
  auto complete = op;
  std::optional<at::Tensor> query_rope;
  if constexpr (requires { op.extra; }) {
    query_rope = op.extra.query_rope;
  }
  auto& options = complete.options;
  add_dense_defaults(Op::name, options.layout.parsed(), op.query, query_rope, options.num_heads,
                     options.scale_value);
  return complete;
}

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
  bool lacks_defaults() const { return options.lacks_defaults(); }
  FlashAttentionScore with_defaults() const { return with_attention_defaults(*this); }

  bool differentiable() const;
  // The log-sum-exp is softmax_max + log(softmax_sum): the sum carries all of its gradient.
  static constexpr std::array<size_t, 1> constant_outputs() { return {1}; }
  void save(AutogradContext& context, const Outputs& outputs) const;
  static std::vector<at::Tensor> backward(AutogradContext& context,
                                          const std::vector<at::Tensor>& d_outputs);
};

struct FlashAttentionGradArguments {
  at::Tensor query, key, value;
  std::optional<at::Tensor> dy;
  at::Tensor softmax_max, softmax_sum, attention_in;
  FlashAttentionOptions options;
  std::optional<at::Tensor> d_softmax_sum;
};

// The gradient of softmax_sum, which carries that of the log-sum-exp: softmax_max is a constant.
inline constexpr char kGradOfStatistics[] = ", Tensor? d_softmax_sum=None";

inline constexpr char kFlashAttentionGradTensors[] =
    "(Tensor query, Tensor key, Tensor value, Tensor? dy, Tensor softmax_max, "
    "Tensor softmax_sum, Tensor attention_in, *, ";

struct FlashAttentionScoreGrad : FlashAttentionGradArguments {
  static constexpr const char* name = "flash_attention_score_grad";
  static constexpr auto schema = join(kFlashAttentionGradTensors, kFlashAttentionKeywords,
                                      kGradOfStatistics, ") -> (Tensor dq, Tensor dk, Tensor dv)");
  static constexpr std::array functions{"aclnnFlashAttentionScoreGradV2",
                                        "aclnnFlashAttentionUnpaddingScoreGradV2"};
  static const OperatorLimits limits;
  using Fields = FlashAttentionGradArguments;
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
  bool lacks_defaults() const { return options.lacks_defaults(); }
  FlashAttentionScoreGrad with_defaults() const { return with_attention_defaults(*this); }
};

// Arguments of the gradient operator that autograd calls for a sink, ropes, or a bias that wants
// its gradient.
struct FlashAttentionExtendedGradArguments {
  at::Tensor query, key, value;
  std::optional<at::Tensor> dy;
  at::Tensor softmax_max, softmax_sum, attention_in;
  FlashAttentionOptions options;
  SinkAndRopes extra;
  std::optional<at::Tensor> d_softmax_sum;
  // Whether pse_shift gets its gradient, which the device's functions do not compute: CPU only.
  bool pse_grad;

  FlashAttentionGradArguments without_extra() const {
    return {query, key, value, dy, softmax_max, softmax_sum, attention_in, options, d_softmax_sum};
  }
};

struct FlashAttentionScoreExtendedGrad : FlashAttentionExtendedGradArguments {
  static constexpr const char* name = "_flash_attention_score_extended_grad";
  static constexpr auto schema = join(
      kFlashAttentionGradTensors, kFlashAttentionKeywords, kSinkAndRopesKeywords, kGradOfStatistics,
      ", bool pse_grad=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor "
      "dq_rope, Tensor dk_rope, Tensor dpse)");
  static constexpr std::array functions{"aclnnFlashAttentionUnpaddingScoreGradV5",
                                        "aclnnFlashAttentionScoreGradV3",
                                        "aclnnFlashAttentionScoreGradV4"};
  static constexpr const OperatorLimits& limits = FlashAttentionScoreGrad::limits;
  using Fields = FlashAttentionExtendedGradArguments;
  // dq, dk, dv, dsink, dq_rope, dk_rope, dpse; one that is not computed has shape (0).
  using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor>;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
  bool lacks_defaults() const { return options.lacks_defaults(); }
  FlashAttentionScoreExtendedGrad with_defaults() const { return with_attention_defaults(*this); }
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

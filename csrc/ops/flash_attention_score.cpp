#include "ops/flash_attention_score.h"

#include "core/error.h"
#include "core/symbolic.h"
#include "ops/flash_attention_score_rules.h"

namespace ascend_attn {
namespace {

// Token counts may be 0: empty sequences have rules of their own.
const std::vector<Dtypes> kDtypes{
    {on(Product::A2, Product::A3, Product::P950), {at::kHalf, at::kBFloat16, at::kFloat}}};
const std::vector<Limit> kLimits{
    {"B", "batch size", {.min = 0, .max = 2 * 1024 * 1024}},
    {"prefix", "batch size with prefix", {.min = 1, .max = 2048}},
    {"sequences", "of a pack, its closing 0, or a padded batch", {.min = 0, .max = kMostSequences}},
    {"sequences with prefix", "of the same in sparse_mode 6", {.min = 0, .max = 1000}},
    {"N", "query heads", {.min = 1, .max = 256}},
    {"S", "tokens per sequence", {.min = 0, .max = 1024 * 1024}},
    {"T", "tokens of all sequences", {.min = 0, .max = 1024 * 1024}}};
// Rules of both directions.
const std::vector<Rule> kCommonRules{
    kPseOfTypeZero, kCausalTokens,  kBandPreTokens,     kQueriesOfMode7, kBandOfMode7,
    kSlopesOfMode7, kSlopesOfMode8, kSlopesOfMode8Band, kSlopesOn950,    kKeysOn950};

std::vector<Limit> with_head_size(std::vector<Limit> limits) {
  limits.push_back({"D", "head size", {.min = 1, .max = 768}});
  return limits;
}

std::vector<Rule> with_common(std::vector<Rule> rules) {
  rules.insert(rules.end(), kCommonRules.begin(), kCommonRules.end());
  return rules;
}

template <typename Op>
FlashAttentionRules check_dense_call(const Op& op) {
  FlashAttentionRules rules(op);
  if constexpr (requires { op.extra; }) {
    rules.check_extra(op.extra);
  }
  rules.check_scores();
  rules.check_mask();
  rules.check_dropout();
  return rules;
}

template <typename Op>
void check_grad(const Op& op) {
  const auto rules = check_dense_call(op);
  check_some_gradient(Op::name, {"dy", op.dy}, {"d_softmax_sum", op.d_softmax_sum});
  if (op.dy) {
    rules.check_like_out({"dy", *op.dy});
  }
  rules.check_statistics({"softmax_max", op.softmax_max});
  rules.check_statistics({"softmax_sum", op.softmax_sum});
  rules.check_like_out({"attention_in", op.attention_in});
  if (op.d_softmax_sum) {
    rules.check_statistics({"d_softmax_sum", *op.d_softmax_sum});
  }
}

}  // namespace

// The device limits the head size of the forward alone.
const OperatorLimits FlashAttentionScore::limits{
    name, functions, kDtypes, with_head_size(kLimits),
    with_common({kPaddedPack, kQueriesOfMode3, kBandPreTokensOn950, kBandNextTokensOn950})};
const OperatorLimits FlashAttentionScoreGrad::limits{
    name, functions, kDtypes, kLimits,
    with_common({kTokensOfGradient, kTokensOfPackedGradient, kPsePerKeyOfGradient, kDropoutOn950})};

FlashAttentionScore::Outputs FlashAttentionScore::check_and_allocate(OutputSource outputs) const {
  const auto rules = check_dense_call(*this);
  rules.check_head_size();
  return {rules.out(outputs), rules.statistics(outputs), rules.statistics(outputs)};
}

FlashAttentionScoreGrad::Outputs FlashAttentionScoreGrad::check_and_allocate(
    OutputSource outputs) const {
  check_grad(*this);
  return {outputs.tensor_like(query), outputs.tensor_like(key), outputs.tensor_like(value)};
}

FlashAttentionScoreExtendedGrad::Outputs FlashAttentionScoreExtendedGrad::check_and_allocate(
    OutputSource outputs) const {
  check_grad(*this);
  check_implemented(!pse_grad || (options.pse_shift && options.pse_type <= 1), name, "pse_type",
                    "expected 0 or 1, whose pse_shift has a gradient, got ", options.pse_type);
  const auto like_or_empty = [&](const std::optional<at::Tensor>& given) {
    return given ? outputs.tensor_like(*given) : outputs.tensor({0}, query.options());
  };
  // The sink's gradient is that of a statistic, whatever the dtype of the sink.
  const c10::SymInt sinks = extra.sink ? options.heads() : c10::SymInt(0);
  return {outputs.tensor_like(query),
          outputs.tensor_like(key),
          outputs.tensor_like(value),
          outputs.tensor({sinks}, softmax_max.options()),
          like_or_empty(extra.query_rope),
          like_or_empty(extra.key_rope),
          like_or_empty(pse_grad ? options.pse_shift : std::nullopt)};
}

bool has_row_per_sequence(const FlashAttentionOptions& options) {
  const auto has_rows = [](const std::optional<at::Tensor>& tensor, int64_t rank) {
    return tensor && tensor->dim() == rank && tensor->sym_size(0) > 1;
  };
  return has_rows(options.pse_shift, 2) || has_rows(options.atten_mask, 4);
}

bool is_compressed_pse(const at::Tensor& pse_shift, const c10::SymInt& queries,
                       const c10::SymInt& keys) {
  if (pse_shift.dim() != 4 || !known_equal(pse_shift.sym_size(2), kCompressedPseRows) ||
      !known_equal(queries, keys)) {
    return false;
  }
  const auto longer = queries.sym_gt(kCompressedPseRows);
  return longer.has_hint() && longer.guard_bool(__FILE__, __LINE__);
}

}  // namespace ascend_attn

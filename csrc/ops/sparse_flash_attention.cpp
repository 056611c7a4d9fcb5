#include "ops/sparse_flash_attention.h"

#include "core/determinism.h"
#include "core/error.h"
#include "ops/sparse_rules.h"

namespace ascend_attn {
namespace {

// The device takes 2 and 4 as well, and computes rows wrong whose keys end within such a block.
constexpr Limit kBlockSize{
    "sparse_block_size", "keys per block", {.one_of = {1, 8, 16, 32, 64, 128}}, kA2A3};
constexpr Limit kBlockSizeOf950{"sparse_block_size", "keys per block", {.one_of = {1}}, k950};
constexpr Rule kWholePages{"sparse_block_size", "a divisor of block_size"};
// With fewer, the kernel of the gradient copies beyond a core's memory.
constexpr Rule kSelectionOfLargestBlocks{"sparse_indices",
                                         "K of at least 8 for sparse_block_size 128", kA2A3};
constexpr Rule kNoDeterminism{"deterministic",
                              "False or torch.use_deterministic_algorithms(True, warn_only=True)",
                              kA2A3.before(Cann::v9_0)};

at::Tensor new_like_or_empty(const std::optional<at::Tensor>& like, const at::Tensor& query) {
  return like ? new_like(*like) : new_tensor({0}, query.options());
}

// Checks shared by the forward operator and its gradient.
template <typename Op>
SparseRules check_sparse_call(const Op& op, const KeyPages* pages = nullptr) {
  SparseRules rules(Op::limits, op.options.layout, {"query", op.query}, {"key", op.key}, pages,
                    {.layout = "layout_kv"});
  if (pages && pages->given()) {
    rules.check_indices_of_keys();
  }
  rules.check_same_dtype({"value", op.value});
  rules.check_like_key({"value", op.value}, rules.head_size());
  rules.check_sparse_indices({"sparse_indices", op.sparse_indices});
  rules.check_ropes({"query_rope", op.options.query_rope}, {"key_rope", op.options.key_rope});
  rules.check_lengths(op.options.actual_seq_lengths_query, op.options.actual_seq_lengths_key);
  rules.check_sparse_mode(op.options.sparse_mode, {0, 3});
  check_scale_value(Op::name, op.options.scale_value);
  check_value(op.options.sparse_block_size >= 1, Op::name, "sparse_block_size",
              "expected a positive number of keys per block, got ", op.options.sparse_block_size);
  const auto& device_limits = rules.limits();
  device_limits.size("query", "N1", rules.heads());
  device_limits.size("query", "D", rules.head_size());
  device_limits.size("sparse_block_size", "sparse_block_size", op.options.sparse_block_size);
  const auto count = op.sparse_indices.sym_sizes().back();
  device_limits.rule(kSelection, count.maybe_as_int() != 0, count);
  return rules;
}

}  // namespace

const OperatorLimits SparseFlashAttention::limits{
    name,
    functions,
    sparse_dtypes(),
    {kAttentionHeads,
     {"N1", "query heads", {.min = 1, .max = 128}, k950},
     kHeadDim,
     kRopeDim,
     kBlockSize,
     kBlockSizeOf950,
     kPageSize,
     kPreTokens,
     kNextTokens},
    {kNotEmpty, kSelection, kWholePages}};

const OperatorLimits SparseFlashAttentionGrad::limits{
    name,
    functions,
    sparse_dtypes(),
    {kAttentionHeads,
     {"N1", "query heads", {.one_of = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128}}, k950},
     kHeadDim,
     kRopeDim,
     {"K", "selected keys or blocks per token", {.one_of = {2048}}, kA2A3.before(Cann::v9_0)},
     {"K", "selected keys per token", {.min = 1024, .max = 8192, .multiple_of = 1024}, k950},
     kBlockSize,
     kBlockSizeOf950},
    {kNotEmpty, kSelection, kSelectionOfLargestBlocks, kNoDeterminism}};

SparseFlashAttention::Outputs SparseFlashAttention::check_and_allocate() const {
  const auto rules = check_sparse_call(*this, &pages);
  const auto& device_limits = rules.limits();
  const auto block_size = key.sym_size(1).maybe_as_int();
  device_limits.rule(kWholePages,
                     !pages.given() || !block_size || *block_size % options.sparse_block_size == 0,
                     options.sparse_block_size);
  device_limits.size("pre_tokens", "pre_tokens", options.pre_tokens);
  device_limits.size("next_tokens", "next_tokens", options.next_tokens);
  const auto statistics =
      return_softmax_lse ? rules.statistics_sizes() : c10::SymDimVector{c10::SymInt(0)};
  const auto statistics_options = query.options().dtype(statistics_dtype(query));
  return {new_like(query), new_tensor(statistics, statistics_options),
          new_tensor(statistics, statistics_options)};
}

SparseFlashAttentionGrad::Outputs SparseFlashAttentionGrad::check_and_allocate() const {
  const auto rules = check_sparse_call(*this);
  const auto check_like_out = [&](NamedTensor argument) {
    rules.check_same_dtype(argument);
    rules.check_like_query(argument, rules.heads(), rules.head_size());
  };
  check_some_gradient(name, {"d_out", d_out}, {"d_softmax_sum", d_softmax_sum});
  if (d_out) {
    check_like_out({"d_out", *d_out});
  }
  check_like_out({"out", out});
  rules.check_statistics({"softmax_max", softmax_max});
  rules.check_statistics({"softmax_sum", softmax_sum});
  if (d_softmax_sum) {
    rules.check_statistics({"d_softmax_sum", *d_softmax_sum});
  }
  const auto& device_limits = rules.limits();
  const auto count = sparse_indices.sym_size(-1);
  device_limits.size("sparse_indices", "K", count);
  constexpr int64_t kLargestBlock = 128;
  constexpr int64_t kLeastSelection = 8;
  device_limits.rule(kSelectionOfLargestBlocks,
                     options.sparse_block_size < kLargestBlock ||
                         count.maybe_as_int().value_or(kLeastSelection) >= kLeastSelection,
                     count);
  device_limits.rule(kNoDeterminism,
                     !is_deterministic(options.deterministic) ||
                         at::globalContext().deterministicAlgorithmsWarnOnly(),
                     "True");
  return {new_like(query), new_like(key), new_like(value),
          new_like_or_empty(options.query_rope, query), new_like_or_empty(options.key_rope, query)};
}

}  // namespace ascend_attn

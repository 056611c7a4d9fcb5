// Argument checks shared by the sparse operators: BSND or TND tensors over one batch of sequences,
// with a single key/value head.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/DimVector.h>

#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "core/device_limits.h"
#include "core/layout.h"
#include "core/lengths.h"
#include "core/tensor_checks.h"
#include "ops/key_pages.h"

namespace ascend_attn {

// Limits and rules shared by the sparse operators.
inline constexpr Limit kHeadDim{"D", "head size without rope", {.one_of = {512}}};
inline constexpr Limit kRopeDim{"Dr", "head size of the rope part", {.one_of = {64}}};
inline constexpr Limit kIndexDim{"Didx", "head size of the indexer", {.one_of = {128}}};
// sparse_mode alone says which keys are visible. The device refuses other values
// of these.
inline constexpr Limit kPreTokens{
    "pre_tokens", "earlier keys that a query sees", {.one_of = {INT64_MAX}}};
inline constexpr Limit kNextTokens{
    "next_tokens", "later keys that a query sees", {.one_of = {INT64_MAX}}};
inline constexpr Limit kPageSize{
    "block_size", "rows per block of the cache", {.min = 16, .max = 1024, .multiple_of = 16}};
inline constexpr Limit kAttentionHeads{
    "N1", "query heads", {.one_of = {1, 2, 4, 8, 16, 32, 64, 128}}, kA2A3};
inline constexpr Rule kNotEmpty{"query",
                                "at least one sequence, one query token and one key token"};
inline constexpr Rule kSelection{"sparse_indices", "at least one key or block per token"};
// For weights, which are float32 elsewhere, too.
constexpr Rule weights_like_query(Devices devices) {
  return {"weights", "query's dtype", devices, Violation::type};
}

// Half-precision inputs on A2 and A3, and with CANN 9.1 on Ascend 950.
std::vector<Dtypes> sparse_dtypes();

// How an operator names the arguments of keys, and what differs in these.
struct KeyNames {
  std::string_view layout = "layout_key";
  std::string_view table = "block_table";
  std::string_view lengths = "actual_seq_lengths_key";
  bool may_be_empty = false;  // within the limits of a device, too, which gets no such call
  bool int8 = false;          // query and key are quantised
  // For keys in int8. Rows of others have query's dtype and size.
  std::optional<c10::SymInt> bytes_of_row = std::nullopt;
};

// Checks one call of a sparse operator. Every method raises on the first violated rule.
class SparseRules {
 public:
  // `query` and `key` determine the device, dtype, token axes and number of heads that the other
  // arguments must match. Null pages are those of an operator whose keys are never paged.
  SparseRules(const OperatorLimits& limits, const LayoutArgument& layout, NamedTensor query,
              NamedTensor key, const KeyPages* pages = nullptr, KeyNames names = {});

  Layout layout() const { return layout_; }
  const DeviceLimits& limits() const { return limits_; }
  const c10::SymInt& heads() const { return heads_; }
  // The last axis of query.
  const c10::SymInt& head_size() const { return head_size_; }

  void check_same_device(NamedTensor argument) const;
  // Expects query's dtype.
  void check_same_dtype(NamedTensor argument) const;
  // Expects query's dtype, or fp16 for int8 queries; or fp32.
  void check_weights_dtype(NamedTensor argument) const;
  // Expects (B, S1, heads, size) or (T1, heads, size).
  void check_like_query(NamedTensor argument, const c10::SymInt& heads,
                        const c10::SymInt& size) const;
  // Expects (B, S2, 1, size) or (T2, 1, size), or blocks of a cache, (num_blocks, block_size, 1,
  // size).
  void check_like_key(NamedTensor argument, const c10::SymInt& size) const;
  // Expects (B, S1, heads) or (T1, heads).
  void check_weights(NamedTensor argument, const c10::SymInt& heads) const;
  // Expects a factor for each key, in a dtype of weights: key's sizes without the last.
  void check_key_factors(NamedTensor argument) const;
  // Expects a factor for each token, (B, S1) or (T1): bool or floating point.
  void check_token_weight(NamedTensor argument) const;
  // Expects integers (B, S1, 1, K) or (T1, 1, K); the axis of heads may be missing.
  void check_sparse_indices(NamedTensor argument) const;
  // The same, with K of sparse_indices.
  void check_selected_values(NamedTensor argument, const at::Tensor& sparse_indices) const;
  // Expects softmax statistics (B, 1, S1, N1) or (1, T1, N1), in fp32, or fp64 for fp64 inputs.
  void check_statistics(NamedTensor argument) const;
  // Expects both ropes or neither: (..., N1, Dr) for query and (..., 1, Dr) for key.
  void check_ropes(NamedOptionalTensor query_rope, NamedOptionalTensor key_rope) const;
  // Expects no more keys than an index names, of an operator that selects them one by one.
  void check_indices_of_keys() const;
  // Checks how many keys an indexer selects, and from which.
  void check_selection(const c10::SymInt& count, int64_t pre_tokens, int64_t next_tokens) const;
  // Checks that there is a length for each sequence. TND requires both, and paged keys those of the
  // keys.
  void check_lengths(const Lengths& query_lengths, const Lengths& key_lengths) const;
  // Checks keys that each stand for `ratio` tokens. Without lengths the batches of BSND are alike,
  // so that a missing residual is known.
  void check_compression(int64_t ratio, NamedOptionalTensor residual, int64_t mode,
                         const Lengths& query_lengths, const Lengths& key_lengths) const;
  void check_sparse_mode(int64_t mode, std::initializer_list<int64_t> allowed) const;

  // (B, 1, S1, N1) or (1, T1, N1)
  c10::SymDimVector statistics_sizes() const;
  // (B, S1, 1, count) or (T1, 1, count)
  c10::SymDimVector selection_sizes(const c10::SymInt& count) const;

 private:
  void check_not_empty(const c10::SymInt& count) const;
  void check_key_layout(const KeyPages& pages) const;
  void check_block_table(const c10::SymInt& batch) const;
  c10::SymDimVector query_tokens_and(std::initializer_list<c10::SymInt> rest) const;

  std::string_view op_;
  Layout layout_;
  NamedTensor query_;
  NamedTensor key_;
  const KeyPages* pages_;  // null unless keys are paged
  KeyNames names_;
  DeviceLimits limits_;
  c10::SymInt heads_;
  c10::SymInt head_size_;
};

}  // namespace ascend_attn

// Sequence lengths: which tokens belong to which sequence.
//
// BSND takes one count per batch, at most S; absent means S. TND takes cumulative lengths
// (lengths 3, 2, 4 are given as 3, 5, 9), at most T; a repeated value is an empty sequence, and
// tokens past the last value belong to no sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <string_view>
#include <vector>

#include "core/layout.h"

namespace ascend_attn {

// Returns whether a list was passed. An empty one counts as missing: torch_npu passes those to
// aclnn.
inline bool given(at::OptionalSymIntArrayRef list) { return list.has_value() && !list->empty(); }

// One sequence: a span of query tokens and a span of key tokens.
struct Sequence {
  int64_t query_begin = 0;
  int64_t queries = 0;
  int64_t key_begin = 0;
  int64_t keys = 0;
  int64_t batch = 0;  // whose tokens are counted; where keys are paged, its row of the block table

  bool empty() const { return queries == 0 || keys == 0; }
};

// Checks a list of lengths on the host. Symbolic lengths are checked once they are known.
void check_sequence_lengths(std::string_view op, std::string_view argument, Layout layout,
                            c10::SymIntArrayRef lengths, const c10::SymInt& tokens);

// Checks lengths as PromptFlashAttention takes them: one count per batch, a single count for all
// batches, or a longer list of which only the first entries are used. An absent or empty list means
// all tokens.
void check_actual_lengths(std::string_view op, std::string_view argument,
                          at::OptionalSymIntArrayRef lengths, const c10::SymInt& batch,
                          const c10::SymInt& tokens);
c10::SymInt actual_length(at::OptionalSymIntArrayRef lengths, int64_t batch,
                          const c10::SymInt& tokens);

// Converts cumulative lengths to sequences. A 0 that closes a list, where an operator takes one,
// is an empty sequence.
std::vector<Sequence> packed_sequences(c10::ArrayRef<int64_t> query_ends,
                                       c10::ArrayRef<int64_t> key_ends);

// Returns the number of query-key pairs, the sum of queries * keys, or the largest number of 64
// bits if there are more.
int64_t pair_count(c10::ArrayRef<Sequence> sequences);

// Returns the values of a list, or nullopt if one of them is symbolic.
std::optional<std::vector<int64_t>> known_values(c10::SymIntArrayRef list);
// Returns the values of a list; raises if one of them is symbolic.
std::vector<int64_t> values_of(c10::SymIntArrayRef list);

inline constexpr std::string_view kKeyLengths = "actual_seq_lengths_key";

// Returns the sequences of a call, with tokens counted over the flattened (batch, sequence) axes.
// Lengths come as the operator takes them, as an int32 tensor or as a list. The values of a tensor
// are checked here; if a device has them, the host waits for it. `key_lengths` is the name of the
// argument lengths_key.
std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key,
                                     const std::optional<at::Tensor>& lengths_query,
                                     const std::optional<at::Tensor>& lengths_key,
                                     std::string_view key_lengths = kKeyLengths);
std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key,
                                     at::OptionalSymIntArrayRef lengths_query,
                                     at::OptionalSymIntArrayRef lengths_key);
// The same of a call with paged keys: whatever the layout of the queries is, the lengths of the
// keys are counts.
std::vector<Sequence> read_paged_sequences(std::string_view op, Layout layout,
                                           const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& block_table,
                                           const std::optional<at::Tensor>& lengths_query,
                                           const at::Tensor& lengths_key,
                                           std::string_view key_lengths = kKeyLengths);

}  // namespace ascend_attn

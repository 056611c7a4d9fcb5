// Sequence lengths: which tokens belong to which sequence.
//
// BSND takes one count per batch, at most S; absent means S. TND takes cumulative lengths
// (lengths 3, 2, 4 are given as 3, 5, 9), at most T; a repeated value is an empty sequence, and
// tokens past the last value belong to no sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/layout.h"
#include "core/lengths.h"

namespace ascend_attn {

// One sequence: a span of query tokens and a span of key tokens.
struct Sequence {
  int64_t query_begin = 0;
  int64_t queries = 0;
  int64_t key_begin = 0;
  int64_t keys = 0;
  int64_t batch = 0;  // whose tokens are counted; where keys are paged, its row of the block table

  bool empty() const { return queries == 0 || keys == 0; }
};

// Checks the values of lengths, where they and the number of tokens are known.
void check_sequence_lengths(std::string_view op, std::string_view argument, Layout layout,
                            c10::ArrayRef<int64_t> lengths, const c10::SymInt& tokens);
void check_sequence_lengths(std::string_view op, std::string_view argument, Layout layout,
                            const Lengths& lengths, const c10::SymInt& tokens);

// Checks lengths as PromptFlashAttention takes them: one count per batch, a single count for all
// batches, or a longer list of which only the first entries are used. Absent or empty ones mean all
// tokens.
void check_actual_lengths(std::string_view op, std::string_view argument, const Lengths& lengths,
                          const c10::SymInt& batch, const c10::SymInt& tokens);
// Returns the length of a batch; lengths must be known.
int64_t actual_length(const Lengths& lengths, int64_t batch, int64_t tokens);

// Converts cumulative lengths to sequences. A 0 that closes a list, where an operator takes one,
// is an empty sequence.
std::vector<Sequence> packed_sequences(c10::ArrayRef<int64_t> query_ends,
                                       c10::ArrayRef<int64_t> key_ends);
// Returns the sequences of a call of dense attention, with tokens counted within their batch, or
// within the pack. `paged`: the lengths of the keys are counts in every layout.
std::vector<Sequence> dense_sequences(Layout layout, int64_t batches, int64_t queries, int64_t keys,
                                      const Lengths& query_lengths, const Lengths& key_lengths,
                                      bool paged = false);

// Returns the largest number of queries, or of keys, of any sequence.
template <typename Sequences>
int64_t longest(const Sequences& sequences, int64_t Sequence::* tokens) {
  int64_t most = 0;
  for (const auto& sequence : sequences) {
    most = std::max(most, sequence.*tokens);
  }
  return most;
}
// The same of cumulative lengths, which a 0 may close.
int64_t longest(c10::ArrayRef<int64_t> ends);

// Returns the number of query-key pairs, the sum of queries * keys, or the largest number of 64
// bits if there are more.
int64_t pair_count(c10::ArrayRef<Sequence> sequences);

inline constexpr std::string_view kQueryLengths = "actual_seq_lengths_query";
inline constexpr std::string_view kKeyLengths = "actual_seq_lengths_key";

// Returns the sequences of a call, with tokens counted over the flattened (batch, sequence) axes.
// Checks the values of the lengths; if a device has them, the host waits for it. `key_lengths` is
// the name of the argument lengths_key.
std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key, const Lengths& lengths_query,
                                     const Lengths& lengths_key,
                                     std::string_view key_lengths = kKeyLengths);
// The same of a call with paged keys: whatever the layout of the queries is, the lengths of the
// keys are counts.
std::vector<Sequence> read_paged_sequences(std::string_view op, Layout layout,
                                           const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& block_table,
                                           const Lengths& lengths_query, const Lengths& lengths_key,
                                           std::string_view key_lengths = kKeyLengths);

}  // namespace ascend_attn

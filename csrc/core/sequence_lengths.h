// Which tokens belong to which sequence.
//
// BSND: lengths are counts per batch, at most S; absent means S. TND: inclusive prefix sums
// (lengths 3, 2, 4 are given as 3, 5, 9), at most T; a repeated value is an empty sequence and
// tokens beyond the last value belong to none.
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

// A missing list of integers may also be an empty one: torch_npu passes those to aclnn.
inline bool given(at::OptionalSymIntArrayRef list) { return list.has_value() && !list->empty(); }

// One sequence: a span of query tokens and a span of key tokens.
struct Sequence {
  int64_t query_begin = 0;
  int64_t queries = 0;
  int64_t key_begin = 0;
  int64_t keys = 0;

  bool empty() const { return queries == 0 || keys == 0; }
};

// The rules for a list of lengths on the host. Symbolic lengths are checked when they are known.
void check_sequence_lengths(std::string_view op, std::string_view argument, Layout layout,
                            c10::SymIntArrayRef lengths, const c10::SymInt& tokens);

// Lengths as PromptFlashAttention takes them: counts per batch, one for all batches, or more than
// batches, of which the first count; absent or empty means all tokens.
void check_actual_lengths(std::string_view op, std::string_view argument,
                          at::OptionalSymIntArrayRef lengths, const c10::SymInt& batch,
                          const c10::SymInt& tokens);
c10::SymInt actual_length(at::OptionalSymIntArrayRef lengths, int64_t batch,
                          const c10::SymInt& tokens);

// In BSND the gradients of the sparse operators ignore lengths on the device, so a forward call
// that wants a gradient must not have any.
void check_lengths_have_gradient(std::string_view op, const LayoutArgument& layout,
                                 const std::optional<at::Tensor>& lengths_query,
                                 const std::optional<at::Tensor>& lengths_key);

// The sequences that inclusive prefix sums describe.
std::vector<Sequence> packed_sequences(c10::ArrayRef<int64_t> query_ends,
                                       c10::ArrayRef<int64_t> key_ends);

// The sum of queries * keys.
int64_t pair_count(c10::ArrayRef<Sequence> sequences);

// The values of a list, unless one of them is symbolic.
std::optional<std::vector<int64_t>> known_values(c10::SymIntArrayRef list);

// The sequences of a call whose tensors are on the CPU, their tokens counted over the flattened
// (batch, sequence) axes; `lengths` as the operator takes them, as an int32 tensor or as a list.
// The values of a tensor are checked here, where they can be read.
std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key,
                                     const std::optional<at::Tensor>& lengths_query,
                                     const std::optional<at::Tensor>& lengths_key);
std::vector<Sequence> read_sequences(std::string_view op, Layout layout, const at::Tensor& query,
                                     const at::Tensor& key,
                                     at::OptionalSymIntArrayRef lengths_query,
                                     at::OptionalSymIntArrayRef lengths_key);

}  // namespace ascend_attn

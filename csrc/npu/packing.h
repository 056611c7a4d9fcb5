// A padded batch, layout BSND with lengths, for functions of CANN that ignore lengths there: its
// tokens without the padding, one sequence behind the other as in layout TND.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/layout.h"
#include "core/sequence_lengths.h"

namespace ascend_attn::aclnn {

// Reads the lengths of a call from the device, which it waits for; a graph that is being captured
// cannot. One of the two tensors may be missing in BSND.
std::vector<Sequence> sequences_on_host(const char* op, Layout layout, const at::Tensor& query,
                                        const at::Tensor& key, const Lengths& query_lengths,
                                        const Lengths& key_lengths);

class Packing {
 public:
  // Sequences of a call in BSND, whose query and key have these tokens per batch. Sequences
  // without queries or keys are dropped: they change no result, and some kernels divide by their
  // length.
  Packing(const std::vector<Sequence>& sequences, const at::Tensor& query, const at::Tensor& key);

  // Whether there is no padding: the call is one without lengths.
  bool complete() const { return complete_; }
  bool empty() const { return sequences_.empty(); }

  // (B, S1, ...) to (T1, ...), and (B, S2, ...) to (T2, ...).
  at::Tensor queries(const at::Tensor& padded) const;
  at::Tensor keys(const at::Tensor& padded) const;
  // (B,), a number of each batch, without those of sequences that are dropped.
  at::Tensor numbers(const at::Tensor& of_batches) const;
  // The way back, into a dense tensor that is zero.
  void unpack_queries(const at::Tensor& packed, const at::Tensor& to) const;
  void unpack_keys(const at::Tensor& packed, const at::Tensor& to) const;

  // The cumulative lengths, and as tensors on the device of `like`.
  const std::vector<int32_t>& query_ends() const { return query_ends_; }
  const std::vector<int32_t>& key_ends() const { return key_ends_; }
  at::Tensor query_ends(const at::Tensor& like) const;
  at::Tensor key_ends(const at::Tensor& like) const;

 private:
  std::vector<Sequence> sequences_;
  std::vector<int32_t> query_ends_, key_ends_;
  bool complete_ = true;
};

}  // namespace ascend_attn::aclnn

// A call of dense attention as the CPU kernels see it: every layout is strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/attention_mask.h"
#include "core/layout.h"
#include "cpu/common/rounding.h"
#include "cpu/common/token_rows.h"
#include "ops/flash_attention_score.h"
#include "ops/prompt_flash_attention.h"

namespace ascend_attn::cpu {

// One sequence: tokens [query_begin, query_begin + queries) of one batch of query, and so on.
struct AttentionSequence {
  int64_t index;  // among the sequences
  int64_t batch;  // of the tensors; 0 in layout TND, where all sequences share one
  int64_t query_begin;
  int64_t queries;
  int64_t key_begin;
  int64_t keys;
  int64_t rows_before;   // queries of the sequences before this one
  int64_t pairs_before;  // the sum of their queries * keys
  KeptKeys kept;
};

// Where pse_shift has the values of a row. The compressed form is that of 1024 rows.
struct PseAddress {
  enum class Form { strided, compressed, packed, packed_per_key };
  static PseAddress of(const at::Tensor& pse, const at::Tensor& query, const at::Tensor& key,
                       bool is_packed, const std::vector<AttentionSequence>& sequences);

  // The offset of key 0 in the row of a query.
  int64_t row(const AttentionSequence& sequence, int64_t head, int64_t query) const;

  Form form = Form::strided;
  int64_t heads = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
};

struct DenseAttention {
  DenseAttention(const char* op, const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value, const FlashAttentionOptions& options);
  explicit DenseAttention(const PromptFlashAttention& op);

  // A tensor of `heads` heads as (B, N, S, D), or (1, N, T, D).
  at::Tensor by_head(const at::Tensor& tensor, int64_t heads) const;
  // Query heads of a key head. Its rows are counted as token * group + head within the group.
  int64_t group() const { return heads / key_heads; }
  // Row (head, query) of what is stored as (B, N, Sq), or per sequence as (N, Sq).
  int64_t statistics_row(const AttentionSequence& sequence, int64_t head, int64_t query) const {
    return sequence.rows_before * heads + head * sequence.queries + query;
  }

  Layout layout;  // never BNSD_BSND, which is BNSD here
  int64_t heads, key_heads, size, value_size;
  double scale;
  // Rows over as many keys, or fewer, keep what rounding their weights to 16 bits would lose.
  int64_t few_keys = kFewKeys;
  at::Tensor query, key, value;  // by head, with dense rows
  std::vector<AttentionSequence> sequences;

  int64_t pse_type = 1;
  at::Tensor pse;  // dense rows, or (B | 1, N) slopes; undefined if absent
  PseAddress pse_address;
  int64_t distance_shift = 0;  // of keys against queries, for slopes

  // A full mask as (B, N, Sq, Skv), broadcast by strides, or larger; undefined if absent.
  at::Tensor mask;

  at::Tensor drop_mask;  // undefined if absent
  double keep_prob = 1;

 private:
  DenseAttention(Layout layout, int64_t heads, double scale, const at::Tensor& query,
                 const at::Tensor& key, const at::Tensor& value);
  void read_sequences(const FlashAttentionOptions& options);
  void read_pse(const char* op, const FlashAttentionOptions& options);
  void read_mask(const char* op, const FlashAttentionOptions& options);
  void use_full_mask(const at::Tensor& given);
};

// One head of one sequence of a tensor that is (B, N, S, D).
template <typename T>
class HeadRows {
 public:
  HeadRows(T* data, const at::Tensor& tensor, int64_t batch, int64_t head, int64_t begin)
      : data_(data + batch * tensor.stride(0) + head * tensor.stride(1) + begin * tensor.stride(2)),
        head_stride_(tensor.stride(1)),
        token_stride_(tensor.stride(2)) {}

  T* row(int64_t token, int64_t head = 0) const {
    return data_ + head * head_stride_ + token * token_stride_;
  }
  int64_t token_stride() const { return token_stride_; }

 private:
  T* data_;
  int64_t head_stride_;
  int64_t token_stride_;
};

template <typename T>
HeadRows<const T> query_rows(const at::Tensor& tensor, const AttentionSequence& sequence,
                             int64_t head) {
  return {tensor.const_data_ptr<T>(), tensor, sequence.batch, head, sequence.query_begin};
}
template <typename T>
HeadRows<const T> key_rows(const at::Tensor& tensor, const AttentionSequence& sequence,
                           int64_t head) {
  return {tensor.const_data_ptr<T>(), tensor, sequence.batch, head, sequence.key_begin};
}

// Zeroes what no sequence of layout TND owns: the tokens of `tensor` (T, ...) from `end` on.
void zero_tail(const at::Tensor& tensor, int64_t end);

}  // namespace ascend_attn::cpu

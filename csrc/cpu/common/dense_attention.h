// A call of dense attention as the CPU kernels see it: every layout becomes strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/layout.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/token_rows.h"
#include "ops/flash_attention_score.h"
#include "ops/fused_infer_attention_score.h"
#include "ops/prompt_flash_attention.h"

namespace ascend_attn::cpu {

// See in_place. Many packed keys do not stay in the caches, so that more rows read them in place.
inline constexpr int64_t kFewRows = 8;
inline constexpr int64_t kFewRowsOfManyKeys = 32;
inline constexpr int64_t kManyKeys = 256;

// One sequence. Its tokens are counted within its batch of the tensors.
struct DenseSequence : Sequence {
  int64_t index = 0;  // among the sequences
  // The queries and keys for which statistics and drop_mask have values in each head, with the
  // padding behind those of a padded batch.
  int64_t query_room = 0;
  int64_t key_room = 0;
  int64_t rows_before = 0;   // the sum of the queries of the sequences before this one
  int64_t pairs_before = 0;  // the sum of their queries * keys
  KeptKeys kept;
  const int32_t* blocks = nullptr;  // the pages of its keys; null if they are contiguous
};

// Locates the values of a row in pse_shift.
struct PseAddress {
  enum class Form { strided, compressed, packed, packed_per_key };
  static PseAddress of(const at::Tensor& pse, const at::Tensor& query, const at::Tensor& key,
                       bool is_packed, const std::vector<DenseSequence>& sequences);

  // Returns the offset of key 0 in the row of a query.
  int64_t row(const DenseSequence& sequence, int64_t head, int64_t query) const;

  Form form = Form::strided;
  int64_t heads = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
};

struct DenseAttention {
  // For FlashAttentionScore, or for the forward pass of one of its gradients.
  template <typename Op>
  explicit DenseAttention(const Op& op)
      : DenseAttention(Op::name, op.query, op.key, op.value, op.options) {
    if constexpr (requires { op.extra; }) {
      add(op.extra);
    }
  }
  explicit DenseAttention(const PromptFlashAttention& op);
  explicit DenseAttention(const FusedInferAttentionScore& op);

  // Views a tensor of `heads` heads as (B, N, S, D), or (1, N, T, D).
  at::Tensor by_head(const at::Tensor& tensor, int64_t heads) const {
    return by_head(layout, tensor, heads);
  }
  static at::Tensor by_head(Layout layout, const at::Tensor& tensor, int64_t heads);
  // Multiplies query or an output, by head, with a scale for each channel of its key heads.
  at::Tensor times_channels(const at::Tensor& by_head, const at::Tensor& scale) const;
  // Fills the rows of an output by head that are behind the valid length of their batch: those of
  // queries, or of keys.
  void fill_padding(const at::Tensor& output, const at::Scalar& value,
                    int64_t Sequence::* tokens = &Sequence::queries) const;
  // Query heads per key head. Rows of a key head are numbered token * group + head within the
  // group.
  int64_t group() const { return heads / key_heads; }
  // Returns the index of row (head, query) in statistics stored as (B, N, Sq), or as (N, Sq) per
  // sequence.
  int64_t statistics_row(const DenseSequence& sequence, int64_t head, int64_t query) const {
    return sequence.rows_before * heads + head * sequence.query_room + query;
  }

  // Returns whether the rows of a sequence read their keys in place: a few for each key head, or a
  // single one where bfloat16 matrices are multiplied as they are. Not in float32 and float64,
  // where the bits of a row do not depend on how many there are. Keys that are several rows of
  // memory are copied a tile at a time, and give the same bits.
  bool in_place(const DenseSequence& sequence) const {
    const bool packs = query.scalar_type() == at::kBFloat16 && has_bfloat16_products();
    const bool is_int8 = key.element_size() < query.element_size();
    const int64_t rows = sequence.queries * group();
    const int64_t most = sequence.keys < kManyKeys ? kFewRows : kFewRowsOfManyKeys;
    return (is_int8 || query.element_size() == 2) && rows > 0 && rows <= (packs ? 1 : most);
  }
  // Return whether each of the keys, or of the values, is one row of memory.
  bool whole_keys() const { return key.dim() == 4 && !key_rope.defined(); }
  bool whole_values() const { return value.dim() == 4; }

  Layout layout;  // never BNSD_BSND, which is BNSD here
  int64_t heads, key_heads, value_size;
  int64_t size;           // of the heads of query and key, with their ropes
  int64_t rope_size = 0;  // of the part that has gradients of its own
  double scale;
  at::Tensor query, key, value;  // by head, with dense rows
  // The same of parts of the heads that are tensors of their own; undefined if they are not.
  at::Tensor query_rope, key_rope;
  // In pages, keys and values are (num_blocks, N, block_size, D), and in fractal ones (num_blocks,
  // N, block_size, D / 16, 16), or 32 for 16. Keys of int8 have a query of the dtype of statistics,
  // which their scales per channel are multiplied with.
  at::Tensor block_table;  // undefined if keys are contiguous
  // The scales per token of int8 keys and values, (B, S) in the dtype of query.
  at::Tensor key_scale, value_scale;
  std::vector<DenseSequence> sequences;

  int64_t pse_type = 1;
  at::Tensor pse;  // dense rows, or (B | 1, N) slopes; undefined if absent
  PseAddress pse_address;
  int64_t distance_shift = 0;  // of keys against queries, for slopes

  // A full mask, (B, N, Sq, Skv) or larger, broadcast by strides; undefined if absent.
  at::Tensor mask;
  // Whether its last two axes are the tokens of all sequences instead.
  bool mask_of_all_tokens = false;

  // Returns the offset of key 0 of the sequence in the mask's row of a query.
  int64_t mask_row(const DenseSequence& sequence, int64_t head, int64_t query) const {
    const int64_t row = sequence.index * mask.stride(0) + head * mask.stride(1);
    return mask_of_all_tokens
               ? row + (sequence.query_begin + query) * mask.stride(2) + sequence.key_begin
               : row + query * mask.stride(2);
  }

  at::Tensor sink;  // (N), dense, in the dtype of the statistics; undefined if absent

  at::Tensor drop_mask;  // undefined if absent
  double keep_prob = 1;

 private:
  DenseAttention(const char* op, const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value, const FlashAttentionOptions& options);
  DenseAttention(Layout layout, int64_t heads, double scale, const at::Tensor& query,
                 const at::Tensor& key, const at::Tensor& value);
  void add(const SinkAndRopes& extra);
  void add(const KeyQuantization& quantization);
  // Both by head.
  void add_ropes(const at::Tensor& of_query, const at::Tensor& of_key);
  // For the operators for inference.
  void add_sequence(const Sequence& tokens, bool masked, SparseMode mode, int64_t pre_tokens,
                    int64_t next_tokens);
  void read_sequences(const FlashAttentionOptions& options);
  void read_pse(const char* op, const FlashAttentionOptions& options);
  void read_mask(const char* op, const FlashAttentionOptions& options);
  void read_mask_of_inference(const char* op, const at::Tensor& given, SparseMode mode);
  void use_full_mask(const char* op, const at::Tensor& given);
  // Returns a mask whose axes of tokens, where they are 1, are those of all rows and keys.
  at::Tensor expanded(const at::Tensor& mask) const;
  // Finds the pages of every sequence, and checks the numbers of those that are read.
  void read_block_table(const at::Tensor& given);
};

// Returns null for an undefined tensor.
inline const uint8_t* bytes_of(const at::Tensor& mask) {
  return mask.defined() ? static_cast<const uint8_t*>(mask.const_data_ptr()) : nullptr;
}

template <typename T>
HeadRows<T> rows_of(const Matrix<T>& rows) {
  return {rows.data(), rows.stride()};
}

// The ropes of int8 keys are not quantised.
template <typename T>
using RopeOf = std::conditional_t<std::is_same_v<T, int8_t>, at::BFloat16, T>;

// The rows of one head of query or key, whose last part may lie in another tensor.
template <typename T>
struct JoinedRows {
  HeadRows<const T> rows;
  std::optional<HeadRows<const RopeOf<T>>> ropes;
  int64_t size;       // of `rows`
  int64_t rope_size;  // of `ropes`
  // Between the fractals of a row, or of its rope; expanded ones are 0 apart.
  std::optional<int64_t> fractal_stride = {};
  std::optional<int64_t> rope_fractal_stride = {};
};

template <typename T>
HeadRows<const T> query_rows(const at::Tensor& tensor, const DenseSequence& sequence,
                             int64_t head) {
  return {tensor.const_data_ptr<T>(), tensor, sequence.batch, head, sequence.query_begin};
}
// Returns how many keys from `first` on are rows at equal distances: in pages, those of one page.
inline int64_t run_of_keys(const at::Tensor& tensor, const DenseSequence& sequence, int64_t first) {
  return sequence.blocks == nullptr ? sequence.keys - first
                                    : tensor.size(2) - first % tensor.size(2);
}
// Returns the rows of such a run.
template <typename T>
HeadRows<const T> key_rows(const at::Tensor& tensor, const DenseSequence& sequence, int64_t head,
                           int64_t first = 0) {
  const auto* data = tensor.const_data_ptr<T>();
  if (sequence.blocks == nullptr) {
    return {data, tensor, sequence.batch, head, sequence.key_begin + first};
  }
  const int64_t block_size = tensor.size(2);
  return {data, tensor, sequence.blocks[first / block_size], head, first % block_size};
}

template <typename T>
JoinedRows<T> joined_query_rows(const DenseAttention& attention, const DenseSequence& sequence,
                                int64_t head) {
  JoinedRows<T> joined{
      query_rows<T>(attention.query, sequence, head), {}, attention.query.size(-1), 0};
  if (attention.query_rope.defined()) {
    joined.ropes = query_rows<T>(attention.query_rope, sequence, head);
    joined.rope_size = attention.rope_size;
  }
  return joined;
}
// The keys, or the values, of one head of a sequence, contiguous or in pages.
template <typename T>
class HeadKeys {
 public:
  static HeadKeys keys(const DenseAttention& attention, const DenseSequence& sequence,
                       int64_t head) {
    const int64_t ropes = attention.key_rope.defined() ? attention.rope_size : 0;
    return {attention.key,
            ropes ? &attention.key_rope : nullptr,
            sequence,
            head,
            attention.size - ropes,
            ropes};
  }
  static HeadKeys values(const DenseAttention& attention, const DenseSequence& sequence,
                         int64_t head) {
    return {attention.value, nullptr, sequence, head, attention.value_size, 0};
  }

  // Returns the first key to read. Pages before a window may belong to others by now.
  int64_t begin() const { return sequence_.blocks == nullptr ? 0 : sequence_.kept.begin(0); }
  int64_t run(int64_t first) const { return run_of_keys(tensor_, sequence_, first); }
  // Returns the rows of the run that begins with `first`.
  JoinedRows<T> rows(int64_t first) const {
    JoinedRows<T> joined{key_rows<T>(tensor_, sequence_, head_, first), {}, size_, rope_size_};
    joined.fractal_stride = fractal_stride(tensor_);
    if (ropes_ != nullptr) {
      joined.ropes = key_rows<RopeOf<T>>(*ropes_, sequence_, head_, first);
      joined.rope_fractal_stride = fractal_stride(*ropes_);
    }
    return joined;
  }

 private:
  HeadKeys(const at::Tensor& tensor, const at::Tensor* ropes, const DenseSequence& sequence,
           int64_t head, int64_t size, int64_t rope_size)
      : tensor_(tensor),
        ropes_(ropes),
        sequence_(sequence),
        head_(head),
        size_(size),
        rope_size_(rope_size) {}

  static std::optional<int64_t> fractal_stride(const at::Tensor& tensor) {
    return tensor.dim() == 5 ? std::optional(tensor.stride(3)) : std::nullopt;
  }

  const at::Tensor& tensor_;
  const at::Tensor* ropes_;
  const DenseSequence& sequence_;
  int64_t head_, size_, rope_size_;
};

}  // namespace ascend_attn::cpu

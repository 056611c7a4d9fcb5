// FusedInferAttentionScore: attention for serving, with keys that are contiguous or in the pages of
// a cache, separate ropes, sinks and the log-sum-exp.
#pragma once

#include <array>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "dispatch/arguments.h"
#include "dispatch/outputs.h"

namespace ascend_attn {

struct OperatorLimits;

// The layouts of the inputs and of the output, which one name or a pair of names gives.
struct InferLayout {
  std::string_view name;
  Layout inputs;
  Layout output;

  bool is_pair() const { return inputs != output; }
  bool packed() const { return axes_of(inputs).packed(); }
};
inline constexpr std::array<InferLayout, 12> kInferLayouts{{
    {"BSH", Layout::BSH, Layout::BSH},
    {"BSND", Layout::BSND, Layout::BSND},
    {"BNSD", Layout::BNSD, Layout::BNSD},
    {"TND", Layout::TND, Layout::TND},
    {"BNSD_BSND", Layout::BNSD, Layout::BSND},
    {"BSH_BNSD", Layout::BSH, Layout::BNSD},
    {"BSND_BNSD", Layout::BSND, Layout::BNSD},
    {"NTD_TND", Layout::NTD, Layout::TND},
    {"BSH_NBSD", Layout::BSH, Layout::NBSD},
    {"BSND_NBSD", Layout::BSND, Layout::NBSD},
    {"BNSD_NBSD", Layout::BNSD, Layout::NBSD},
    {"TND_NTD", Layout::TND, Layout::NTD},
}};

// The forms of a page, by the rank of key.
enum class PageForm {
  rows = 3,      // (num_blocks, block_size, Nk * D)
  heads = 4,     // (num_blocks, Nk, block_size, D)
  fractals = 5,  // NZ: (num_blocks, Nk, D / 16, block_size, 16); of int8, 32 for 16
};
constexpr int64_t fractal_columns(size_t element_size) { return element_size == 1 ? 32 : 16; }

// The scales of int8 keys and values, which are quantised alike.
struct KeyQuantization {
  static constexpr bool is_argument_group = true;
  enum Mode : int64_t { per_channel, per_token };

  std::optional<at::Tensor> key_antiquant_scale, value_antiquant_scale;
  int64_t key_antiquant_mode, value_antiquant_mode;
  // The scales of an int8 query, beside which keys and values have one each.
  std::optional<at::Tensor> dequant_scale_query;
  int64_t query_quant_mode;

  bool given() const { return key_antiquant_scale || value_antiquant_scale || of_query(); }
  bool of_query() const { return dequant_scale_query.has_value(); }
  bool by_channel() const { return given() && key_antiquant_mode == per_channel; }
  bool by_token() const { return given() && key_antiquant_mode == per_token; }
};

struct FusedInferAttentionScore {
  static constexpr const char* name = "fused_infer_attention_score";
  static constexpr const char* schema =
      "(Tensor query, Tensor key, Tensor value, *, SymInt? num_heads=None, "
      "SymInt num_key_value_heads=0, str layout, Tensor? atten_mask=None, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "Tensor? block_table=None, SymInt block_size=0, Tensor? query_rope=None, "
      "Tensor? key_rope=None, Tensor? sink=None, float? scale_value=None, "
      "int pre_tokens=2147483647, int next_tokens=2147483647, int sparse_mode=0, "
      "int inner_precise=0, bool return_softmax_lse=False, Tensor? key_antiquant_scale=None, "
      "Tensor? value_antiquant_scale=None, int key_antiquant_mode=0, int value_antiquant_mode=0, "
      "Tensor? dequant_scale_query=None, int query_quant_mode=0) -> (Tensor out, Tensor "
      "softmax_lse)";
  // The second one on Ascend 950.
  static constexpr std::array functions{"aclnnFusedInferAttentionScoreV4",
                                        "aclnnFusedInferAttentionScoreV5"};
  static const OperatorLimits limits;
  static constexpr const char* no_gradient =
      "this is an operator for inference; flash_attention_score trains";
  using Outputs = std::tuple<at::Tensor, at::Tensor>;  // out, softmax_lse
  static constexpr bool has_out_overload = true;

  at::Tensor query, key, value;
  std::optional<c10::SymInt> num_heads;
  c10::SymInt num_key_value_heads;
  std::string_view layout;
  std::optional<at::Tensor> atten_mask;
  Lengths actual_seq_lengths_query, actual_seq_lengths_key;
  std::optional<at::Tensor> block_table;
  c10::SymInt block_size;  // only read beside block_table
  std::optional<at::Tensor> query_rope, key_rope, sink;
  std::optional<double> scale_value;
  int64_t pre_tokens, next_tokens, sparse_mode, inner_precise;
  bool return_softmax_lse;
  KeyQuantization quantization;

  Outputs check_and_allocate(OutputSource outputs = {}) const;
  void check_values() const;
  bool lacks_defaults() const { return !num_heads || !scale_value; }
  FusedInferAttentionScore with_defaults() const;

  // With the defaults of a call, these are given.
  const c10::SymInt& heads() const { return *num_heads; }
  double scale() const { return *scale_value; }
  // Whether the sparse_mode excludes keys: the compressed mask of modes 2 to 4 may be absent.
  bool masked() const {
    return atten_mask || has_compressed_mask(static_cast<SparseMode>(sparse_mode));
  }

  // Raises unless `layout` is the name of one.
  const InferLayout& infer_layout() const;
  // These are valid only after check_and_allocate has accepted the call.
  c10::SymInt key_heads() const;
  PageForm page_form() const { return static_cast<PageForm>(key.dim()); }
  // The block_size that key has.
  c10::SymInt page_size() const;
  // The tokens of each sequence, without `batch` in packed layouts; empty while a length is not
  // known. Where keys are paged, key_begin is 0.
  std::vector<Sequence> sequences() const;
};

}  // namespace ascend_attn

// The tensors of a call of dense attention: their axes, heads, sizes and lengths, read and checked
// in one place for FlashAttentionScore, PromptFlashAttention and FusedInferAttentionScore.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/device_limits.h"
#include "core/layout.h"
#include "core/sequence_lengths.h"
#include "core/tensor_checks.h"

namespace ascend_attn {

// The arguments that the operators have in common.
struct DenseTensors {
  std::string_view op;
  Layout layout;
  std::string_view layout_name;
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const Lengths& query_lengths;
  const Lengths& key_lengths;
  c10::SymInt heads;
  std::optional<c10::SymInt> key_heads = {};  // 0 as for the queries; none: those that key has
  bool paged = false;                         // key and value have other axes
  bool or_int8 = false;
  bool int8_keys = false;  // and values, whatever the dtype of query
};

// The base of the checks of a call, each of which raises on the first violated rule.
class DenseShape {
 protected:
  // Reads and checks the dtypes, devices and heads, and the axes of query.
  DenseShape(const DenseTensors& call, const OperatorLimits& limits);

  // Reads the axes of key and value, which are not paged.
  void read_keys();
  // Returns whether there are ropes, after the checks of query's; key's has the same size of heads.
  bool read_ropes(const std::optional<at::Tensor>& of_query,
                  const std::optional<at::Tensor>& of_key);
  // Checks that a rope has the sizes of `beside`, but for its own head size.
  void check_rope(NamedTensor rope, c10::SymIntArrayRef sizes, const char* beside) const;
  void check_sink(const std::optional<at::Tensor>& sink) const;
  void check_ends_given(std::string_view argument, const Lengths& lengths, bool required) const;
  void check_as_many_lengths() const;
  // For the operators of inference; `rows_are_batches`: what the first of two axes may be.
  void check_inference_mask(const std::optional<at::Tensor>& mask, int64_t sparse_mode,
                            int64_t pre_tokens, int64_t next_tokens, bool rows_are_batches) const;

  // The shape of a tensor in a layout. Packed layouts have no batch.
  c10::SymDimVector sizes_in(Layout layout, const c10::SymInt& tokens, const c10::SymInt& heads,
                             const c10::SymInt& size) const;
  c10::SymDimVector query_sizes(Layout layout, const c10::SymInt& size) const {
    return sizes_in(layout, queries_, heads_, size);
  }
  c10::SymDimVector key_sizes(const c10::SymInt& size) const {
    return sizes_in(layout_, keys_, key_heads_, size);
  }
  // With `lanes` numbers for each row: (B, N, Sq, lanes), or (T, N, lanes).
  c10::SymDimVector statistics_sizes(int64_t lanes) const {
    return query_sizes(is_packed() ? Layout::TND : Layout::BNSD, lanes);
  }

  // Whether the lengths of this call have values: those of fake tensors do not.
  bool lengths_known() const { return query_lengths_.known() && key_lengths_.known(); }
  // Empty while a length is not known; one where all batches are alike.
  std::vector<Sequence> sequences() const;

  bool is_packed() const { return axes_.packed(); }
  NamedTensor query() const { return {"query", query_}; }

  std::string_view name_;
  Layout layout_;
  std::string_view layout_name_;
  LayoutAxes axes_;
  const at::Tensor& query_;
  const at::Tensor& key_;
  const at::Tensor& value_;
  const Lengths& query_lengths_;
  const Lengths& key_lengths_;
  bool paged_;
  DeviceLimits limits_;
  // The number of batches, or of packed sequences; the tokens of one batch, or of all sequences.
  c10::SymInt batch_, queries_, keys_;
  c10::SymInt heads_, key_heads_, head_size_, value_size_;
  c10::SymInt rope_size_ = 0;

 private:
  void check_rank(NamedTensor argument) const;
  void check_full_mask(const at::Tensor& mask, int64_t sparse_mode, bool rows_are_batches) const;
  // Returns the size of the heads of a tensor, whose number the argument `number` gives.
  c10::SymInt size_of_heads(NamedTensor argument, std::string_view number,
                            const c10::SymInt& heads) const;

  bool key_heads_given_;
};

}  // namespace ascend_attn

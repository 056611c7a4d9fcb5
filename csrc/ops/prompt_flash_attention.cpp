#include "ops/prompt_flash_attention.h"

#include <array>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/symbolic.h"
#include "ops/prompt_flash_attention_rules.h"

namespace ascend_attn {
namespace {

constexpr const char* kName = PromptFlashAttention::name;

struct Axes {
  int64_t tokens;
  int64_t heads;  // 2 in layout BSH, where they share it with D
};
Axes axes_of(Layout layout) {
  const bool heads_first = layout == Layout::BNSD || layout == Layout::BNSD_BSND;
  return heads_first ? Axes{2, 1} : Axes{1, 2};
}

}  // namespace

PromptAttentionRules::PromptAttentionRules(const PromptFlashAttention& op)
    : op_(op),
      layout_(parse_layout(kName, op.layout,
                           {Layout::BSH, Layout::BSND, Layout::BNSD, Layout::BNSD_BSND})),
      limits_(kName) {
  tensors();
  heads();
  sizes();
  limits();
  check_actual_lengths(kName, "actual_seq_lengths_query", op.actual_seq_lengths_query, batch_,
                       queries_);
  check_actual_lengths(kName, "actual_seq_lengths_key", op.actual_seq_lengths_key, batch_, keys_);
  check_value(std::isfinite(static_cast<float>(op.scale_value)), kName, "scale_value",
              "expected a finite number of float32, got ", op.scale_value);
}

void PromptAttentionRules::tensors() const {
  const std::array<TensorArgument, 3> inputs{{query(), {"key", op_.key}, {"value", op_.value}}};
  check_attention_dtype(kName, query(), /*or_int8=*/true);
  limits_.dtype("query", op_.query.scalar_type());
  const int64_t rank = layout_ == Layout::BSH ? 3 : 4;
  for (const auto& argument : inputs) {
    check_value(argument.tensor.dim() == rank, kName, argument.name, "expected rank ", rank,
                " for layout ", layout_name(layout_), ", got shape ", argument.tensor.sym_sizes());
    check_device(kName, argument, query());
    check_dtype(kName, argument, query());
  }
}

void PromptAttentionRules::heads() {
  const auto& heads = op_.num_heads;
  const auto& key_heads = op_.num_key_value_heads;
  constexpr int64_t kMostQueryHeads = 64;
  check_value(heads > 0, kName, "num_heads", "expected the positive number of query heads, got ",
              heads);
  check_value(key_heads >= 0, kName, "num_key_value_heads",
              "expected the number of key heads, or 0 where it is num_heads, got ", key_heads);
  key_heads_ = key_heads == 0 ? heads : key_heads;
  check_value(divides(key_heads_, heads), kName, "num_key_value_heads",
              "expected a divisor of num_heads = ", heads, ", got ", key_heads);
  check_value(at_most(heads, key_heads_ * kMostQueryHeads), kName, "num_key_value_heads",
              "expected at most ", kMostQueryHeads, " query heads per key head, got ", key_heads,
              " for num_heads = ", heads);
}

// Sizes of the axes, and that the three tensors agree about them.
void PromptAttentionRules::sizes() {
  const auto axes = axes_of(layout_);
  batch_ = op_.query.sym_size(0);
  queries_ = op_.query.sym_size(axes.tokens);
  keys_ = op_.key.sym_size(axes.tokens);
  size_ = op_.query.sym_size(-1);
  if (layout_ == Layout::BSH) {
    check_value(divides(op_.num_heads, size_), kName, "query",
                "expected H to be a multiple of num_heads = ", op_.num_heads, ", got shape ",
                op_.query.sym_sizes());
    size_ = size_ / op_.num_heads;
  }
  check_value(size_ > 0, kName, "query", "expected a head size of at least 1, got shape ",
              op_.query.sym_sizes());
  agrees(query(), "num_heads", op_.num_heads);
  for (const auto& argument :
       {TensorArgument{"key", op_.key}, TensorArgument{"value", op_.value}}) {
    agrees(argument, "num_key_value_heads", key_heads_);
    check_value(same(argument.tensor.sym_size(0), batch_), kName, argument.name,
                "expected query's batch size ", batch_, ", got shape ",
                argument.tensor.sym_sizes());
  }
  check_value(same(op_.value.sym_size(axes.tokens), keys_), kName, "value",
              "expected as many tokens as key, ", keys_, ", got shape ", op_.value.sym_sizes());
}

void PromptAttentionRules::agrees(TensorArgument argument, const char* number,
                                  const c10::SymInt& heads) const {
  const auto& tensor = argument.tensor;
  if (layout_ == Layout::BSH) {
    check_value(same(tensor.sym_size(2), heads * size_), kName, argument.name,
                "expected H = ", number, " * D = ", heads, " * ", size_, ", got shape ",
                tensor.sym_sizes());
    return;
  }
  check_value(same(tensor.sym_size(axes_of(layout_).heads), heads), kName, argument.name,
              "expected ", number, " = ", heads, " heads, got shape ", tensor.sym_sizes());
  check_value(same(tensor.sym_size(3), size_), kName, argument.name, "expected query's D = ", size_,
              ", got shape ", tensor.sym_sizes());
}

void PromptAttentionRules::limits() const {
  limits_.size("query", "N", op_.num_heads);
  limits_.size("query", "D", size_);
  limits_.size("query", "S", queries_);
  limits_.size("key", "S", keys_);
  const int64_t aligned = is_int8() ? 32 : 16;
  const auto size = size_.maybe_as_int();
  limits_.size("query", "B", batch_);
  if (size && *size % aligned != 0) {
    limits_.size("query", "unaligned B", batch_);
  }
  if (layout_ == Layout::BSH || layout_ == Layout::BSND) {
    limits_.size("query", "N*D", op_.num_heads * size_);
  }
  if (!is_310p()) {
    return;
  }
  limits_.rule("num_key_value_heads", op_.num_key_value_heads == 0, "0", op_.num_key_value_heads);
  limits_.rule("actual_seq_lengths_query", !given(op_.actual_seq_lengths_query), "None", "a list");
  limits_.rule("actual_seq_lengths_key", !given(op_.actual_seq_lengths_key), "None", "a list");
}

std::vector<Lengths> PromptAttentionRules::sequence_lengths() const {
  std::vector<Lengths> lengths;
  for (int64_t b = 0; b < batch_.maybe_as_int().value_or(0); ++b) {
    const auto queries = actual_length(op_.actual_seq_lengths_query, b, queries_).maybe_as_int();
    const auto keys = actual_length(op_.actual_seq_lengths_key, b, keys_).maybe_as_int();
    if (!queries || !keys) {
      return {};
    }
    lengths.push_back({*queries, *keys});
  }
  return lengths;
}

at::Tensor PromptAttentionRules::new_out() const {
  const auto dtype = op_.quant_scale2 ? at::kChar : is_int8() ? at::kHalf : op_.query.scalar_type();
  c10::SymDimVector sizes(op_.query.sym_sizes());
  if (layout_ == Layout::BNSD_BSND) {
    std::swap(sizes[1], sizes[2]);
  }
  return new_tensor(sizes, op_.query.options().dtype(dtype));
}

PromptFlashAttention::Outputs PromptFlashAttention::check_and_allocate() const {
  const PromptAttentionRules rules(*this);
  rules.mask();
  rules.quantization();
  return {rules.new_out()};
}

}  // namespace ascend_attn

#include "ops/prompt_flash_attention.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "core/symbolic.h"
#include "ops/dense_defaults.h"
#include "ops/prompt_flash_attention_rules.h"

namespace ascend_attn {
const OperatorLimits PromptFlashAttention::limits{
    name,
    functions,
    {{on(Product::A2), {at::kHalf, at::kBFloat16, at::kChar}},
     // A3 has only the third version of the function.
     {on(Product::A3).since(Cann::v9_1), {at::kHalf, at::kBFloat16, at::kChar}},
     {k950.since(Cann::v9_0), {at::kHalf, at::kBFloat16}},
     {k310P, {at::kHalf}}},
    {{"B", "batch size", {.min = 0, .max = 65536}, on(Product::A2, Product::A3, Product::P950)},
     {"B", "batch size", {.min = 0, .max = 128}, k310P},
     {"B in BSH", "batch size in layout BSH", {.min = 0, .max = 300}, k310P},
     {"unaligned B",
      "batch size when D is not a multiple of 16, in int8 of 32",
      {.min = 0, .max = 128},
      kA2A3},
     {"N", "query heads", {.min = 1, .max = 256}},
     {"S", "tokens per sequence", {.min = 0, .max = 65535}, k310P},
     {"D", "head size", {.min = 1, .max = 512}}},
    {prompt_rules::kNotEmptyInt8, prompt_rules::kBandOfEmpty, prompt_rules::kNextOfMode3,
     prompt_rules::kAlignedSize, prompt_rules::kAlignedSizeInt8, prompt_rules::kNoScales,
     prompt_rules::kModeZero, prompt_rules::kAllPreTokens, prompt_rules::kNextTokens,
     prompt_rules::kBoolMask, prompt_rules::kMaskSizes, prompt_rules::kKeyHeads,
     prompt_rules::kNoQueryLengths, prompt_rules::kNoKeyLengths}};

PromptFlashAttentionRules::PromptFlashAttentionRules(const PromptFlashAttention& op)
    : op_(op),
      layout_(check_layout(kName, op.layout,
                           {Layout::BSH, Layout::BSND, Layout::BNSD, Layout::BNSD_BSND})),
      axes_(axes_of(layout_)),
      limits_(PromptFlashAttention::limits) {
  check_tensors();
  check_heads();
  check_sizes();
  check_limits();
  check_actual_lengths(kName, "actual_seq_lengths_query", op.actual_seq_lengths_query, batch_,
                       queries_);
  check_actual_lengths(kName, "actual_seq_lengths_key", op.actual_seq_lengths_key, batch_, keys_);
  check_scale_value(kName, op.scale());
}

void PromptFlashAttentionRules::check_tensors() const {
  const std::array<NamedTensor, 3> inputs{{query(), {"key", op_.key}, {"value", op_.value}}};
  check_attention_dtype(kName, query(), /*or_int8=*/true);
  limits_.dtype("query", op_.query.scalar_type());
  for (const auto& argument : inputs) {
    check_value(argument.tensor.dim() == axes_.rank, kName, argument.name, "expected rank ",
                axes_.rank, " for layout ", layout_name(layout_), ", got shape ",
                argument.tensor.sym_sizes());
    check_device(kName, argument, query());
    check_dtype(kName, argument, query());
  }
}

void PromptFlashAttentionRules::check_heads() {
  const auto& heads = op_.heads();
  const auto& key_heads = op_.num_key_value_heads;
  constexpr int64_t kMostQueryHeads = 64;
  check_value(positive(heads), kName, "num_heads",
              "expected the positive number of query heads, got ", heads);
  check_value(at_most(0, key_heads), kName, "num_key_value_heads",
              "expected the number of key heads, or 0 where it is num_heads, got ", key_heads);
  key_heads_ = known_equal(key_heads, 0) ? heads : key_heads;
  check_value(divides(key_heads_, heads), kName, "num_key_value_heads",
              "expected a divisor of num_heads = ", heads, ", got ", key_heads);
  check_value(at_most(heads, key_heads_ * kMostQueryHeads), kName, "num_key_value_heads",
              "expected at most ", kMostQueryHeads, " query heads per key head, got ", key_heads,
              " for num_heads = ", heads);
}

// Reads the sizes of the axes and checks that the three tensors agree on them.
void PromptFlashAttentionRules::check_sizes() {
  batch_ = op_.query.sym_size(axes_.batch);
  queries_ = op_.query.sym_size(axes_.tokens);
  keys_ = op_.key.sym_size(axes_.tokens);
  head_size_ = op_.query.sym_size(-1);
  if (axes_.merged()) {
    check_value(divides(op_.heads(), head_size_), kName, "query",
                "expected H to be a multiple of num_heads = ", op_.heads(), ", got shape ",
                op_.query.sym_sizes());
    head_size_ = head_size_ / op_.heads();
  }
  check_value(positive(head_size_), kName, "query",
              "expected a head size of at least 1, got shape ", op_.query.sym_sizes());
  check_heads_and_size(query(), "num_heads", op_.heads());
  for (const auto& argument : {NamedTensor{"key", op_.key}, NamedTensor{"value", op_.value}}) {
    check_heads_and_size(argument, "num_key_value_heads", key_heads_);
    check_value(same(argument.tensor.sym_size(axes_.batch), batch_), kName, argument.name,
                "expected query's batch size ", batch_, ", got shape ",
                argument.tensor.sym_sizes());
  }
  check_value(same(op_.value.sym_size(axes_.tokens), keys_), kName, "value",
              "expected as many tokens as key, ", keys_, ", got shape ", op_.value.sym_sizes());
}

void PromptFlashAttentionRules::check_heads_and_size(NamedTensor argument, const char* number,
                                                     const c10::SymInt& heads) const {
  const auto& tensor = argument.tensor;
  if (axes_.merged()) {
    check_value(same(tensor.sym_size(2), heads * head_size_), kName, argument.name,
                "expected H = ", number, " * D = ", heads, " * ", head_size_, ", got shape ",
                tensor.sym_sizes());
    return;
  }
  check_value(same(tensor.sym_size(axes_.heads), heads), kName, argument.name, "expected ", number,
              " = ", heads, " heads on axis ", axes_.heads, " of layout ", layout_name(layout_),
              ", got shape ", tensor.sym_sizes());
  check_value(same(tensor.sym_size(3), head_size_), kName, argument.name,
              "expected query's D = ", head_size_, ", got shape ", tensor.sym_sizes());
}

void PromptFlashAttentionRules::check_limits() const {
  limits_.size("query", "N", op_.heads());
  limits_.size("query", "D", head_size_);
  limits_.size("query", "S", queries_);
  limits_.size("key", "S", keys_);
  const int64_t aligned = is_int8() ? 32 : 16;
  const auto size = head_size_.maybe_as_int();
  limits_.size("query", is_310p() && layout_ == Layout::BSH ? "B in BSH" : "B", batch_);
  if (size && *size % aligned != 0) {
    limits_.size("query", "unaligned B", batch_);
  }
  if (size && layout_ == Layout::BNSD_BSND) {
    limits_.rule(prompt_rules::kAlignedSize, *size % 16 == 0, *size);
    limits_.rule(prompt_rules::kAlignedSizeInt8, !op_.quant_scale2 || *size % 32 == 0, *size);
  }
  for (const auto& [argument, name, size_of] :
       {std::tuple("query", "B", &batch_), std::tuple("query", "Sq", &queries_),
        std::tuple("key", "Skv", &keys_)}) {
    limits_.rule({argument, prompt_rules::kNotEmptyInt8.expected, kA2A3},
                 !is_int8() || size_of->maybe_as_int() != 0, name, " = 0");
  }
  limits_.rule(prompt_rules::kKeyHeads, !is_310p() || may_equal(key_heads_, op_.heads()),
               op_.num_key_value_heads);
  limits_.rule(prompt_rules::kNoQueryLengths, !op_.actual_seq_lengths_query.given(), "lengths");
  limits_.rule(prompt_rules::kNoKeyLengths, !op_.actual_seq_lengths_key.given(), "lengths");
}

std::vector<Sequence> PromptFlashAttentionRules::sequences() const {
  const auto& query_lengths = op_.actual_seq_lengths_query;
  const auto& key_lengths = op_.actual_seq_lengths_key;
  const auto batches = batch_.maybe_as_int();
  const auto queries = queries_.maybe_as_int();
  const auto keys = keys_.maybe_as_int();
  if (!query_lengths.known() || !key_lengths.known() || !batches || !queries || !keys) {
    return {};
  }
  const bool all_alike = query_lengths.values().size() <= 1 && key_lengths.values().size() <= 1;
  std::vector<Sequence> sequences(all_alike ? std::min<int64_t>(*batches, 1) : *batches);
  for (size_t b = 0; b < sequences.size(); ++b) {
    sequences[b].queries = actual_length(query_lengths, b, *queries);
    sequences[b].keys = actual_length(key_lengths, b, *keys);
  }
  return sequences;
}

at::Tensor PromptFlashAttentionRules::out(OutputSource& outputs) const {
  const auto dtype = op_.quant_scale2 ? at::kChar : is_int8() ? at::kHalf : op_.query.scalar_type();
  c10::SymDimVector sizes(op_.query.sym_sizes());
  if (layout_ == Layout::BNSD_BSND) {
    std::swap(sizes[1], sizes[2]);
  }
  return outputs.tensor(sizes, op_.query.options().dtype(dtype));
}

PromptFlashAttention PromptFlashAttention::with_defaults() const {
  auto complete = *this;
  add_dense_defaults(name, layout.parsed(), query, std::nullopt, complete.num_heads,
                     complete.scale_value);
  return complete;
}

PromptFlashAttention::Outputs PromptFlashAttention::check_and_allocate(OutputSource outputs) const {
  const PromptFlashAttentionRules rules(*this);
  rules.check_mask();
  rules.check_quantization();
  return {rules.out(outputs)};
}

}  // namespace ascend_attn

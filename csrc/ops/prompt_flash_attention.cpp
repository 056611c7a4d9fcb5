#include "ops/prompt_flash_attention.h"

#include <tuple>

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
    : DenseShape(
          {.op = PromptFlashAttention::name,
           .layout = check_layout(PromptFlashAttention::name, op.layout,
                                  {Layout::BSH, Layout::BSND, Layout::BNSD, Layout::BNSD_BSND}),
           .layout_name = op.layout,
           .query = op.query,
           .key = op.key,
           .value = op.value,
           .query_lengths = op.actual_seq_lengths_query,
           .key_lengths = op.actual_seq_lengths_key,
           .heads = op.heads(),
           .key_heads = op.num_key_value_heads,
           .or_int8 = true},
          PromptFlashAttention::limits),
      op_(op) {
  constexpr int64_t kMostQueryHeads = 64;
  check_value(at_most(heads_, key_heads_ * kMostQueryHeads), name_, "num_key_value_heads",
              "expected at most ", kMostQueryHeads, " query heads per key head, got ",
              op.num_key_value_heads, " for num_heads = ", heads_);
  read_keys();
  check_value(same(value_size_, head_size_), name_, "value", "expected query's D = ", head_size_,
              ", got ", value_size_, " of shape ", value_.sym_sizes());
  check_limits();
  check_actual_lengths(name_, kQueryLengths, query_lengths_, batch_, queries_);
  check_actual_lengths(name_, kKeyLengths, key_lengths_, batch_, keys_);
  check_scale_value(name_, op.scale());
}

void PromptFlashAttentionRules::check_limits() const {
  limits_.size("query", "N", heads_);
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
  limits_.rule(prompt_rules::kKeyHeads, !is_310p() || may_equal(key_heads_, heads_),
               op_.num_key_value_heads);
  limits_.rule(prompt_rules::kNoQueryLengths, !query_lengths_.given(), "lengths");
  limits_.rule(prompt_rules::kNoKeyLengths, !key_lengths_.given(), "lengths");
}

at::Tensor PromptFlashAttentionRules::out(OutputSource& outputs) const {
  const auto dtype = op_.quant_scale2 ? at::kChar : is_int8() ? at::kHalf : op_.query.scalar_type();
  const auto layout = layout_ == Layout::BNSD_BSND ? Layout::BSND : layout_;
  return outputs.tensor(query_sizes(layout, head_size_), query_.options().dtype(dtype));
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

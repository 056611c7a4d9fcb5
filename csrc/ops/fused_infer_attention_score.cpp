#include "ops/fused_infer_attention_score.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/symbolic.h"
#include "ops/dense_defaults.h"
#include "ops/fused_infer_attention_score_rules.h"

namespace ascend_attn {
namespace {

std::string_view text_of(PageForm form) {
  switch (form) {
    case PageForm::rows:
      return "(num_blocks, block_size, Nk * D)";
    case PageForm::heads:
      return "(num_blocks, Nk, block_size, D)";
    case PageForm::fractals:
      return "(num_blocks, Nk, D / 16, block_size, 16), or 32 of int8,";
  }
  return {};
}

int64_t block_size_axis(PageForm form) {
  return form == PageForm::rows ? 1 : form == PageForm::heads ? 2 : 3;
}

}  // namespace

const InferLayout& FusedInferAttentionScore::infer_layout() const {
  const auto* found = std::ranges::find(kInferLayouts, layout, &InferLayout::name);
  if (found != kInferLayouts.end()) [[likely]] {
    return *found;
  }
  std::string expected;
  for (const auto& each : kInferLayouts) {
    expected += (expected.empty() ? "" : ", ") + std::string(each.name);
  }
  raise(Violation::value, name, "layout",
        c10::str("expected one of ", expected, ", got ", quoted(layout)));
}

c10::SymInt FusedInferAttentionScore::key_heads() const {
  return known_equal(num_key_value_heads, 0) ? heads() : num_key_value_heads;
}

c10::SymInt FusedInferAttentionScore::page_size() const {
  return key.sym_size(block_size_axis(page_form()));
}

std::vector<Sequence> FusedInferAttentionScore::sequences() const {
  const auto& form = infer_layout();
  const auto axes = axes_of(form.inputs);
  const auto keys =
      block_table ? block_table->sym_size(1) * page_size() : key.sym_size(axes.tokens);
  return dense_sequences(form.inputs, form.packed() ? 0 : query.size(axes.batch),
                         query.size(axes.tokens), keys.expect_int(), actual_seq_lengths_query,
                         actual_seq_lengths_key, block_table.has_value());
}

FusedInferAttentionScore FusedInferAttentionScore::with_defaults() const {
  auto complete = *this;
  add_dense_defaults(name, infer_layout().inputs, query, query_rope, complete.num_heads,
                     complete.scale_value);
  return complete;
}

namespace {

// Returns the call, unless its tensors are quantised in another way than those of KeyQuantization.
const FusedInferAttentionScore& computable(const FusedInferAttentionScore& op) {
  for (const auto& argument : {NamedTensor{"query", op.query}, NamedTensor{"key", op.key},
                               NamedTensor{"value", op.value}}) {
    const bool is_query = &argument.tensor == &op.query;
    const bool may_be_int8 = is_query ? op.quantization.of_query() : op.quantization.given();
    check_type(may_be_int8 || argument.tensor.element_size() > 1, op.name, argument.name,
               "expected dtype float16, bfloat16, float32 or float64, or int8 beside ",
               is_query ? "dequant_scale_query" : "key_antiquant_scale", ", got ",
               dtype_name(argument.tensor.scalar_type()),
               "; torch_npu.npu_fused_infer_attention_score_v2 takes other quantised tensors");
  }
  return op;
}

}  // namespace

FusedInferRules::FusedInferRules(const FusedInferAttentionScore& op)
    : DenseShape({.op = FusedInferAttentionScore::name,
                  .layout = op.infer_layout().inputs,
                  .layout_name = op.layout,
                  .query = computable(op).query,
                  .key = op.key,
                  .value = op.value,
                  .query_lengths = op.actual_seq_lengths_query,
                  .key_lengths = op.actual_seq_lengths_key,
                  .heads = op.heads(),
                  .key_heads = op.num_key_value_heads,
                  .paged = op.block_table || op.quantization.given(),
                  .or_int8 = op.quantization.of_query(),
                  .int8_keys = op.quantization.given()},
                 FusedInferAttentionScore::limits),
      op_(op),
      form_(op.infer_layout()) {
  if (is_packed()) {
    check_ends_given(kQueryLengths, query_lengths_, queries_.maybe_as_int() != 0);
  }
  if (op.quantization.given()) {
    check_quantization();
  }
  paged_ ? check_pages() : read_keys();
  if (read_ropes(op.query_rope, op.key_rope)) {
    check_rope({"key_rope", *op.key_rope},
               paged_ ? page_sizes(rope_size_, op.key_rope->element_size()) : key_sizes(rope_size_),
               "key");
  }
  check_lengths();
  if (op.quantization.given()) {
    check_scale({"key_antiquant_scale", *op.quantization.key_antiquant_scale}, head_size_);
    check_scale({"value_antiquant_scale", *op.quantization.value_antiquant_scale}, value_size_);
    check_scale_of_query();
  }
}

void FusedInferRules::check_quantization() const {
  const auto& given = op_.quantization;
  for (const auto& [argument, scale] :
       {std::pair("key_antiquant_scale", &given.key_antiquant_scale),
        std::pair("value_antiquant_scale", &given.value_antiquant_scale)}) {
    check_present(scale->has_value(), name_, argument,
                  "expected a tensor because another scale is given, got None");
  }
  check_value(given.by_channel() || given.by_token(), name_, "key_antiquant_mode",
              "expected 0, a scale per channel, or 1, per token, got ", given.key_antiquant_mode);
  check_value(given.value_antiquant_mode == given.key_antiquant_mode, name_, "value_antiquant_mode",
              "expected key_antiquant_mode, ", given.key_antiquant_mode, ", got ",
              given.value_antiquant_mode);
  check_present(op_.block_table.has_value(), name_, "block_table",
                "expected a tensor beside key_antiquant_scale, got None");
  check_value(key_.dim() == static_cast<int64_t>(PageForm::fractals), name_, "key",
              "expected pages of shape (num_blocks, Nk, D / 32, block_size, 32) beside "
              "key_antiquant_scale, got ",
              key_.sym_sizes());
  if (!given.of_query()) {
    check_value(!op_.query_rope && !op_.key_rope, name_, "query_rope, key_rope",
                "expected None beside key_antiquant_scale, got a tensor");
    return;
  }
  check_dtype(name_, query(), at::kChar);
  check_value(given.query_quant_mode == 3, name_, "query_quant_mode",
              "expected 3, a scale per token and head, got ", given.query_quant_mode);
  check_value(given.by_channel(), name_, "key_antiquant_mode",
              "expected 0 beside dequant_scale_query, got ", given.key_antiquant_mode);
  check_present(op_.query_rope && op_.key_rope, name_, "query_rope, key_rope",
                "expected tensors beside dequant_scale_query, got None");
}

void FusedInferRules::check_scale_of_query() const {
  if (!op_.quantization.of_query()) {
    return;
  }
  const NamedTensor scale{"dequant_scale_query", *op_.quantization.dequant_scale_query};
  check_device(name_, scale, query());
  check_dtype(name_, scale, at::kFloat);
  auto sizes = query_sizes(layout_ == Layout::BSH ? Layout::BSND : layout_, 1);
  sizes.pop_back();
  check_shape(name_, scale, sizes, "of query without D");
}

void FusedInferRules::check_scale(NamedTensor scale, const c10::SymInt& size) const {
  check_device(name_, scale, query());
  if (op_.quantization.by_token()) {
    check_dtype(name_, scale, statistics_dtype(query_));
    check_value(scale.tensor.dim() == 2 && same(scale.tensor.sym_size(0), batch_) &&
                    at_most(keys_, scale.tensor.sym_size(1)),
                name_, scale.name, "expected shape (", batch_, ", S) with S of at least ", keys_,
                ", the keys that block_table has room for, got ", scale.tensor.sym_sizes());
    return;
  }
  if (op_.quantization.of_query()) {
    check_dtype(name_, scale, at::kFloat);
    check_shape(name_, scale, {{1}}, "of one scale beside dequant_scale_query");
    return;
  }
  check_dtype(name_, scale, query());
  const auto layout = form_.inputs;
  c10::SymDimVector sizes{key_heads_, size};
  if (layout == Layout::BSH) {
    sizes = {key_heads_ * size};
  } else if (layout == Layout::BNSD) {
    sizes = {key_heads_, 1, size};
  }
  check_shape(name_, scale, sizes, "of a scale per channel in this layout");
}

void FusedInferRules::check_pages() {
  const NamedTensor table{"block_table", *op_.block_table};
  const NamedTensor key{"key", key_};
  const NamedTensor value{"value", value_};
  check_device(name_, table, query());
  check_integers(name_, table);
  check_value(table.tensor.dim() == 2, name_, table.name,
              "expected shape (B, blocks of a sequence), got ", table.tensor.sym_sizes());
  check_shape(name_, table, {{batch_, table.tensor.sym_size(1)}}, "(B, blocks of a sequence)");
  const auto rank = key_.dim();
  check_value(rank >= 3 && rank <= 5, name_, key.name,
              "expected pages of shape (num_blocks, block_size, Nk * D), (num_blocks, Nk, "
              "block_size, D) or (num_blocks, Nk, D / 16, block_size, 16) beside block_table, got ",
              key_.sym_sizes());
  const auto form = op_.page_form();
  const auto fractal = fractal_columns(key_.element_size());
  check_value(form != PageForm::fractals || divides(fractal, head_size_), name_, "query",
              "expected D to be a multiple of ", fractal, " for keys in fractals, got ",
              head_size_);
  check_value(form != PageForm::heads || same(key_.sym_size(1), key_heads_) ||
                  !known_equal(key_.sym_size(2), key_heads_),
              name_, key.name, "expected pages of shape ", text_of(PageForm::heads),
              " with Nk = ", key_heads_, ", got ", key_.sym_sizes(),
              ", in the order (num_blocks, block_size, Nk, D); flatten(2) of key and value makes "
              "pages of shape ",
              text_of(PageForm::rows));
  page_size_ = op_.page_size();
  check_value(positive(page_size_) && divides(16, page_size_), name_, key.name,
              "expected block_size to be a positive multiple of 16, got shape ", key_.sym_sizes());
  check_value(may_equal(op_.block_size, 0) || same(op_.block_size, page_size_), name_, "block_size",
              "expected key's block_size, ", page_size_, ", or 0, got ", op_.block_size);
  keys_ = saturated_product(table.tensor.sym_size(1), page_size_);
  check_shape(name_, key, page_sizes(head_size_, key_.element_size()), text_of(form));
  check_value(value_.dim() == rank, name_, value.name, "expected rank ", rank,
              " as key has, got shape ", value_.sym_sizes());
  value_size_ = form == PageForm::rows    ? value_.sym_size(2) / key_heads_
                : form == PageForm::heads ? value_.sym_size(3)
                                          : value_.sym_size(2) * fractal;
  check_value(positive(value_size_), name_, value.name,
              "expected a head size of at least 1, got shape ", value_.sym_sizes());
  check_shape(name_, value, page_sizes(value_size_, value_.element_size()), text_of(form));
}

c10::SymDimVector FusedInferRules::page_sizes(const c10::SymInt& size, size_t element_size) const {
  const auto fractal = fractal_columns(element_size);
  const auto& blocks = key_.sym_size(0);
  switch (op_.page_form()) {
    case PageForm::rows:
      return {blocks, page_size_, key_heads_ * size};
    case PageForm::heads:
      return {blocks, key_heads_, page_size_, size};
    case PageForm::fractals:
      return {blocks, key_heads_, size / fractal, page_size_, fractal};
  }
  return {};
}

void FusedInferRules::check_ends(std::string_view argument, const Lengths& lengths,
                                 const c10::SymInt& tokens) const {
  if (!lengths.given() || !lengths.known()) {
    return;
  }
  check_sequence_lengths(name_, argument, Layout::TND, lengths, tokens);
  const auto last = lengths.values().back();
  check_value(same(last, tokens), name_, argument,
              "expected cumulative sequence lengths that end with all T = ", tokens,
              " tokens, got ", last, " at the end");
}

void FusedInferRules::check_lengths() {
  const bool has_batches = batch_.maybe_as_int() != 0;
  check_present(!paged_ || key_lengths_.given() || !has_batches, name_, kKeyLengths,
                "expected the number of keys of each sequence beside block_table, got None");
  if (!is_packed()) {
    check_actual_lengths(name_, kQueryLengths, query_lengths_, batch_, queries_);
    check_actual_lengths(name_, kKeyLengths, key_lengths_, batch_, keys_);
    return;
  }
  check_ends(kQueryLengths, query_lengths_, queries_);
  check_ends_given(kKeyLengths, key_lengths_, has_batches);
  check_as_many_lengths();
  if (paged_) {
    check_sequence_lengths(name_, kKeyLengths, Layout::BSND, key_lengths_, keys_);
  } else {
    check_ends(kKeyLengths, key_lengths_, keys_);
  }
}

void FusedInferRules::check_options() const {
  check_scale_value(name_, op_.scale());
  check_value(op_.inner_precise >= 0 && op_.inner_precise <= 3, name_, "inner_precise",
              "expected 0 to 3, got ", op_.inner_precise);
  check_sink(op_.sink);
  // A mask of two axes has one row for each batch where each has a single query.
  check_inference_mask(op_.atten_mask, op_.sparse_mode, op_.pre_tokens, op_.next_tokens,
                       /*rows_are_batches=*/known_equal(queries_, 1));
}

at::Tensor FusedInferRules::out(OutputSource& outputs) const {
  const auto dtype = op_.quantization.of_query() ? at::kBFloat16 : query_.scalar_type();
  return outputs.tensor(query_sizes(form_.output, value_size_), query_.options().dtype(dtype));
}

at::Tensor FusedInferRules::softmax_lse(OutputSource& outputs) const {
  const auto options = query_.options().dtype(statistics_dtype(query_));
  return op_.return_softmax_lse ? outputs.tensor(statistics_sizes(1), options)
                                : outputs.tensor({{0}}, options);
}

FusedInferAttentionScore::Outputs FusedInferAttentionScore::check_and_allocate(
    OutputSource outputs) const {
  const FusedInferRules rules(*this);
  rules.check_options();
  rules.check_limits();
  auto out = rules.out(outputs);
  return {out, rules.softmax_lse(outputs)};
}

}  // namespace ascend_attn

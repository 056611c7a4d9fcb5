#include "ops/fused_infer_attention_score.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/symbolic.h"
#include "ops/dense_defaults.h"
#include "ops/fused_infer_attention_score_rules.h"

namespace ascend_attn {
namespace {

// Returns the shape of a tensor in a layout. Packed layouts have no batch.
c10::SymDimVector sizes_in(Layout layout, const c10::SymInt& batch, const c10::SymInt& tokens,
                           const c10::SymInt& heads, const c10::SymInt& size) {
  const auto axes = axes_of(layout);
  c10::SymDimVector sizes(static_cast<size_t>(axes.rank), size);
  if (!axes.packed()) {
    sizes[axes.batch] = batch;
  }
  sizes[axes.tokens] = tokens;
  sizes[axes.heads] = axes.merged() ? heads * size : heads;
  return sizes;
}

c10::SymDimVector sizes_of_pages(PageForm form, const c10::SymInt& blocks,
                                 const c10::SymInt& block_size, const c10::SymInt& heads,
                                 const c10::SymInt& size) {
  switch (form) {
    case PageForm::rows:
      return {blocks, block_size, heads * size};
    case PageForm::heads:
      return {blocks, heads, block_size, size};
    case PageForm::fractals:
      return {blocks, heads, size / kFractalColumns, block_size, kFractalColumns};
  }
  return {};
}

std::string_view text_of(PageForm form) {
  switch (form) {
    case PageForm::rows:
      return "(num_blocks, block_size, Nk * D)";
    case PageForm::heads:
      return "(num_blocks, Nk, block_size, D)";
    case PageForm::fractals:
      return "(num_blocks, Nk, D / 16, block_size, 16)";
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
  if (!actual_seq_lengths_query.known() || !actual_seq_lengths_key.known()) {
    return {};
  }
  const auto& form = infer_layout();
  const auto axes = axes_of(form.inputs);
  if (form.packed()) {
    const auto ends = actual_seq_lengths_query.values();
    const auto keys = actual_seq_lengths_key.values();
    if (!block_table) {
      return packed_sequences(ends, keys);
    }
    auto spans = packed_sequences(ends, ends);
    for (size_t b = 0; b < spans.size(); ++b) {
      spans[b].key_begin = 0;
      spans[b].keys = keys[b];
    }
    return spans;
  }
  const auto batches = query.sym_size(axes.batch).maybe_as_int();
  const auto queries = query.sym_size(axes.tokens).maybe_as_int();
  const auto keys =
      (block_table ? block_table->sym_size(1) * page_size() : key.sym_size(axes.tokens))
          .maybe_as_int();
  std::vector<Sequence> spans;
  for (int64_t b = 0; batches && queries && keys && b < *batches; ++b) {
    spans.push_back({.queries = actual_length(actual_seq_lengths_query, b, *queries),
                     .keys = actual_length(actual_seq_lengths_key, b, *keys),
                     .batch = b});
  }
  return spans;
}

FusedInferAttentionScore FusedInferAttentionScore::with_defaults() const {
  auto complete = *this;
  add_dense_defaults(name, infer_layout().inputs, query, query_rope, complete.num_heads,
                     complete.scale_value);
  return complete;
}

FusedInferRules::FusedInferRules(const FusedInferAttentionScore& op)
    : op_(op),
      layout_(op.infer_layout()),
      axes_(axes_of(layout_.inputs)),
      limits_(FusedInferAttentionScore::limits) {
  check_dtypes();
  check_heads();
  check_query();
  paged() ? check_pages() : check_keys();
  check_ropes();
  check_lengths();
}

void FusedInferRules::check_dtypes() const {
  const std::array<NamedTensor, 3> inputs{{query(), {"key", op_.key}, {"value", op_.value}}};
  for (const auto& argument : inputs) {
    check_type(argument.tensor.element_size() > 1, kName, argument.name,
               "expected dtype float16, bfloat16, float32 or float64, got ",
               dtype_name(argument.tensor.scalar_type()),
               "; torch_npu.npu_fused_infer_attention_score_v2 takes quantised tensors");
  }
  check_attention_dtype(kName, query());
  limits_.dtype("query", op_.query.scalar_type());
  for (const auto& argument : inputs) {
    check_device(kName, argument, query());
    check_dtype(kName, argument, query());
  }
}

void FusedInferRules::check_heads() {
  check_value(positive(op_.heads()), kName, "num_heads",
              "expected the positive number of query heads, got ", op_.heads());
  check_value(at_most(0, op_.num_key_value_heads), kName, "num_key_value_heads",
              "expected the number of key heads, or 0 where it is num_heads, got ",
              op_.num_key_value_heads);
  key_heads_ = op_.key_heads();
  check_value(divides(key_heads_, op_.heads()), kName, "num_key_value_heads",
              "expected a divisor of num_heads = ", op_.heads(), ", got ", key_heads_);
}

void FusedInferRules::check_query() {
  const auto& tensor = op_.query;
  check_value(tensor.dim() == axes_.rank, kName, "query", "expected rank ", axes_.rank,
              " for layout ", layout_.name, ", got shape ", tensor.sym_sizes());
  head_size_ = tensor.sym_size(-1);
  if (axes_.merged()) {
    check_value(divides(op_.heads(), head_size_), kName, "query",
                "expected H to be a multiple of num_heads = ", op_.heads(), ", got shape ",
                tensor.sym_sizes());
    head_size_ = head_size_ / op_.heads();
  } else {
    check_value(same(tensor.sym_size(axes_.heads), op_.heads()), kName, "query",
                "expected num_heads = ", op_.heads(), " heads on axis ", axes_.heads, " of layout ",
                layout_.name, ", got shape ", tensor.sym_sizes());
  }
  check_value(positive(head_size_), kName, "query",
              "expected a head size of at least 1, got shape ", tensor.sym_sizes());
  queries_ = tensor.sym_size(axes_.tokens);
  if (!axes_.packed()) {
    batch_ = tensor.sym_size(axes_.batch);
    return;
  }
  check_present(op_.actual_seq_lengths_query.given() || queries_.maybe_as_int() == 0, kName,
                "actual_seq_lengths_query", "expected cumulative sequence lengths in layout ",
                layout_.name, ", got None");
  batch_ = op_.actual_seq_lengths_query.count();
}

void FusedInferRules::check_keys() {
  const NamedTensor key{"key", op_.key};
  check_value(op_.key.dim() == axes_.rank, kName, key.name, "expected rank ", axes_.rank,
              " for layout ", layout_.name, ", got shape ", op_.key.sym_sizes());
  keys_ = op_.key.sym_size(axes_.tokens);
  check_like_keys(key, head_size_);
  const NamedTensor value{"value", op_.value};
  value_size_ = size_of_keys(value);
  check_like_keys(value, value_size_);
}

void FusedInferRules::check_pages() {
  const NamedTensor table{"block_table", *op_.block_table};
  check_device(kName, table, query());
  check_integers(kName, table);
  check_value(table.tensor.dim() == 2, kName, table.name,
              "expected shape (B, blocks of a sequence), got ", table.tensor.sym_sizes());
  check_shape(kName, table, {{batch_, table.tensor.sym_size(1)}}, "(B, blocks of a sequence)");
  const auto rank = op_.key.dim();
  check_value(rank >= 3 && rank <= 5, kName, "key",
              "expected pages of shape (num_blocks, block_size, Nk * D), (num_blocks, Nk, "
              "block_size, D) or (num_blocks, Nk, D / 16, block_size, 16) beside block_table, got ",
              op_.key.sym_sizes());
  check_value(op_.page_form() != PageForm::fractals || divides(kFractalColumns, head_size_), kName,
              "query", "expected D to be a multiple of 16 for keys in fractals, got ", head_size_);
  check_value(op_.page_form() != PageForm::heads || same(op_.key.sym_size(1), key_heads_) ||
                  !known_equal(op_.key.sym_size(2), key_heads_),
              kName, "key", "expected pages of shape ", text_of(PageForm::heads),
              " with Nk = ", key_heads_, ", got ", op_.key.sym_sizes(),
              ", in the order (num_blocks, block_size, Nk, D); flatten(2) of key and value makes "
              "pages of shape ",
              text_of(PageForm::rows));
  page_size_ = op_.page_size();
  check_value(positive(page_size_) && divides(16, page_size_), kName, "key",
              "expected block_size to be a positive multiple of 16, got shape ",
              op_.key.sym_sizes());
  check_value(may_equal(op_.block_size, 0) || same(op_.block_size, page_size_), kName, "block_size",
              "expected key's block_size, ", page_size_, ", or 0, got ", op_.block_size);
  keys_ = saturated_product(table.tensor.sym_size(1), page_size_);
  check_like_keys({"key", op_.key}, head_size_);
  const NamedTensor value{"value", op_.value};
  value_size_ = size_of_keys(value);
  check_like_keys(value, value_size_);
}

c10::SymInt FusedInferRules::size_of_keys(NamedTensor argument) const {
  const auto& tensor = argument.tensor;
  const bool is_of_keys = tensor.dim() == op_.key.dim();
  check_value(is_of_keys, kName, argument.name, "expected rank ", op_.key.dim(),
              " as key has, got shape ", tensor.sym_sizes());
  c10::SymInt size = tensor.sym_size(-1);
  if (paged() ? op_.page_form() == PageForm::rows : axes_.merged()) {
    check_value(divides(key_heads_, size), kName, argument.name,
                "expected H to be a multiple of num_key_value_heads = ", key_heads_, ", got shape ",
                tensor.sym_sizes());
    size = size / key_heads_;
  } else if (paged() && op_.page_form() == PageForm::fractals) {
    size = tensor.sym_size(2) * kFractalColumns;
  }
  check_value(positive(size), kName, argument.name,
              "expected a head size of at least 1, got shape ", tensor.sym_sizes());
  return size;
}

void FusedInferRules::check_like_keys(NamedTensor argument, const c10::SymInt& size) const {
  if (paged()) {
    const auto form = op_.page_form();
    check_shape(kName, argument,
                sizes_of_pages(form, op_.key.sym_size(0), page_size_, key_heads_, size),
                text_of(form));
    return;
  }
  const auto text = c10::str("for layout ", layout_.name, ", num_key_value_heads = ", key_heads_,
                             " and a head size of ", size);
  check_shape(kName, argument, sizes_in(layout_.inputs, batch_, keys_, key_heads_, size), text);
}

void FusedInferRules::check_ropes() {
  check_present(op_.query_rope || !op_.key_rope, kName, "query_rope",
                "expected a tensor because key_rope is given, got None");
  check_present(op_.key_rope || !op_.query_rope, kName, "key_rope",
                "expected a tensor because query_rope is given, got None");
  if (!op_.query_rope) {
    return;
  }
  const NamedTensor of_query{"query_rope", *op_.query_rope};
  const NamedTensor of_key{"key_rope", *op_.key_rope};
  for (const auto& rope : {of_query, of_key}) {
    check_device(kName, rope, query());
    check_dtype(kName, rope, query());
  }
  rope_size_ = size_of_keys(of_key);
  check_like_keys(of_key, rope_size_);
  check_shape(kName, of_query, sizes_in(layout_.inputs, batch_, queries_, op_.heads(), rope_size_),
              "as query, with key_rope's head size");
}

void FusedInferRules::check_packed_lengths(const char* argument, const Lengths& lengths,
                                           const c10::SymInt& tokens) const {
  check_present(lengths.given() || batch_.maybe_as_int() == 0, kName, argument,
                "expected cumulative sequence lengths in layout ", layout_.name, ", got None");
  if (!lengths.given() || !lengths.known()) {
    return;
  }
  check_sequence_lengths(kName, argument, Layout::TND, lengths, tokens);
  const auto last = lengths.values().back();
  check_value(same(last, tokens), kName, argument,
              "expected cumulative sequence lengths that end with all T = ", tokens,
              " tokens, got ", last, " at the end");
}

void FusedInferRules::check_lengths() {
  constexpr const char* kQueries = "actual_seq_lengths_query";
  constexpr const char* kKeys = "actual_seq_lengths_key";
  const auto& of_keys = op_.actual_seq_lengths_key;
  check_present(!paged() || of_keys.given() || batch_.maybe_as_int() == 0, kName, kKeys,
                "expected the number of keys of each sequence beside block_table, got None");
  if (!axes_.packed()) {
    check_actual_lengths(kName, kQueries, op_.actual_seq_lengths_query, batch_, queries_);
    check_actual_lengths(kName, kKeys, of_keys, batch_, keys_);
    return;
  }
  check_packed_lengths(kQueries, op_.actual_seq_lengths_query, queries_);
  if (!paged()) {
    check_packed_lengths(kKeys, of_keys, keys_);
  }
  check_value(same(batch_, of_keys.count()), kName, kKeys,
              "expected as many lengths as actual_seq_lengths_query has, ", batch_, ", got ",
              of_keys.count());
  if (paged()) {
    check_sequence_lengths(kName, kKeys, Layout::BSND, of_keys, keys_);
  }
}

void FusedInferRules::check_options() const {
  check_scale_value(kName, op_.scale());
  check_value(op_.inner_precise >= 0 && op_.inner_precise <= 3, kName, "inner_precise",
              "expected 0 to 3, got ", op_.inner_precise);
  if (!op_.sink) {
    return;
  }
  const NamedTensor sink{"sink", *op_.sink};
  const auto dtype = sink.tensor.scalar_type();
  check_device(kName, sink, query());
  check_type(at::isFloatingType(dtype), kName, sink.name, "expected a floating-point dtype, got ",
             dtype_name(dtype));
  check_shape(kName, sink, {{op_.heads()}}, "(num_heads)");
}

at::Tensor FusedInferRules::out(OutputSource& outputs) const {
  return outputs.tensor(sizes_in(layout_.output, batch_, queries_, op_.heads(), value_size_),
                        op_.query.options());
}

at::Tensor FusedInferRules::softmax_lse(OutputSource& outputs) const {
  const auto options = op_.query.options().dtype(statistics_dtype(op_.query));
  if (!op_.return_softmax_lse) {
    return outputs.tensor({{0}}, options);
  }
  const auto layout = axes_.packed() ? Layout::TND : Layout::BNSD;
  return outputs.tensor(sizes_in(layout, batch_, queries_, op_.heads(), 1), options);
}

FusedInferAttentionScore::Outputs FusedInferAttentionScore::check_and_allocate(
    OutputSource outputs) const {
  const FusedInferRules rules(*this);
  rules.check_options();
  rules.check_mask();
  rules.check_limits();
  auto out = rules.out(outputs);
  return {out, rules.softmax_lse(outputs)};
}

}  // namespace ascend_attn

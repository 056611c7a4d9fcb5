#include "ops/sparse_rules.h"

#include <limits>
#include <utility>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "core/symbolic.h"
#include "ops/compressed_keys.h"

namespace ascend_attn {

std::vector<Dtypes> sparse_dtypes() {
  return {{kA2A3, {at::kHalf, at::kBFloat16}},
          {k950.since(Cann::v9_1), {at::kHalf, at::kBFloat16}}};
}

SparseRules::SparseRules(const OperatorLimits& limits, const LayoutArgument& layout,
                         NamedTensor query, NamedTensor key, const KeyPages* pages, KeyNames names)
    : op_(limits.op),
      layout_(check_layout(op_, layout, {Layout::BSND, Layout::TND})),
      query_(query),
      key_(key),
      pages_(pages && pages->given() ? pages : nullptr),
      names_(names),
      limits_(limits) {
  if (pages) {
    check_key_layout(*pages);
  }
  const auto rank = axes_of(layout_).rank;
  check_value(query.tensor.dim() == rank, op_, query.name, "expected rank ", rank, " for layout ",
              layout_name(layout_), ", got shape ", query.tensor.sym_sizes(),
              hint_for_rank(layout_, query.tensor.dim()));
  const auto key_layout = pages_ ? KeyLayoutArgument::kPaged : layout_name(layout_);
  const auto key_rank = pages_ ? int64_t{4} : rank;
  check_value(key.tensor.dim() == key_rank, op_, key.name, "expected rank ", key_rank,
              " for layout ", key_layout, ", got shape ", key.tensor.sym_sizes());
  if (names_.int8) {
    check_dtype(op_, query, at::kChar);
  } else {
    check_attention_dtype(op_, query);
  }
  limits_.dtype(query.name, query.tensor.scalar_type());
  heads_ = query.tensor.sym_size(-2);
  head_size_ = query.tensor.sym_size(-1);
  check_same_device(key);
  if (names_.bytes_of_row) {
    check_dtype(op_, key, at::kChar);
  } else {
    check_same_dtype(key);
  }
  check_like_key(key, names_.bytes_of_row.value_or(head_size_));

  check_not_empty(query.tensor.sym_size(0));
  check_not_empty(query.tensor.sym_size(-3));
  if (names_.may_be_empty) {
    return;
  }
  check_not_empty(key.tensor.sym_size(-3));
  if (pages_) {
    check_not_empty(key.tensor.sym_size(0));
  }
}

void SparseRules::check_indices_of_keys() const {
  // Keys of a paged cache are counted by their lengths, which are int32 as well.
  constexpr int64_t kMostKeys = std::numeric_limits<int32_t>::max();
  check_value(key_.tensor.sym_size(-3).maybe_as_int().value_or(0) <= kMostKeys, op_, key_.name,
              "expected at most ", kMostKeys, " tokens, as indices are int32, got shape ",
              key_.tensor.sym_sizes());
}

void SparseRules::check_selection(const c10::SymInt& count, int64_t pre_tokens,
                                  int64_t next_tokens) const {
  const auto known = count.maybe_as_int();
  check_value(!known || *known >= 1, op_, "sparse_count", "expected a positive number, got ",
              count);
  check_indices_of_keys();
  limits_.size("sparse_count", "K", count);
  limits_.size("pre_tokens", "pre_tokens", pre_tokens);
  limits_.size("next_tokens", "next_tokens", next_tokens);
}

void SparseRules::check_not_empty(const c10::SymInt& count) const {
  auto not_empty = kNotEmpty;
  not_empty.argument = query_.name;
  limits_.rule(not_empty, count.maybe_as_int() != 0, query_.name, " of shape ",
               query_.tensor.sym_sizes(), ", ", key_.name, " of shape ", key_.tensor.sym_sizes());
}

void SparseRules::check_key_layout(const KeyPages& pages) const {
  const auto& text = pages.key_layout.text();
  check_value(!text || pages.given() || *text == layout_name(layout_), op_, names_.layout,
              "expected PA_BSND, ", layout_name(layout_), " (layout's) or None, got ",
              quoted(text.value_or("")));
  if (pages.given()) {
    check_present(pages.block_table.has_value(), op_, names_.table, "expected a tensor because ",
                  names_.layout, " is PA_BSND, got None");
  } else {
    check_value(!pages.block_table, op_, names_.table, "expected None because ", names_.layout,
                " is not PA_BSND, got a tensor");
  }
}

// `batch` is the number of sequences.
void SparseRules::check_block_table(const c10::SymInt& batch) const {
  const NamedTensor table{names_.table, *pages_->block_table};
  check_same_device(table);
  check_integers(op_, table);
  check_value(table.tensor.dim() == 2, op_, table.name, "expected rank 2, got shape ",
              table.tensor.sym_sizes());
  check_shape(op_, table, {{batch, table.tensor.sym_size(1)}}, "(B, blocks of a sequence)");
  const auto& block_size = key_.tensor.sym_size(1);
  check_value(block_size.maybe_as_int() != 0, op_, key_.name,
              "expected blocks of at least one row, got shape ", key_.tensor.sym_sizes());
  limits_.size(key_.name, "block_size", block_size);
}

void SparseRules::check_same_device(NamedTensor argument) const {
  check_device(op_, argument, query_);
}

void SparseRules::check_same_dtype(NamedTensor argument) const {
  check_dtype(op_, argument, query_);
}

void SparseRules::check_weights_dtype(NamedTensor argument) const {
  const auto dtype = argument.tensor.scalar_type();
  if (names_.int8) {
    check_type(dtype == at::kHalf || dtype == at::kFloat, op_, argument.name,
               "expected dtype float16 or float32, got ", dtype_name(dtype));
    return;
  }
  check_type(dtype == query_.tensor.scalar_type() || dtype == at::kFloat, op_, argument.name,
             "expected dtype ", dtype_name(query_.tensor.scalar_type()), " (", query_.name,
             "'s) or float32, got ", dtype_name(dtype));
}

c10::SymDimVector SparseRules::query_tokens_and(std::initializer_list<c10::SymInt> rest) const {
  c10::SymDimVector sizes{query_.tensor.sym_size(0)};
  if (layout_ == Layout::BSND) {
    sizes.push_back(query_.tensor.sym_size(1));
  }
  sizes.append(rest.begin(), rest.end());
  return sizes;
}

void SparseRules::check_like_query(NamedTensor argument, const c10::SymInt& heads,
                                   const c10::SymInt& size) const {
  check_same_device(argument);
  check_shape(op_, argument, query_tokens_and({heads, size}),
              layout_ == Layout::TND ? "(T1, N, D)" : "(B, S1, N, D)");
}

void SparseRules::check_like_key(NamedTensor argument, const c10::SymInt& size) const {
  check_same_device(argument);
  const auto& key = key_.tensor;
  if (pages_) {
    check_shape(op_, argument, {{key.sym_size(0), key.sym_size(1), 1, size}},
                "(num_blocks, block_size, 1, D)");
  } else if (layout_ == Layout::TND) {
    check_shape(op_, argument, {{key.sym_size(0), 1, size}}, "(T2, 1, D)");
  } else {
    check_shape(op_, argument, {{query_.tensor.sym_size(0), key.sym_size(1), 1, size}},
                "(B, S2, 1, D)");
  }
}

void SparseRules::check_weights(NamedTensor argument, const c10::SymInt& heads) const {
  check_same_device(argument);
  check_weights_dtype(argument);
  check_shape(op_, argument, query_tokens_and({heads}),
              layout_ == Layout::TND ? "(T1, Nidx)" : "(B, S1, Nidx)");
}

void SparseRules::check_key_factors(NamedTensor argument) const {
  check_same_device(argument);
  check_weights_dtype(argument);
  const auto sizes = key_.tensor.sym_sizes();
  check_shape(op_, argument, sizes.slice(0, sizes.size() - 1), "key's without its last axis");
}

void SparseRules::check_token_weight(NamedTensor argument) const {
  check_same_device(argument);
  const auto dtype = argument.tensor.scalar_type();
  check_type(dtype == at::kBool || at::isFloatingType(dtype), op_, argument.name,
             "expected dtype bool or a floating point dtype, got ", dtype_name(dtype));
  check_shape(op_, argument, query_tokens_and({}), layout_ == Layout::TND ? "(T1)" : "(B, S1)");
}

void SparseRules::check_sparse_indices(NamedTensor argument) const {
  check_integers(op_, argument);
  check_selected_values(argument, argument.tensor);
}

void SparseRules::check_selected_values(NamedTensor argument,
                                        const at::Tensor& sparse_indices) const {
  check_same_device(argument);
  const auto& tensor = argument.tensor;
  const int64_t rank = query_.tensor.dim();
  const bool packed = layout_ == Layout::TND;
  check_value(tensor.dim() == rank || tensor.dim() == rank - 1, op_, argument.name,
              "expected rank ", rank, " for layout ", layout_name(layout_), ", got shape ",
              tensor.sym_sizes());
  const auto& count = sparse_indices.sym_size(-1);
  if (tensor.dim() < rank) {
    check_shape(op_, argument, query_tokens_and({count}), packed ? "(T1, K)" : "(B, S1, K)");
  } else {
    check_shape(op_, argument, selection_sizes(count), packed ? "(T1, 1, K)" : "(B, S1, 1, K)");
  }
}

void SparseRules::check_statistics(NamedTensor argument) const {
  check_same_device(argument);
  check_dtype(op_, argument, statistics_dtype(query_.tensor));
  check_shape(op_, argument, statistics_sizes(),
              layout_ == Layout::TND ? "(1, T1, N1)" : "(B, 1, S1, N1)");
}

void SparseRules::check_ropes(NamedOptionalTensor query_rope, NamedOptionalTensor key_rope) const {
  check_present(query_rope.tensor || !key_rope.tensor, op_, query_rope.name,
                "expected a tensor because key_rope is given, got None");
  check_present(key_rope.tensor || !query_rope.tensor, op_, key_rope.name,
                "expected a tensor because query_rope is given, got None");
  if (!query_rope.tensor) {
    return;
  }
  const NamedTensor query_part{query_rope.name, *query_rope.tensor};
  const NamedTensor key_part{key_rope.name, *key_rope.tensor};
  check_same_device(query_part);
  check_same_device(key_part);
  check_same_dtype(query_part);
  check_same_dtype(key_part);
  check_value(query_part.tensor.dim() == query_.tensor.dim(), op_, query_part.name,
              "expected rank ", query_.tensor.dim(), " for layout ", layout_name(layout_),
              ", got shape ", query_part.tensor.sym_sizes());
  const auto rope_size = query_part.tensor.sym_size(-1);
  check_like_query(query_part, heads_, rope_size);
  check_like_key(key_part, rope_size);
  limits_.size(query_part.name, "Dr", rope_size);
}

void SparseRules::check_lengths(const Lengths& query_lengths, const Lengths& key_lengths) const {
  constexpr std::string_view query_name = "actual_seq_lengths_query";
  const auto key_name = names_.lengths;
  if (pages_) {
    check_present(key_lengths.has_value(), op_, key_name,
                  "expected the number of keys of each sequence, which ", names_.layout,
                  " PA_BSND requires, got None");
  }
  if (layout_ == Layout::TND) {
    for (const auto& [name, lengths] :
         {std::pair(query_name, &query_lengths), std::pair(key_name, &key_lengths)}) {
      check_present(lengths->has_value(), op_, name,
                    "expected the cumulative sequence lengths, which layout TND "
                    "requires, got None");
    }
    check_value(same(query_lengths.count(), key_lengths.count()), op_, key_name,
                "expected as many lengths as actual_seq_lengths_query, ", query_lengths.count(),
                ", got ", key_lengths.count());
    check_not_empty(query_lengths.count());
  } else {
    const auto& batch = query_.tensor.sym_size(0);
    for (const auto& [name, lengths] :
         {std::pair(query_name, &query_lengths), std::pair(key_name, &key_lengths)}) {
      check_value(!*lengths || same(lengths->count(), batch), op_, name,
                  "expected one length per batch, ", batch, ", got ", lengths->count());
    }
  }
  if (pages_) {
    check_block_table(key_lengths.count());
  }
}

void SparseRules::check_compression(int64_t ratio, NamedOptionalTensor residual, int64_t mode,
                                    const Lengths& query_lengths,
                                    const Lengths& key_lengths) const {
  check_cmp_ratio(op_, ratio);
  const auto batch = layout_ == Layout::TND ? query_lengths.count() : query_.tensor.sym_size(0);
  check_residual(op_, residual, query_, batch);
  const bool causal = static_cast<SparseMode>(mode) == SparseMode::right_down_causal;
  if (ratio == 1 || residual.tensor || !causal || query_lengths || key_lengths) {
    return;
  }
  check_derived_residual(op_, residual.name, ratio, batch, query_.tensor.sym_size(1),
                         key_.tensor.sym_size(1));
}

void SparseRules::check_sparse_mode(int64_t mode, std::initializer_list<int64_t> allowed) const {
  std::string expected;
  for (const auto value : allowed) {
    if (value == mode) {
      return;
    }
    expected += (expected.empty() ? "" : " or ") + std::to_string(value);
  }
  raise(Violation::value, op_, "sparse_mode", c10::str("expected ", expected, ", got ", mode));
}

c10::SymDimVector SparseRules::statistics_sizes() const {
  const auto& query = query_.tensor;
  if (layout_ == Layout::TND) {
    return {1, query.sym_size(0), heads_};
  }
  return {query.sym_size(0), 1, query.sym_size(1), heads_};
}

c10::SymDimVector SparseRules::selection_sizes(const c10::SymInt& count) const {
  return query_tokens_and({1, count});
}

}  // namespace ascend_attn

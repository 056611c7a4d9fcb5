#include "ops/flash_attention_score_rules.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"
#include "core/symbolic.h"

namespace ascend_attn {
FlashAttentionRules::FlashAttentionRules(std::string_view op, const OperatorLimits& limits,
                                         const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor& value,
                                         const FlashAttentionOptions& options)
    : DenseShape({.op = op,
                  .layout = check_layout(
                      op, options.layout,
                      {Layout::BSH, Layout::SBH, Layout::BSND, Layout::BNSD, Layout::TND}),
                  .layout_name = options.layout,
                  .query = query,
                  .key = key,
                  .value = value,
                  .query_lengths = options.actual_seq_lengths_query,
                  .key_lengths = options.actual_seq_lengths_key,
                  .heads = options.heads()},
                 limits),
      options_(options),
      table_(limits) {
  read_keys();
  check_value(at_most(value_size_, head_size_), op, "value",
              "expected a head size of at most query's, ", head_size_, ", got ", value_size_,
              " of shape ", value.sym_sizes());
  check_lengths();
  limits_.size("query", "N", heads_);
  limits_.size("query", is_packed() ? "T" : "S", queries_);
  limits_.size("key", is_packed() ? "T" : "S", keys_);
  if (!is_packed()) {
    limits_.size("query", "B", batch_);
  }
}

bool FlashAttentionRules::obeys(const Rule& rule) const {
  return std::ranges::find(table_.rules, rule.expected, &Rule::expected) != table_.rules.end();
}

void FlashAttentionRules::check_lengths() {
  if (!is_packed()) {
    check_counts();
    return;
  }
  check_ends_given(kQueryLengths, query_lengths_, true);
  check_ends_given(kKeyLengths, key_lengths_, true);
  check_as_many_lengths();
  if (!lengths_known()) {
    return;
  }
  query_ends_ = query_lengths_.values();
  key_ends_ = key_lengths_.values();
  const bool closed = query_ends_.back() == 0 && key_ends_.back() == 0;
  if (closed) {
    query_ends_ = query_ends_.slice(0, query_ends_.size() - 1);
    key_ends_ = key_ends_.slice(0, key_ends_.size() - 1);
  }
  check_sequence_lengths(name_, kQueryLengths, layout_, query_ends_, queries_);
  check_sequence_lengths(name_, kKeyLengths, layout_, key_ends_, keys_);
  const bool padded = !closed && queries_.maybe_as_int().value_or(0) > query_sum() &&
                      keys_.maybe_as_int().value_or(0) > key_sum();
  // The launch closes such packs itself, where it can.
  if (padded && has_row_per_sequence(options_)) {
    check_rule(kPaddedPack, false, query_sum(), " of T1 = ", queries_, " and ", key_sum(),
               " of T2 = ", keys_, hint_for_counts(query_ends_, queries_));
  }
  check_count(padded ? batch_ + 1 : batch_);
  check_keys_of_queries();
}

void FlashAttentionRules::check_keys_of_queries() const {
  if (!limits_.on(kKeysOn950.devices)) {
    return;
  }
  const auto sequences = this->sequences();
  const auto without_keys = std::ranges::find_if(
      sequences, [](const Sequence& x) { return x.queries > 0 && x.keys == 0; });
  const bool others = !std::ranges::all_of(sequences, &Sequence::empty);
  if (without_keys != sequences.end() && others) {
    check_rule(kKeysOn950, false, "Sq = ", without_keys->queries, ", Skv = 0 at ",
               without_keys - sequences.begin());
  }
}

// Host code of the device copies the lengths of longer lists over other memory.
void FlashAttentionRules::check_count(const c10::SymInt& sequences) const {
  const auto mode = static_cast<SparseMode>(options_.sparse_mode);
  const bool prefix = mode == SparseMode::prefix_compressed;
  limits_.size(kQueryLengths, prefix ? "sequences with prefix" : "sequences", sequences,
               "; divide them among calls");
}

// Outside TND: how many of its first tokens each batch uses.
void FlashAttentionRules::check_counts() const {
  if (options_.padded()) {
    check_count(batch_);
  }
  for (const auto& [name, lengths, tokens] :
       {std::tuple(kQueryLengths, &options_.actual_seq_lengths_query, &queries_),
        std::tuple(kKeyLengths, &options_.actual_seq_lengths_key, &keys_)}) {
    if (!lengths->given()) {
      continue;
    }
    check_value(same(lengths->count(), batch_), name_, name,
                "expected one count of tokens per batch, ", batch_,
                ", in a layout that is not TND, got ", lengths->count());
    check_sequence_lengths(name_, name, layout_, *lengths, *tokens);
  }
}

void FlashAttentionRules::check_head_size() const {
  limits_.size("query", "D", head_size_);
  limits_.size("query_rope", "D", head_size_ + rope_size_);
}

void FlashAttentionRules::check_extra(const SinkAndRopes& extra) {
  check_sink(extra.sink);
  if (read_ropes(extra.query_rope, extra.key_rope)) {
    check_rope({"key_rope", *extra.key_rope}, key_sizes(rope_size_), "key");
  }
}

void FlashAttentionRules::check_scores() const {
  check_scale_value(name_, options_.scale());
  check_value(options_.pse_type >= 0 && options_.pse_type <= 3, name_, "pse_type",
              "expected 0 (scores * scale + pse), 1 ((scores + pse) * scale), 2 (slopes times "
              "distance) or 3 (slopes times the root of the distance), got ",
              options_.pse_type);
  if (!options_.pse_shift) {
    check_value(options_.pse_type <= 1, name_, "pse_shift", "expected slopes for pse_type ",
                options_.pse_type, ", got None; without a pse_shift pse_type is 0 or 1");
    check_rule(kPseOfTypeZero, options_.pse_type == 1, "None");
    return;
  }
  const NamedTensor pse{"pse_shift", *options_.pse_shift};
  check_device(name_, pse, query());
  options_.pse_type <= 1 ? check_pse_tensor() : check_pse_slopes();
}

void FlashAttentionRules::check_pse_tensor() const {
  const NamedTensor argument{"pse_shift", *options_.pse_shift};
  const auto& pse = argument.tensor;
  check_dtype(name_, argument, query());
  if (is_packed()) {
    check_packed_pse_tensor();
    return;
  }
  const bool compressed = !options_.padded() && is_compressed_pse(pse, queries_, keys_);
  const bool full =
      broadcasts_to(pse, {{batch_, heads_, queries_, keys_}}) && may_equal(pse.sym_size(-1), keys_);
  const bool per_key = full && known_equal(pse.sym_size(0), 1) && known_equal(pse.sym_size(2), 1);
  check_value(
      full || (compressed && (has_shape(pse, {{batch_, heads_, kCompressedPseRows, keys_}}) ||
                              has_shape(pse, {{1, heads_, kCompressedPseRows, keys_}}))),
      name_, "pse_shift",
      "expected (B, N, Sq, Skv), whose axes B, N and Sq may be 1, or, when Sq = Skv > 1024, (B, N, "
      "1024, Skv) or (1, N, 1024, Skv), with B, N, Sq, Skv = ",
      batch_, ", ", heads_, ", ", queries_, ", ", keys_, ", got shape ", pse.sym_sizes());
  const auto mode = options_.sparse_mode;
  check_value(full || (options_.masked() && (mode == 0 || mode == 2 || mode == 3)), name_,
              "pse_shift",
              "expected an atten_mask with sparse_mode 0, 2 or 3 beside the form of 1024 rows, "
              "which has values for causal attention only, got ",
              options_.masked() ? c10::str("sparse_mode ", mode) : "no atten_mask");
  if (compressed && mode == 0) {
    check_rule(kCausalTokens, options_.next_tokens == 0 && options_.pre_tokens >= queries_,
               options_.next_tokens, " and pre_tokens ", options_.pre_tokens);
  }
  if (per_key && batch_ != 1) {
    check_rule(kPsePerKeyOfGradient, queries_ == 1, pse.sym_sizes(), " for B = ", batch_);
  }
}

void FlashAttentionRules::check_packed_pse_tensor() const {
  const auto& pse = *options_.pse_shift;
  const auto sequences = this->sequences();
  if (!lengths_known()) {
    return;
  }
  if (pse.dim() != 4) {
    const auto full = saturated_product(heads_, pair_count(sequences));
    const auto per_key = saturated_product(heads_, key_sum());
    check_value(
        pse.dim() == 1 &&
            (sequences.empty() || pse.sym_size(0) == full || pse.sym_size(0) == per_key),
        name_, "pse_shift",
        "expected one axis in layout TND, of the sum of N * Sq * Skv over the sequences = ", full,
        " or the sum of N * Skv = ", per_key, " elements, got shape ", pse.sym_sizes());
    return;
  }
  // Which rows a shorter sequence reads is not defined.
  const auto length = longest_key();
  const bool equal = std::ranges::all_of(sequences, [&](const Sequence& sequence) {
    return sequence.empty() || (sequence.queries == length && sequence.keys == length);
  });
  check_value(equal && is_compressed_pse(pse, longest_query(), length) &&
                  (has_shape(pse, {{batch_, heads_, kCompressedPseRows, length}}) ||
                   has_shape(pse, {{1, heads_, kCompressedPseRows, length}})),
              name_, "pse_shift",
              "expected one axis in layout TND or, when all sequences have one length Sq = Skv > "
              "1024, (B, N, 1024, Skv) or (1, N, 1024, Skv), with B, N, the longest Sq and Skv = ",
              batch_, ", ", heads_, ", ", longest_query(), ", ", length, ", got shape ",
              pse.sym_sizes());
  const auto mode = options_.sparse_mode;
  check_value(options_.masked() && (mode == 2 || mode == 3), name_, "pse_shift",
              "expected an atten_mask with sparse_mode 2 or 3 beside the form of 1024 rows in "
              "layout TND, got ",
              options_.masked() ? c10::str("sparse_mode ", mode) : "no atten_mask");
}

void FlashAttentionRules::check_pse_slopes() const {
  const NamedTensor argument{"pse_shift", *options_.pse_shift};
  check_dtype(name_, argument, at::kFloat);
  check_value(
      has_shape(argument.tensor, {{heads_}}) || has_shape(argument.tensor, {{batch_, heads_}}),
      name_, "pse_shift", "expected slopes of shape (N) or (B, N) for pse_type ", options_.pse_type,
      ", with B, N = ", batch_, ", ", heads_, ", got shape ", argument.tensor.sym_sizes());
  check_value(is_packed() || options_.padded() || same(queries_, keys_), name_, "pse_type",
              "expected Sq = Skv for slopes (pse_type 2 and 3) outside layout TND, got Sq = ",
              queries_, ", Skv = ", keys_);
  check_start("q_start_idx", options_.q_start_idx);
  check_start("kv_start_idx", options_.kv_start_idx);
  if ((is_packed() || options_.padded()) && limits_) {
    check_slopes_of_sequences();
  }
}

void FlashAttentionRules::check_start(const char* argument,
                                      const OptionalIntListField& list) const {
  // The distance of two positions, in sequences of any length, is a number of 64 bits.
  constexpr int64_t kLargest = int64_t{1} << 61;
  const auto start = options_.first_of(list).value_or(0);
  check_value(start >= -kLargest && start <= kLargest, name_, argument,
              "expected a first element from -2^61 to 2^61, got ", start);
}

void FlashAttentionRules::check_slopes_of_sequences() const {
  const auto sequences = this->sequences();
  const auto unequal = [](const Sequence& sequence) { return sequence.queries != sequence.keys; };
  const auto check_equal = [&](const Rule& rule, auto begin) {
    const auto found = std::find_if(begin, sequences.end(), unequal);
    if (found != sequences.end()) {
      check_rule(rule, false, options_.pse_type, " with Sq = ", found->queries,
                 ", Skv = ", found->keys, " at ", found - sequences.begin());
    }
  };
  check_equal(kSlopesOn950, sequences.begin());
  if (!options_.masked()) {
    return;  // sparse_mode is 0
  }
  const auto mode = static_cast<SparseMode>(options_.sparse_mode);
  check_rule(kSlopesOfMode7, mode != SparseMode::right_down_causal_band, options_.pse_type);
  if (mode != SparseMode::band_left_up_causal || sequences.empty()) {
    return;
  }
  check_equal(kSlopesOfMode8, sequences.begin() + 1);
  const auto of_keys = options_.first_of(options_.kv_start_idx);
  const auto key_start = of_keys.value_or(0);
  const auto query_start = of_keys ? options_.first_of(options_.q_start_idx).value_or(0) : 0;
  const auto& first = sequences.front();
  check_rule(kSlopesOfMode8Band, first.queries + query_start == first.keys + key_start,
             first.queries, " + ", query_start, " and ", first.keys, " + ", key_start);
}

void FlashAttentionRules::check_dropout() const {
  const double keep = options_.keep_prob;
  // The kernels divide by it.
  check_value(keep <= 1 && static_cast<float>(keep) >= std::numeric_limits<float>::min(), name_,
              "keep_prob", "expected a probability in (0, 1] of normal float32, got ", keep);
  if (!options_.drop_mask) {
    check_present(keep == 1, name_, "drop_mask", "expected a tensor for keep_prob ", keep,
                  ", got None; ascend_attn_ops.flash_attention_score(dropout_p=...) draws one");
    return;
  }
  const NamedTensor argument{"drop_mask", *options_.drop_mask};
  check_device(name_, argument, query());
  check_dtype(name_, argument, at::kByte);
  check_value(keep < 1, name_, "drop_mask", "expected None for keep_prob 1, got shape ",
              argument.tensor.sym_sizes());
  const auto pairs = is_packed() ? c10::SymInt(pair_count(sequences()))
                                 : saturated_product(batch_, saturated_product(queries_, keys_));
  const auto bits = saturated_product(heads_, pairs);
  const auto bytes = bits / 8 + (bits % 8 + 7) / 8;
  check_value(at_most(bytes, argument.tensor.sym_numel()), name_, "drop_mask",
              "expected one bit per score, at least ", bytes, " bytes, got shape ",
              argument.tensor.sym_sizes());
  check_rule(kDropoutOn950, false, argument.tensor.sym_sizes());
}

void FlashAttentionRules::check_like_out(NamedTensor argument) const {
  check_device(name_, argument, query());
  check_dtype(name_, argument, query());
  check_shape(name_, argument, out_sizes(), "of the forward's out");
}

void FlashAttentionRules::check_statistics(NamedTensor argument) const {
  check_device(name_, argument, query());
  check_dtype(name_, argument, statistics_dtype(query_));
  const auto sizes = statistics_sizes(kStatisticsLanes);
  const auto* const axes = is_packed() ? "(T1, N, 8)" : "(B, N, Sq, 8)";
  check_value(argument.tensor.dim() == static_cast<int64_t>(sizes.size()), name_, argument.text(),
              "expected shape ", axes, ", of a forward in layout ", layout_name_, ", got ",
              argument.tensor.sym_sizes());
  check_shape(name_, argument, sizes, axes);
}

at::Tensor FlashAttentionRules::out(OutputSource& outputs) const {
  return outputs.tensor(out_sizes(), query_.options());
}

at::Tensor FlashAttentionRules::statistics(OutputSource& outputs) const {
  return outputs.tensor(statistics_sizes(kStatisticsLanes),
                        query_.options().dtype(statistics_dtype(query_)));
}

}  // namespace ascend_attn

// Checks of atten_mask, sparse_mode, prefix, pre_tokens and next_tokens.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "ops/flash_attention_score_rules.h"

namespace ascend_attn {
void FlashAttentionRules::check_mask() const {
  const int64_t mode = options_.sparse_mode;
  if (is_packed()) {
    check_value(mode >= 0 && mode <= kLastSparseMode && mode != 5, name_, "sparse_mode",
                "expected one of 0, 1, 2, 3, 4, 6, 7, 8 in layout TND, got ", mode);
  } else {
    check_value(mode >= 0 && mode <= 6, name_, "sparse_mode",
                "expected one of 0, 1, 2, 3, 4, 5, 6 in layout ", layout_name_, ", got ", mode,
                mode == 7 || mode == 8 ? ", which needs layout TND" : "");
  }
  check_value(!options_.padded() || mode <= 4 || mode == 6, name_, "sparse_mode",
              "expected one of 0, 1, 2, 3, 4, 6 beside the lengths of a padded batch, got ", mode);
  const auto kind = static_cast<SparseMode>(mode);
  check_present(options_.masked() || kind == SparseMode::standard, name_, "atten_mask",
                "expected a full mask for sparse_mode ", mode, ", got None");
  if (!options_.masked()) {
    check_token_sum();
    return;  // all keys are kept
  }
  if (options_.atten_mask) {
    check_mask_tensor();
  }
  if (kind == SparseMode::prefix || kind == SparseMode::prefix_compressed) {
    check_prefix();
  }
  if (kind == SparseMode::band) {
    check_rule(kBandPreTokensOn950, options_.pre_tokens >= 0, options_.pre_tokens);
  }
  if (is_packed() || options_.padded()) {
    check_bands_of_sequences();
  } else if (kind == SparseMode::standard || kind == SparseMode::band) {
    const auto queries = queries_.maybe_as_int();
    const auto keys = keys_.maybe_as_int();
    if (queries && keys && batch_.maybe_as_int() != 0) {
      check_band({.queries = *queries, .keys = *keys});
    }
  }
}

void FlashAttentionRules::check_mask_tensor() const {
  const NamedTensor argument{"atten_mask", *options_.atten_mask};
  const auto dtype = argument.tensor.scalar_type();
  check_device(name_, argument, query());
  check_type(
      dtype == at::kBool || dtype == at::kByte, name_, "atten_mask",
      "expected dtype bool or uint8, where True (1) masks a key out, got ", dtype_name(dtype),
      c10::isFloatingType(dtype) ? "; pass what is added to the scores as pse_shift with pse_type=0"
                                 : "");
  has_compressed_mask(static_cast<SparseMode>(options_.sparse_mode)) ? check_compressed_mask()
                                                                     : check_full_mask();
}

void FlashAttentionRules::check_full_mask() const {
  const auto& mask = *options_.atten_mask;
  const auto mode = options_.sparse_mode;
  if (is_packed()) {
    const auto queries = longest_query();
    const auto keys = longest_key();
    check_value(!lengths_known() || has_shape(mask, {{queries, keys}}) ||
                    broadcasts_to(mask, {{batch_, heads_, queries, keys}}) ||
                    has_shape(mask, {{query_sum(), key_sum()}}),
                name_, "atten_mask",
                "expected shape (maxSq, maxSkv), (B, N, maxSq, maxSkv), whose axes may be 1, or "
                "(sum Sq, sum Skv) for sparse_mode ",
                mode, " in layout TND, with B, N, maxSq, maxSkv = ", batch_, ", ", heads_, ", ",
                queries, ", ", keys, " and sums ", query_sum(), ", ", key_sum(), ", got ",
                mask.sym_sizes());
    return;
  }
  if (mode == static_cast<int64_t>(SparseMode::prefix)) {
    check_value(has_shape(mask, {{batch_, heads_, queries_, keys_}}) ||
                    has_shape(mask, {{batch_, 1, queries_, keys_}}),
                name_, "atten_mask",
                "expected shape (B, N, Sq, Skv) or (B, 1, Sq, Skv) for sparse_mode 5, with B, N, "
                "Sq, Skv = ",
                batch_, ", ", heads_, ", ", queries_, ", ", keys_, ", got ", mask.sym_sizes());
    return;
  }
  if (broadcasts_to(mask, {{batch_, heads_, queries_, keys_}}) ||
      has_shape(mask, {{queries_, keys_}})) {
    return;
  }
  check_value(false, name_, "atten_mask",
              "expected shape (B, N, Sq, Skv), whose axes may be 1, or (Sq, Skv) for sparse_mode ",
              mode, ", with B, N, Sq, Skv = ", batch_, ", ", heads_, ", ", queries_, ", ", keys_,
              ", got ", mask.sym_sizes(),
              has_shape(mask, {{batch_, keys_}}) ? "; pass mask[:, None, None]" : "");
}

void FlashAttentionRules::check_compressed_mask() const {
  const auto& mask = *options_.atten_mask;
  const bool with_prefix =
      options_.sparse_mode == static_cast<int64_t>(SparseMode::prefix_compressed);
  constexpr int64_t size = kCompressedMaskSize;
  const int64_t rows = with_prefix ? size + kCompressedMaskPrefixRows : size;
  check_value(has_shape(mask, {{rows, size}}), name_, "atten_mask",
              "expected the compressed mask of shape (", rows, ", ", size, ") for sparse_mode ",
              options_.sparse_mode, ", whatever Sq and Skv are, got ", mask.sym_sizes(),
              "; it is made when atten_mask is None");
}

void FlashAttentionRules::check_prefix() const {
  const auto& prefix = options_.prefix;
  check_present(prefix.given(), name_, "prefix",
                "expected one number of keys per batch for sparse_mode ", options_.sparse_mode,
                ", got none");
  check_value(same(batch_, prefix.count()), name_, "prefix",
              "expected one number of keys per batch, ", batch_, ", got ", prefix.count());
  limits_.size("prefix", "prefix", batch_);
  if (!prefix.known()) {
    return;
  }
  const auto values = prefix.values();
  const auto sequences = this->sequences();
  for (size_t b = 0; !sequences.empty() && b < values.size(); ++b) {
    const auto value = values[b];
    const auto& [query_begin, queries, key_begin, keys, batch] =
        sequences[std::min(b, sequences.size() - 1)];
    const int64_t least = std::max<int64_t>(keys - queries, 0);
    check_value(value >= least && value <= keys, name_, "prefix", "expected a value in ", least,
                "..", keys, " for Sq = ", queries, ", Skv = ", keys, ", got ", value, " at ", b);
  }
}

// A band must intersect the score matrix.
void FlashAttentionRules::check_band(const Sequence& sequence) const {
  if (sequence.empty()) {
    return;
  }
  const auto queries = sequence.queries;
  const auto keys = sequence.keys;
  const bool bottom_right = options_.sparse_mode == static_cast<int64_t>(SparseMode::band);
  const int64_t shift = bottom_right ? keys - queries : 0;
  const int64_t pre = KeptKeys::bounded(options_.pre_tokens) - shift;
  const int64_t next = KeptKeys::bounded(options_.next_tokens) + shift;
  const auto came = [&](const char* name, int64_t given, int64_t counted) {
    return bottom_right ? c10::str("got ", name, " ", given, ", which is ", counted,
                                   " counted from the top-left corner")
                        : c10::str("got ", name, " ", given);
  };
  check_value(pre >= 0 || next >= 0, name_, "pre_tokens",
              "expected pre_tokens and next_tokens not both behind the diagonal, ",
              came("pre_tokens", options_.pre_tokens, pre), " and ",
              came("next_tokens", options_.next_tokens, next));
  check_value(pre >= 0 || (next >= -pre && -pre < keys), name_, "pre_tokens",
              "expected a negative pre_tokens to be smaller than Skv = ", keys,
              " and at most next_tokens in size, ", came("pre_tokens", options_.pre_tokens, pre),
              " and ", came("next_tokens", options_.next_tokens, next));
  check_value(next >= 0 || (-next <= pre && -next < queries), name_, "next_tokens",
              "expected a negative next_tokens to be smaller than Sq = ", queries,
              " and at most pre_tokens in size, ", came("next_tokens", options_.next_tokens, next),
              " and ", came("pre_tokens", options_.pre_tokens, pre));
}

void FlashAttentionRules::check_no_more_queries(const Rule& rule,
                                                const std::vector<Sequence>& sequences) const {
  for (size_t b = 0; b < sequences.size(); ++b) {
    check_rule(rule, sequences[b].queries <= sequences[b].keys, "Sq = ", sequences[b].queries,
               ", Skv = ", sequences[b].keys, " at ", b);
  }
}

// Launches clamp the tokens to 32 bits.
void FlashAttentionRules::check_token_sum() const {
  const auto clamped = [](int64_t tokens) {
    return std::clamp<int64_t>(tokens, std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int32_t>::max());
  };
  const int64_t sum = clamped(options_.pre_tokens) + clamped(options_.next_tokens);
  if (!options_.masked()) {
    check_rule(kTokensOfGradient, sum >= 0, options_.pre_tokens, " + ", options_.next_tokens);
  } else {
    check_rule(kTokensOfPackedGradient, sum > 0, options_.pre_tokens, " + ", options_.next_tokens);
  }
}

void FlashAttentionRules::check_bands_of_sequences() const {
  const auto sequences = this->sequences();
  const int64_t pre = KeptKeys::bounded(options_.pre_tokens);
  const int64_t next = options_.next_tokens;
  const auto empty = [](const Sequence& sequence) { return sequence.empty(); };
  switch (static_cast<SparseMode>(options_.sparse_mode)) {
    case SparseMode::standard:
      check_value(next >= 0, name_, "next_tokens",
                  "expected at least 0 for sparse_mode 0 in layout TND, got ", next);
      check_token_sum();
      for (size_t b = 0; b < sequences.size(); ++b) {
        check_value(sequences[b].empty() || sequences[b].keys + pre >= sequences[b].queries, name_,
                    "pre_tokens",
                    "expected at least Sq - Skv of every sequence for sparse_mode 0 in layout TND, "
                    "got ",
                    options_.pre_tokens, " for Sq = ", sequences[b].queries,
                    ", Skv = ", sequences[b].keys, " at ", b);
      }
      break;
    case SparseMode::band:
      check_rule(kBandPreTokens, pre >= 0, options_.pre_tokens);
      check_token_sum();
      for (size_t b = 0; b < sequences.size(); ++b) {
        check_band(sequences[b]);
        check_rule(kBandNextTokensOn950,
                   KeptKeys::bounded(next) >= sequences[b].queries - sequences[b].keys, next,
                   " for Sq = ", sequences[b].queries, ", Skv = ", sequences[b].keys, " at ", b);
      }
      break;
    case SparseMode::right_down_causal:
      check_no_more_queries(kQueriesOfMode3, sequences);
      break;
    case SparseMode::right_down_causal_band: {
      const auto last = std::find_if_not(sequences.rbegin(), sequences.rend(), empty);
      if (last != sequences.rend()) {
        check_value(pre >= last->keys, name_, "pre_tokens",
                    "expected at least the keys of the last sequence, ", last->keys,
                    ", for sparse_mode 7, got ", options_.pre_tokens);
      }
      check_value(next <= 0, name_, "next_tokens", "expected at most 0 for sparse_mode 7, got ",
                  next);
      check_no_more_queries(kQueriesOfMode7, sequences);
      if (last != sequences.rend()) {
        check_rule(kBandOfMode7, KeptKeys::bounded(next) >= last->queries - last->keys, next,
                   " for Sq = ", last->queries, ", Skv = ", last->keys);
      }
      break;
    }
    case SparseMode::band_left_up_causal: {
      const auto first = std::find_if_not(sequences.begin(), sequences.end(), empty);
      if (first != sequences.end()) {
        check_value(pre >= first->keys, name_, "pre_tokens",
                    "expected at least the keys of the first sequence, ", first->keys,
                    ", for sparse_mode 8, got ", options_.pre_tokens);
        check_value(next >= first->queries - first->keys, name_, "next_tokens",
                    "expected at least Sq - Skv of the first sequence, ",
                    first->queries - first->keys, ", for sparse_mode 8, got ", next);
      }
      break;
    }
    default:
      break;
  }
}

}  // namespace ascend_attn

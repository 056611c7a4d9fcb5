// The limits of the device's functions.
#include <cstdint>

#include "core/sparse_mode.h"
#include "core/symbolic.h"
#include "ops/fused_infer_attention_score_rules.h"

namespace ascend_attn {
namespace {

constexpr Devices kBefore90 = kA2A3.before(Cann::v9_0);
constexpr int64_t kAbsorbedSize = 512;
constexpr int64_t kRopeSize = 64;

constexpr Rule kValueSize{"value", "query's D as head size, or 128 beside 192"};
constexpr Rule kCommonSize{
    "query",
    "D of 64 or 128, or 192 with values of 128, in packed layouts, BSH_BNSD and BSND_BNSD"};
constexpr Rule kAbsorbedPair{"layout", "an output in NBSD or NTD for absorbed MLA alone"};
constexpr Rule kAbsorbedLayout{"layout",
                               "BSH, BSND, BNSD, TND or an output in NBSD or NTD for absorbed MLA"};
constexpr Rule kRopes{"query_rope", "Dr of 64, beside D of 128 or 512"};
constexpr Rule kAbsorbedKeyHeads{"num_key_value_heads", "1 for absorbed MLA"};
constexpr Rule kAbsorbedHeads{"num_heads", "a power of two up to 128 for absorbed MLA"};
constexpr Rule kAbsorbedPages{"block_table", "a tensor for absorbed MLA"};
constexpr Rule kAbsorbedMode{"sparse_mode", "0, 3 or 4 for absorbed MLA"};
constexpr Rule kAbsorbedLse{"return_softmax_lse", "False for absorbed MLA in packed layouts"};
constexpr Rule kPairLse{"return_softmax_lse", "False for an output in NBSD or NTD", kBefore90};
constexpr Rule kPackedMode{"sparse_mode", "0, 3 or 4 in packed layouts"};
constexpr Rule kPackedPrecise{"inner_precise", "0 in packed layouts whose heads share keys"};
constexpr Rule kPackedBand{"pre_tokens, next_tokens",
                           "at least -Lq and -Lk in sparse_mode 4 of packed layouts"};
constexpr Rule kSmallPages{"key", "block_size of at most 1024"};
constexpr Rule kLargePages{"key", "block_size of 128, or a multiple of it, for this D and Sq > 1"};
constexpr Rule kPagesOfOneQuery{"key", "block_size of at most 512 for this D and Sq = 1"};
constexpr Rule kPageRows{"key", "H of at most 65535 in pages (num_blocks, block_size, H)"};
constexpr Rule kFractals{"key", "D of 64 or 128 in fractal pages, or ropes"};
constexpr Rule kEqualPages{"value", "key's shape in pages"};
constexpr Rule kSinkSize{"sink", "None unless the values' head size is 64 or 128"};
constexpr Rule kSinkPrecise{"inner_precise", "0 beside a sink"};
constexpr Rule kNoSink{"sink", "None", kBefore90};

}  // namespace

const OperatorLimits FusedInferAttentionScore::limits{
    name,
    functions,
    {{kA2A3, {at::kHalf, at::kBFloat16}}, {k950.since(Cann::v9_0), {at::kHalf, at::kBFloat16}}},
    {{"B", "batch size, or the number of packed sequences", {.min = 0, .max = 65536}},
     {"N", "query heads", {.min = 1, .max = 256}},
     {"S", "tokens per sequence", {.min = 0, .max = 20971520}},
     {"D", "head size", {.min = 16, .max = 512, .multiple_of = 16}}},
    {kValueSize,        kCommonSize,      kAbsorbedPair,  kAbsorbedLayout, kRopes,
     kAbsorbedKeyHeads, kAbsorbedHeads,   kAbsorbedPages, kAbsorbedMode,   kAbsorbedLse,
     kPairLse,          kPackedMode,      kPackedPrecise, kPackedBand,     kSmallPages,
     kLargePages,       kPagesOfOneQuery, kPageRows,      kFractals,       kEqualPages,
     kSinkSize,         kSinkPrecise,     kNoSink}};

bool FusedInferRules::absorbed() const {
  return op_.query_rope && head_size_.maybe_as_int() == kAbsorbedSize;
}

bool FusedInferRules::is_size(int64_t size, int64_t value_size) const {
  return head_size_.maybe_as_int() == size && value_size_.maybe_as_int() == value_size;
}

void FusedInferRules::check_limits() const {
  if (!limits_) {
    return;
  }
  limits_.size("query", "B", batch_);
  limits_.size("query", "N", op_.num_heads);
  limits_.size("query", "D", head_size_);
  limits_.size("query", "S", queries_);
  limits_.size("key", "S", keys_);
  check_size_limits();
  if (paged()) {
    check_page_limits();
  }
  if (absorbed()) {
    check_absorbed_limits();
  }
  check_mask_limits();
  check_sink_limits();
}

void FusedInferRules::check_size_limits() const {
  const auto size = head_size_.maybe_as_int();
  limits_.rule(kValueSize, known_equal(head_size_, value_size_) || is_size(192, 128), value_size_);
  limits_.rule(kRopes,
               !op_.query_rope || (rope_size_.maybe_as_int() == kRopeSize &&
                                   (size == 128 || size == kAbsorbedSize)),
               "Dr ", rope_size_, " beside D ", head_size_);
  const bool of_absorbed = layout_.output == Layout::NBSD || layout_.output == Layout::NTD;
  limits_.rule(kAbsorbedPair, !of_absorbed || absorbed(), layout_.name, " with D ", head_size_);
  const bool other_pair = layout_.is_pair() && !of_absorbed;
  limits_.rule(kAbsorbedLayout, !absorbed() || !other_pair, layout_.name);
  const bool is_common = is_size(64, 64) || is_size(128, 128) || is_size(192, 128);
  const bool any_size = !axes_.packed() && (!other_pair || layout_.name == "BNSD_BSND");
  limits_.rule(kCommonSize, any_size || absorbed() || is_common, head_size_, " and ", value_size_,
               " in layout ", layout_.name);
  limits_.rule(kPackedPrecise,
               !axes_.packed() || op_.inner_precise == 0 || known_equal(key_heads_, op_.num_heads),
               op_.inner_precise);
  limits_.rule(kPairLse, !op_.return_softmax_lse || !of_absorbed, "True for layout ", layout_.name);
}

void FusedInferRules::check_page_limits() const {
  const auto size = head_size_.maybe_as_int();
  const auto block = page_size_.maybe_as_int().value_or(0);
  const bool any_multiple = axes_.packed() || absorbed() || size == 64 || size == 128;
  limits_.rule(kSmallPages, block <= 1024, block);
  limits_.rule(kLargePages, any_multiple || queries_.maybe_as_int() == 1 || block % 128 == 0,
               block);
  limits_.rule(kPagesOfOneQuery, any_multiple || queries_.maybe_as_int() != 1 || block <= 512,
               block);
  const auto row = (key_heads_ * head_size_).maybe_as_int().value_or(0);
  limits_.rule(kPageRows, op_.page_form() != PageForm::rows || row <= 65535, row);
  limits_.rule(kFractals,
               op_.page_form() != PageForm::fractals || op_.query_rope || size == 64 || size == 128,
               head_size_);
  limits_.rule(kEqualPages, known_equal(head_size_, value_size_), "a head size of ", value_size_,
               " beside ", head_size_);
}

void FusedInferRules::check_absorbed_limits() const {
  const auto heads = op_.num_heads.maybe_as_int().value_or(1);
  limits_.rule(kAbsorbedKeyHeads, key_heads_.maybe_as_int() == 1, key_heads_);
  limits_.rule(kAbsorbedHeads, heads <= 128 && (heads & (heads - 1)) == 0, heads);
  limits_.rule(kAbsorbedPages, paged(), "None");
  limits_.rule(kAbsorbedMode, op_.sparse_mode == 0 || op_.sparse_mode >= 3, op_.sparse_mode);
  limits_.rule(kAbsorbedLse, !op_.return_softmax_lse || !axes_.packed(), "True for layout ",
               layout_.name);
}

void FusedInferRules::check_mask_limits() const {
  const auto mode = static_cast<SparseMode>(op_.sparse_mode);
  limits_.rule(kPackedMode,
               !axes_.packed() || mode == SparseMode::standard ||
                   mode == SparseMode::right_down_causal || mode == SparseMode::band,
               op_.sparse_mode);
  if (!axes_.packed() || mode != SparseMode::band) {
    return;
  }
  for (const auto& sequence : op_.sequences()) {
    limits_.rule(kPackedBand,
                 op_.pre_tokens >= -sequence.queries && op_.next_tokens >= -sequence.keys,
                 op_.pre_tokens, " and ", op_.next_tokens, " for ", sequence.queries,
                 " queries and ", sequence.keys, " keys");
  }
}

void FusedInferRules::check_sink_limits() const {
  if (!op_.sink) {
    return;
  }
  limits_.rule(kNoSink, false, "a tensor");
  const auto size = value_size_.maybe_as_int();
  limits_.rule(kSinkSize, size == 64 || size == 128, value_size_);
  limits_.rule(kSinkPrecise, op_.inner_precise == 0, op_.inner_precise);
}

}  // namespace ascend_attn

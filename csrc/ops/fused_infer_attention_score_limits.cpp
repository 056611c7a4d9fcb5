// The limits of the device's functions. CANN checks V5, the function of Ascend 950, by other code
// than V4: by op_host/checkers from 9.1 on, and by the tiling of prompt_flash_attention before.
#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/sparse_mode.h"
#include "core/symbolic.h"
#include "ops/fused_infer_attention_score_rules.h"

namespace ascend_attn {
namespace {

constexpr Devices kBefore90 = kA2A3.before(Cann::v9_0);
constexpr Devices k950Before91 = k950.before(Cann::v9_1);
constexpr int64_t kAbsorbedSize = 512;
constexpr int64_t kRopeSize = 64;

constexpr Rule kValueSize{"value", "query's D as head size, or 128 beside 192", kA2A3};
constexpr Rule kValueSizeOf950{
    "value", "query's D as head size, 128 beside 192, or another one if both are at most 128",
    k950};
constexpr Rule kPlainValueSize{
    "value",
    "query's D as head size, or 128 beside 192, in pairs of layouts, beside pages, ropes, a sink "
    "or softmax_lse, and in sparse_mode 1 or 4",
    k950};
constexpr Rule kPackedSize{"query", "D of at most 256, or absorbed MLA, in layout TND",
                           kA2A3.since(Cann::v9_0)};
constexpr Rule kPackedSizeBefore90{
    "query", "D of 64 or 128, 192 with values of 128, or absorbed MLA, in layout TND", kBefore90};
constexpr Rule kPairSize{
    "query", "D of 64 or 128, or 192 with values of 128, in NTD_TND, BSH_BNSD and BSND_BNSD"};
constexpr Rule kAlignedSize{"query", "a multiple of 16 as D in BNSD_BSND", k950};
constexpr Rule kAbsorbedPair{"layout", "an output in NBSD or NTD for absorbed MLA alone"};
constexpr Rule kAbsorbedLayout{"layout",
                               "BSH, BSND, BNSD, TND or an output in NBSD or NTD for absorbed MLA"};
constexpr Rule kRopes{"query_rope", "Dr of 64, beside D of 128 or 512"};
constexpr Rule kAbsorbedKeyHeads{"num_key_value_heads", "1 for absorbed MLA"};
constexpr Rule kAbsorbedHeads{"num_heads", "a power of two up to 128 for absorbed MLA"};
constexpr Rule kAbsorbedPages{"block_table", "a tensor for absorbed MLA", kA2A3};
constexpr Rule kAbsorbedMode{"sparse_mode", "0, 3 or 4 for absorbed MLA"};
constexpr Rule kAbsorbedLse{"return_softmax_lse", "False for absorbed MLA in packed layouts",
                            kA2A3};
constexpr Rule kAbsorbedQueries{"query", "at most 16 tokens per sequence for absorbed MLA",
                                k950Before91};
constexpr Rule kAbsorbedCounts{"actual_seq_lengths_query",
                               "None for absorbed MLA outside packed layouts", k950Before91};
constexpr Rule kPairLse{"return_softmax_lse", "False for an output in NBSD or NTD", kBefore90};
constexpr Rule kPackedMode{"sparse_mode", "0, 3 or 4 in packed layouts", kA2A3};
constexpr Rule kPackedPrecise{"inner_precise", "0 in packed layouts whose heads share keys", kA2A3};
constexpr Rule kPackedBand{"pre_tokens, next_tokens",
                           "at least -Lq and -Lk in sparse_mode 4 of packed layouts", kA2A3};
constexpr Rule kSmallPages{"key", "block_size of at most 1024"};
constexpr Rule kLargePages{"key", "block_size of 128, or a multiple of it, for this D and Sq > 1"};
constexpr Rule kPagesOfOneQuery{"key", "block_size of at most 512 for this D and Sq = 1"};
constexpr Rule kPageRows{"key", "H of at most 65535 in pages (num_blocks, block_size, H)"};
constexpr Rule kFractals{"key", "D of 64 or 128 in fractal pages, or ropes", kA2A3};
constexpr Rule equal_pages(Devices devices) { return {"value", "key's shape in pages", devices}; }
constexpr Rule kEqualPages = equal_pages(kA2A3);
constexpr Rule kEqualPagesOf950 = equal_pages(k950Before91);
constexpr Rule kSinkSize{"sink", "None unless the values' head size is 64 or 128"};
constexpr Rule kSinkPrecise{"inner_precise", "0 beside a sink"};
constexpr Rule kNoSink{"sink", "None", kBefore90};
constexpr Rule kNoInt8{"key_antiquant_scale", "None", k950};
constexpr Rule kInt8Query{"query", "bfloat16 beside int8 keys", kA2A3, Violation::type};
constexpr Rule kInt8Size{"query", "D of 128 beside int8 keys", kA2A3};
constexpr Rule kInt8Queries{"query", "at most 16 tokens per sequence beside int8 keys", kA2A3};
constexpr Rule kInt8Pages{"key", "block_size of 128 or 512 for int8 keys", kA2A3};
constexpr Rule kInt8Layout{"layout", "BSH, BSND, BNSD or TND beside int8 keys", kA2A3};
constexpr Rule kInt8PackBefore90{"layout", "BSH, BSND or BNSD beside int8 keys", kBefore90};
constexpr Rule kInt8PackMode{"key_antiquant_mode", "0 in layout TND", kA2A3};
constexpr Rule kInt8Precise{"inner_precise", "1 beside int8 keys", kA2A3};
constexpr Rule kInt8Mode{"sparse_mode", "3, or 0 without a mask where Sq is 1, beside int8 keys",
                         kA2A3};
constexpr Rule kInt8QuerySize{"query", "D of 512 in int8", kA2A3};
constexpr Rule kInt8QueryPages{"key", "block_size of 128 for int8 queries", kA2A3};
constexpr Rule kInt8QueryLayout{"layout", "another one than BNSD for int8 queries", kA2A3};
constexpr Rule kInt8Lse{"return_softmax_lse", "False beside int8 keys", kA2A3};

// Whether a size is, or may be once it is known: rules let symbols pass, as the real call is
// checked.
bool may_be(const c10::SymInt& size, int64_t expected) {
  return size.maybe_as_int().value_or(expected) == expected;
}

}  // namespace

const OperatorLimits FusedInferAttentionScore::limits{
    name,
    functions,
    {{kA2A3, {at::kHalf, at::kBFloat16}}, {k950.since(Cann::v9_0), {at::kHalf, at::kBFloat16}}},
    {{"B", "batch size, or the number of packed sequences", {.min = 0, .max = 65536}},
     {"N", "query heads", {.min = 1, .max = 256}, kA2A3},
     {"S", "tokens per sequence", {.min = 0, .max = 20971520}},
     {"D", "head size", {.min = 16, .max = 512, .multiple_of = 16}, kA2A3},
     {"D", "head size", {.min = 1, .max = 512}, k950}},
    {kValueSize,        kValueSizeOf950, kPlainValueSize,   kPackedSize,      kPackedSizeBefore90,
     kPairSize,         kAlignedSize,    kAbsorbedPair,     kAbsorbedLayout,  kRopes,
     kAbsorbedKeyHeads, kAbsorbedHeads,  kAbsorbedPages,    kAbsorbedMode,    kAbsorbedLse,
     kAbsorbedQueries,  kAbsorbedCounts, kPairLse,          kPackedMode,      kPackedPrecise,
     kPackedBand,       kSmallPages,     kLargePages,       kPagesOfOneQuery, kPageRows,
     kFractals,         kEqualPages,     kEqualPagesOf950,  kSinkSize,        kSinkPrecise,
     kNoSink,           kNoInt8,         kInt8Query,        kInt8Size,        kInt8Queries,
     kInt8Pages,        kInt8Layout,     kInt8PackBefore90, kInt8PackMode,    kInt8Precise,
     kInt8Mode,         kInt8Lse,        kInt8QuerySize,    kInt8QueryPages,  kInt8QueryLayout}};

bool FusedInferRules::absorbed() const {
  return op_.query_rope && head_size_.maybe_as_int() == kAbsorbedSize;
}

bool FusedInferRules::is_size(int64_t size, int64_t value_size) const {
  return may_be(head_size_, size) && may_be(value_size_, value_size);
}

std::optional<int64_t> FusedInferRules::longest_query() const {
  if (!axes_.packed()) {
    return queries_.maybe_as_int();
  }
  const auto sequences = this->sequences();
  if (sequences.empty()) {
    return std::nullopt;
  }
  return longest(sequences, &Sequence::queries);
}

void FusedInferRules::check_limits() const {
  if (!limits_) {
    return;
  }
  limits_.size("query", "B", batch_);
  limits_.size("query", "N", heads_);
  limits_.size("query", "D", head_size_);
  limits_.size("query", "S", queries_);
  limits_.size("key", "S", keys_);
  check_size_limits();
  if (paged_) {
    check_page_limits();
  }
  if (absorbed()) {
    check_absorbed_limits();
  }
  check_mask_limits();
  check_sink_limits();
  if (op_.quantization.given()) {
    check_quantization_limits();
  }
}

void FusedInferRules::check_size_limits() const {
  const auto size = head_size_.maybe_as_int();
  check_value_size();
  limits_.rule(kRopes,
               !op_.query_rope || (may_be(rope_size_, kRopeSize) &&
                                   (may_be(head_size_, 128) || may_be(head_size_, kAbsorbedSize))),
               "Dr ", rope_size_, " beside D ", head_size_);
  const bool of_absorbed = form_.output == Layout::NBSD || form_.output == Layout::NTD;
  const bool may_be_absorbed = op_.query_rope && may_be(head_size_, kAbsorbedSize);
  limits_.rule(kAbsorbedPair, !of_absorbed || may_be_absorbed, layout_name_, " with D ",
               head_size_);
  const bool other_pair = form_.is_pair() && !of_absorbed;
  limits_.rule(kAbsorbedLayout, !absorbed() || !other_pair, layout_name_);
  const bool is_common = is_size(64, 64) || is_size(128, 128) || is_size(192, 128);
  const bool of_any_size = !other_pair || layout_name_ == "BNSD_BSND";
  const bool is_free = layout_name_ != "TND" || absorbed();
  limits_.rule(kPackedSize, is_free || size.value_or(0) <= 256, head_size_);
  limits_.rule(kPackedSizeBefore90, is_free || is_common, head_size_, " and ", value_size_);
  limits_.rule(kPairSize, of_any_size || is_common, head_size_, " and ", value_size_, " in layout ",
               layout_name_);
  limits_.rule(kAlignedSize, layout_name_ != "BNSD_BSND" || size.value_or(0) % 16 == 0, head_size_);
  limits_.rule(kPackedPrecise,
               !axes_.packed() || op_.quantization.given() || op_.inner_precise == 0 ||
                   may_equal(key_heads_, heads_),
               op_.inner_precise);
  limits_.rule(kPairLse, !op_.return_softmax_lse || !of_absorbed, "True for layout ", layout_name_);
}

void FusedInferRules::check_value_size() const {
  const bool is_usual = may_equal(head_size_, value_size_) || is_size(192, 128);
  limits_.rule(kValueSize, is_usual, value_size_);
  const bool are_small =
      head_size_.maybe_as_int().value_or(0) <= 128 && value_size_.maybe_as_int().value_or(0) <= 128;
  limits_.rule(kValueSizeOf950, is_usual || are_small, value_size_);
  const auto mode = static_cast<SparseMode>(op_.sparse_mode);
  const bool is_plain = !form_.is_pair() && !paged_ && !op_.query_rope && !op_.sink &&
                        !op_.return_softmax_lse && mode != SparseMode::all_mask &&
                        mode != SparseMode::band;
  limits_.rule(kPlainValueSize, is_usual || is_plain, value_size_, " beside ", head_size_);
}

void FusedInferRules::check_page_limits() const {
  const auto block = page_size_.maybe_as_int().value_or(0);
  limits_.rule(kSmallPages, block <= 1024, block);
  const bool of_common_size = may_be(head_size_, 64) || may_be(head_size_, 128);
  const bool packed_on_atlas = axes_.packed() && limits_.on(kA2A3);
  const bool any_multiple =
      op_.query_rope || of_common_size || is_size(192, 128) || packed_on_atlas;
  if (const auto longest = any_multiple ? std::nullopt : longest_query()) {
    limits_.rule(kLargePages, longest == 1 || block % 128 == 0, block);
    limits_.rule(kPagesOfOneQuery, longest != 1 || block <= 512, block);
  }
  const auto row = (key_heads_ * head_size_).maybe_as_int().value_or(0);
  limits_.rule(kPageRows, op_.page_form() != PageForm::rows || row <= 65535, row);
  limits_.rule(kFractals, op_.page_form() != PageForm::fractals || op_.query_rope || of_common_size,
               head_size_);
  for (const auto& rule : {kEqualPages, kEqualPagesOf950}) {
    limits_.rule(rule, may_equal(head_size_, value_size_), "a head size of ", value_size_,
                 " beside ", head_size_);
  }
}

void FusedInferRules::check_absorbed_limits() const {
  const auto heads = heads_.maybe_as_int().value_or(1);
  limits_.rule(kAbsorbedKeyHeads, may_be(key_heads_, 1), key_heads_);
  limits_.rule(kAbsorbedHeads, heads <= 128 && (heads & (heads - 1)) == 0, heads);
  limits_.rule(kAbsorbedPages, paged_, "None");
  limits_.rule(kAbsorbedMode, op_.sparse_mode == 0 || op_.sparse_mode >= 3, op_.sparse_mode);
  limits_.rule(kAbsorbedLse, !op_.return_softmax_lse || !axes_.packed(), "True for layout ",
               layout_name_);
  if (limits_.on(kAbsorbedQueries.devices)) {
    const auto longest = longest_query().value_or(0);
    limits_.rule(kAbsorbedQueries, longest <= 16, longest);
  }
  limits_.rule(kAbsorbedCounts, axes_.packed() || !query_lengths_.given(), "lengths in layout ",
               layout_name_);
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
  for (const auto& sequence : sequences()) {
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
  limits_.rule(kSinkSize, may_be(value_size_, 64) || may_be(value_size_, 128), value_size_);
  limits_.rule(kSinkPrecise, op_.inner_precise == 0, op_.inner_precise);
}

void FusedInferRules::check_quantization_limits() const {
  limits_.rule(kNoInt8, false, "a tensor");
  const auto queries = longest_query();
  limits_.rule(kInt8Queries, queries.value_or(0) <= 16, queries.value_or(0));
  const auto mode = static_cast<SparseMode>(op_.sparse_mode);
  const bool all_keys = mode == SparseMode::standard && !op_.atten_mask && queries.value_or(1) <= 1;
  limits_.rule(kInt8Mode, mode == SparseMode::right_down_causal || all_keys, op_.sparse_mode);
  limits_.rule(kInt8Lse, !op_.return_softmax_lse, "True");
  if (op_.quantization.of_query()) {
    limits_.rule(kInt8QuerySize, may_be(head_size_, 512), head_size_);
    limits_.rule(kInt8QueryPages, may_be(page_size_, 128), page_size_);
    limits_.rule(kInt8QueryLayout, layout_ != Layout::BNSD, layout_name_);
    return;
  }
  limits_.rule(kInt8Query, query_.scalar_type() == at::kBFloat16, dtype_name(query_.scalar_type()));
  limits_.rule(kInt8Size, may_be(head_size_, 128), head_size_);
  limits_.rule(kInt8Pages, may_be(page_size_, 128) || may_be(page_size_, 512), page_size_);
  limits_.rule(kInt8Layout, !form_.is_pair(), layout_name_);
  limits_.rule(kInt8PackBefore90, !is_packed(), layout_name_);
  limits_.rule(kInt8PackMode, !is_packed() || op_.quantization.by_channel(),
               op_.quantization.key_antiquant_mode);
  limits_.rule(kInt8Precise, op_.inner_precise == 1, op_.inner_precise);
}

}  // namespace ascend_attn

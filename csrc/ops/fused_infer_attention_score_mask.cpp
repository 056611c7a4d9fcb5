// Checks of atten_mask, sparse_mode, pre_tokens and next_tokens.
#include <cstdint>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "core/symbolic.h"
#include "ops/fused_infer_attention_score_rules.h"

namespace ascend_attn {
namespace {

constexpr const char* kName = FusedInferAttentionScore::name;

}  // namespace

void FusedInferRules::check_mask() const {
  const int64_t mode = op_.sparse_mode;
  check_value(mode >= 0 && mode <= 4, kName, "sparse_mode",
              "expected 0, 1, 2 (causal from the top left), 3 (causal to the bottom right) or 4 "
              "(band), got ",
              mode);
  if (!op_.atten_mask) {
    check_present(mode == 0, kName, "atten_mask", "expected ",
                  mode == 1 ? "a full mask" : "the compressed mask of shape (2048, 2048)",
                  " for sparse_mode ", mode, ", got None",
                  mode == 1 ? "" : "; ascend_attn_ops.fused_infer_attention_score builds it");
    return;
  }
  const NamedTensor argument{"atten_mask", *op_.atten_mask};
  const auto dtype = argument.tensor.scalar_type();
  check_device(kName, argument, query());
  check_type(dtype == at::kBool || dtype == at::kChar || dtype == at::kByte, kName, "atten_mask",
             "expected dtype bool, int8 or uint8, where True (1) masks a key out, got ",
             dtype_name(dtype));
  has_compressed_mask(static_cast<SparseMode>(mode)) ? check_compressed_mask() : check_full_mask();
  check_band();
}

void FusedInferRules::check_full_mask() const {
  const auto& mask = *op_.atten_mask;
  check_value(!axes_.packed(), kName, "atten_mask", "expected None in sparse_mode ",
              op_.sparse_mode, " for layout ", layout_.name, ", got a tensor",
              "; pass sequences of equal length in layout BSND");
  const int64_t rank = mask.dim();
  const auto equal = [](const c10::SymInt& size, const c10::SymInt& other) {
    return size.sym_eq(other).guard_bool(__FILE__, __LINE__);
  };
  const auto fits_rows = [&] {
    // A mask of two axes has one row for each batch where each has a single query.
    const auto& rows = mask.sym_size(-2);
    return rank == 2 && equal(queries_, 1) ? equal(rows, 1) || same(rows, batch_)
                                           : at_most(queries_, rows);
  };
  const auto fits_batch = [&] {
    return equal(mask.sym_size(0), 1) || same(mask.sym_size(0), batch_);
  };
  const bool fits = rank >= 2 && rank <= 4 && (rank == 2 || fits_batch()) &&
                    (rank < 4 || same(mask.sym_size(1), 1)) && fits_rows() &&
                    at_most(keys_, mask.sym_size(-1));
  check_value(fits, kName, "atten_mask",
              "expected shape (B, Sq, Skv), (1, Sq, Skv), (B, 1, Sq, Skv), (1, 1, Sq, Skv), (Sq, "
              "Skv), or (B, Skv) where Sq = 1, or with more rows and columns, for sparse_mode ",
              op_.sparse_mode, ", with B, Sq, Skv = ", batch_, ", ", queries_, ", ", keys_,
              paged() ? " (Skv is what block_table has room for)" : "", ", got ", mask.sym_sizes());
}

void FusedInferRules::check_compressed_mask() const {
  const auto& mask = *op_.atten_mask;
  constexpr int64_t size = kCompressedMaskSize;
  check_value(has_shape(mask, {{size, size}}) || has_shape(mask, {{1, size, size}}) ||
                  has_shape(mask, {{1, 1, size, size}}),
              kName, "atten_mask",
              "expected the compressed mask of shape (2048, 2048), (1, 2048, 2048) or (1, 1, 2048, "
              "2048) for sparse_mode ",
              op_.sparse_mode, ", whatever Sq and Skv are, got ", mask.sym_sizes(),
              "; ascend_attn_ops.fused_infer_attention_score builds it when atten_mask is None");
}

void FusedInferRules::check_band() const {
  const auto mode = static_cast<SparseMode>(op_.sparse_mode);
  if (mode != SparseMode::standard && mode != SparseMode::band) {
    return;
  }
  const int64_t pre = KeptKeys::bounded(op_.pre_tokens);
  const int64_t next = KeptKeys::bounded(op_.next_tokens);
  check_value(pre >= 0 || next >= 0, kName, "pre_tokens",
              "expected pre_tokens and next_tokens not both negative, got ", op_.pre_tokens,
              " and ", op_.next_tokens);
  check_value(-next <= pre, kName, pre < 0 ? "pre_tokens" : "next_tokens",
              "expected a band that keeps keys, -next_tokens <= pre_tokens, got pre_tokens ",
              op_.pre_tokens, " and next_tokens ", op_.next_tokens);
}

}  // namespace ascend_attn

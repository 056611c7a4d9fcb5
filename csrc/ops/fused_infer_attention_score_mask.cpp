#include <cstdint>

#include "core/error.h"
#include "core/symbolic.h"
#include "ops/fused_infer_attention_score_rules.h"
#include "ops/inference_mask.h"

namespace ascend_attn {
void FusedInferRules::check_mask() const {
  const InferenceMaskRules rules(op_);
  rules.check_mode();
  if (rules.check_mask()) {
    rules.is_compressed() ? rules.check_compressed_mask() : check_full_mask();
  }
  if (op_.masked()) {
    rules.check_band();
  }
}

void FusedInferRules::check_full_mask() const {
  const auto& mask = *op_.atten_mask;
  check_value(!axes_.packed(), kName, "atten_mask", "expected None in sparse_mode ",
              op_.sparse_mode, " for layout ", layout_.name, ", got a tensor",
              "; pass sequences of equal length in layout BSND");
  const int64_t rank = mask.dim();
  const auto fits_rows = [&] {
    // A mask of two axes has one row for each batch where each has a single query.
    const auto& rows = mask.sym_size(-2);
    return rank == 2 && known_equal(queries_, 1) ? may_equal(rows, 1) || same(rows, batch_)
                                                 : at_most(queries_, rows);
  };
  const auto fits_batch = [&] {
    return may_equal(mask.sym_size(0), 1) || same(mask.sym_size(0), batch_);
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

}  // namespace ascend_attn

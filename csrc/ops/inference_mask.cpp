// The checks of atten_mask, sparse_mode, pre_tokens and next_tokens that the operators for
// inference have in common.
#include "core/error.h"
#include "core/sparse_mode.h"
#include "core/symbolic.h"
#include "ops/dense_shape.h"

namespace ascend_attn {

void DenseShape::check_inference_mask(const std::optional<at::Tensor>& mask, int64_t sparse_mode,
                                      int64_t pre_tokens, int64_t next_tokens,
                                      bool rows_are_batches) const {
  check_value(sparse_mode >= 0 && sparse_mode <= 4, name_, "sparse_mode",
              "expected 0, 1, 2 (causal from the top left), 3 (causal to the bottom right) or 4 "
              "(band), got ",
              sparse_mode);
  const auto mode = static_cast<SparseMode>(sparse_mode);
  check_present(mask || mode != SparseMode::all_mask, name_, "atten_mask",
                "expected a full mask for sparse_mode 1, got None");
  if (mask) {
    const auto dtype = mask->scalar_type();
    check_device(name_, {"atten_mask", *mask}, query());
    check_type(dtype == at::kBool || dtype == at::kChar || dtype == at::kByte, name_, "atten_mask",
               "expected dtype bool, int8 or uint8, where True (1) masks a key out, got ",
               dtype_name(dtype));
    if (!has_compressed_mask(mode)) {
      check_full_mask(*mask, sparse_mode, rows_are_batches);
    } else {
      constexpr int64_t size = kCompressedMaskSize;
      check_value(has_shape(*mask, {{size, size}}) || has_shape(*mask, {{1, size, size}}) ||
                      has_shape(*mask, {{1, 1, size, size}}),
                  name_, "atten_mask",
                  "expected the compressed mask of shape (2048, 2048), (1, 2048, 2048) or (1, 1, "
                  "2048, 2048) for sparse_mode ",
                  sparse_mode, ", whatever Sq and Skv are, got ", mask->sym_sizes(),
                  "; it is made when atten_mask is None");
    }
  }
  // A band is not empty, whatever the lengths are.
  if (mode == SparseMode::band || (mask && mode == SparseMode::standard)) {
    const int64_t pre = KeptKeys::bounded(pre_tokens);
    const int64_t next = KeptKeys::bounded(next_tokens);
    check_value(pre >= 0 || next >= 0, name_, "pre_tokens",
                "expected pre_tokens and next_tokens not both negative, got ", pre_tokens, " and ",
                next_tokens);
    check_value(-next <= pre, name_, pre < 0 ? "pre_tokens" : "next_tokens",
                "expected a band that keeps keys, -next_tokens <= pre_tokens, got pre_tokens ",
                pre_tokens, " and next_tokens ", next_tokens);
  }
}

void DenseShape::check_full_mask(const at::Tensor& mask, int64_t sparse_mode,
                                 bool rows_are_batches) const {
  check_value(!is_packed(), name_, "atten_mask", "expected None in sparse_mode ", sparse_mode,
              " for layout ", layout_name_,
              ", got a tensor; pass sequences of equal length in layout BSND");
  const int64_t rank = mask.dim();
  const auto one_or_batch = [&](const c10::SymInt& size) {
    return may_equal(size, 1) || same(size, batch_);
  };
  const bool fits = rank >= 2 && rank <= 4 && (rank == 2 || one_or_batch(mask.sym_size(0))) &&
                    (rank < 4 || same(mask.sym_size(1), 1)) && at_most(keys_, mask.sym_size(-1)) &&
                    (rank == 2 && rows_are_batches ? one_or_batch(mask.sym_size(0))
                                                   : at_most(queries_, mask.sym_size(-2)));
  check_value(fits, name_, "atten_mask", "expected shape (Sq, Skv)",
              rows_are_batches ? ", or (B, Skv) where Sq = 1" : "",
              ", (B, Sq, Skv), (1, Sq, Skv), (B, 1, Sq, Skv) or (1, 1, Sq, Skv), or with more rows "
              "and columns, for sparse_mode ",
              sparse_mode, ", with B, Sq, Skv = ", batch_, ", ", queries_, ", ", keys_,
              paged_ ? " (Skv is what block_table has room for)" : "", ", got ", mask.sym_sizes());
}

}  // namespace ascend_attn

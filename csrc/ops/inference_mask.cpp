#include "ops/inference_mask.h"

#include "core/error.h"
#include "core/symbolic.h"
#include "core/tensor_checks.h"

namespace ascend_attn {

void InferenceMaskRules::check_mode() const {
  check_value(sparse_mode_ >= 0 && sparse_mode_ <= 4, op_, "sparse_mode",
              "expected 0, 1, 2 (causal from the top left), 3 (causal to the bottom right) or 4 "
              "(band), got ",
              sparse_mode_);
}

bool InferenceMaskRules::check_mask() const {
  if (!mask_) {
    check_present(sparse_mode_ != 1, op_, "atten_mask",
                  "expected a full mask for sparse_mode 1, got None");
    return false;
  }
  const NamedTensor argument{"atten_mask", *mask_};
  const auto dtype = mask_->scalar_type();
  check_device(op_, argument, {"query", query_});
  check_type(dtype == at::kBool || dtype == at::kChar || dtype == at::kByte, op_, argument.name,
             "expected dtype bool, int8 or uint8, where True (1) masks a key out, got ",
             dtype_name(dtype));
  return true;
}

void InferenceMaskRules::check_compressed_mask() const {
  constexpr int64_t size = kCompressedMaskSize;
  check_value(has_shape(*mask_, {{size, size}}) || has_shape(*mask_, {{1, size, size}}) ||
                  has_shape(*mask_, {{1, 1, size, size}}),
              op_, "atten_mask",
              "expected the compressed mask of shape (2048, 2048), (1, 2048, 2048) or (1, 1, 2048, "
              "2048) for sparse_mode ",
              sparse_mode_, ", whatever Sq and Skv are, got ", mask_->sym_sizes(),
              "; it is made when atten_mask is None");
}

void InferenceMaskRules::check_band() const {
  const auto mode = static_cast<SparseMode>(sparse_mode_);
  if (mode != SparseMode::standard && mode != SparseMode::band) {
    return;
  }
  const int64_t pre = KeptKeys::bounded(pre_tokens_);
  const int64_t next = KeptKeys::bounded(next_tokens_);
  check_value(pre >= 0 || next >= 0, op_, "pre_tokens",
              "expected pre_tokens and next_tokens not both negative, got ", pre_tokens_, " and ",
              next_tokens_);
  check_value(-next <= pre, op_, pre < 0 ? "pre_tokens" : "next_tokens",
              "expected a band that keeps keys, -next_tokens <= pre_tokens, got pre_tokens ",
              pre_tokens_, " and next_tokens ", next_tokens_);
}

}  // namespace ascend_attn

// The checks of atten_mask, sparse_mode, pre_tokens and next_tokens that the operators for
// inference have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "core/sparse_mode.h"

namespace ascend_attn {

class InferenceMaskRules {
 public:
  template <typename Op>
  explicit InferenceMaskRules(const Op& op)
      : op_(Op::name),
        query_(op.query),
        mask_(op.atten_mask),
        sparse_mode_(op.sparse_mode),
        pre_tokens_(op.pre_tokens),
        next_tokens_(op.next_tokens) {}

  void check_mode() const;
  // Returns whether there is a mask, after checks of its device and dtype.
  bool check_mask() const;
  bool is_compressed() const { return has_compressed_mask(static_cast<SparseMode>(sparse_mode_)); }
  void check_compressed_mask() const;
  // Checks that the band, if the mode has one, is not empty whatever the lengths are.
  void check_band() const;

 private:
  const char* op_;
  const at::Tensor& query_;
  const std::optional<at::Tensor>& mask_;
  int64_t sparse_mode_, pre_tokens_, next_tokens_;
};

}  // namespace ascend_attn

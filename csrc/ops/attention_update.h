// AttentionUpdate: merges attention results over disjoint sets of keys into the result over all of
// them.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "dispatch/arguments.h"

namespace ascend_attn {

struct OperatorLimits;

struct AttentionUpdate {
  static constexpr const char* name = "attention_update";
  static constexpr const char* schema =
      "(Tensor[] lse, Tensor[] local_out) -> (Tensor out, Tensor lse_out)";
  static constexpr std::array functions{"aclnnAttentionUpdate"};
  static const OperatorLimits limits;
  using Outputs = std::tuple<at::Tensor, at::Tensor>;  // out, lse_out

  TensorListField lse, local_out;

  Outputs check_and_allocate() const;

  void save(AutogradContext& context, const Outputs& outputs) const;
  static std::vector<at::Tensor> backward(AutogradContext& context,
                                          const std::vector<at::Tensor>& d_outputs);
};

// The gradients of all parts, stacked along a new first axis. Only autograd calls it.
struct AttentionUpdateGrad {
  static constexpr const char* name = "_attention_update_grad";
  static constexpr const char* schema =
      "(Tensor d_out, Tensor d_lse_out, Tensor[] lse, Tensor[] local_out) -> (Tensor d_lse, "
      "Tensor d_local_out)";
  using Outputs = std::tuple<at::Tensor, at::Tensor>;  // d_lse, d_local_out

  at::Tensor d_out, d_lse_out;
  TensorListField lse, local_out;

  Outputs check_and_allocate() const;
};

// Returns which rows have no key in any part.
at::Tensor rows_without_keys(const at::Tensor& stacked_lse);

}  // namespace ascend_attn

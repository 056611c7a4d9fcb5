#include "ops/attention_update.h"

#include <ATen/ops/stack.h>

#include <limits>
#include <vector>

#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

using AttentionUpdatePrototype = int(AclTensorList lse, AclTensorList local_out,
                                     int64_t update_type, AclTensor out, AclTensor lse_out);
constexpr Launcher<AttentionUpdate, AttentionUpdatePrototype> aclnn_attention_update{
    .reuses_executor = true};

// Asks for lse_out as well.
constexpr int64_t kWithLse = 1;

// Flattens the leading axes: the function takes (rows,) and (rows, D).
std::vector<at::Tensor> as_rows(at::TensorList tensors, at::IntArrayRef sizes) {
  std::vector<at::Tensor> rows;
  for (const auto& tensor : tensors) {
    rows.push_back(tensor.contiguous().view(sizes));
  }
  return rows;
}

void attention_update(const AttentionUpdate& op, AttentionUpdate::Outputs& outputs) {
  const auto& [out, lse_out] = outputs;
  const int64_t rows = lse_out.numel();
  const int64_t size = out.size(-1);
  const auto lse = as_rows(op.lse, {rows});
  const auto local_out = as_rows(op.local_out, {rows, size});
  const auto out_rows = out.view({rows, size});
  const auto lse_rows = lse_out.view({rows});
  aclnn_attention_update(at::TensorList(lse), at::TensorList(local_out), kWithLse, out_rows,
                         lse_rows);
  // The device's result for rows without keys is not documented.
  const auto empty = rows_without_keys(at::stack(lse));
  out_rows.masked_fill_(empty.unsqueeze(-1), 0);
  lse_rows.masked_fill_(empty, -std::numeric_limits<double>::infinity());
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_kernel<AttentionUpdate, attention_update>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn

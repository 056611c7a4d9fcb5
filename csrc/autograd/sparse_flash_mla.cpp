#include "ops/sparse_flash_mla.h"

#include <utility>

#include "autograd/saved_call.h"
#include "core/determinism.h"
#include "core/error.h"
#include "dispatch/operator.h"

namespace ascend_attn {

bool SparseFlashMla::differentiable() const {
  check_implemented(!pages.layout_kv.paged(), name, "layout_kv",
                    "expected keys without block tables where a gradient is required, got PA_BSND; "
                    "call it under torch.no_grad(), or detach the tensors");
  return true;
}

SparseFlashMla SparseFlashMla::recorded() const {
  auto op = *this;
  op.return_softmax_lse = true;
  return op;
}

SparseFlashMla::Outputs SparseFlashMla::returned(const Outputs& outputs) const {
  const auto& [out, softmax_lse] = outputs;
  return return_softmax_lse ? outputs : Outputs{out, new_tensor({0}, softmax_lse.options())};
}

std::vector<size_t> SparseFlashMla::constant_outputs() const {
  return return_softmax_lse ? std::vector<size_t>() : std::vector<size_t>{1};
}

void SparseFlashMla::save(AutogradContext& context, const Outputs& outputs) const {
  const auto& [out, softmax_lse] = outputs;
  SavedCall<SparseFlashMla>::save(context, *this, {out, softmax_lse});
  context.saved_data["deterministic"] = is_deterministic(options.deterministic);
}

variable_list SparseFlashMla::backward(AutogradContext& context, const variable_list& d_outputs) {
  const auto& d_out = d_outputs[0];
  const auto& d_softmax_lse = d_outputs[1];
  if (!d_out.defined() && !d_softmax_lse.defined()) {
    return no_gradients<SparseFlashMla>();
  }
  const SavedCall<SparseFlashMla> saved(context);
  const auto& op = saved.op();
  auto options = op.options;
  options.deterministic = context.saved_data["deterministic"].toBool();
  const auto [d_query, d_ori_kv, d_cmp_kv, d_sink, cmp_softmax_l1_norm] =
      call(SparseFlashMlaGrad{.query = op.query,
                              .ori_kv = op.ori_kv,
                              .cmp_kv = op.cmp_kv,
                              .cmp_sparse_indices = op.cmp_sparse_indices,
                              .d_out = if_defined(d_out),
                              .out = saved.output(0),
                              .softmax_lse = saved.output(1),
                              .options = options,
                              .d_softmax_lse = if_defined(d_softmax_lse)});
  return gradients_of(op, std::tie(d_query, d_ori_kv, d_cmp_kv, d_sink), op.query, op.ori_kv,
                      op.cmp_kv, op.options.sink);
}

}  // namespace ascend_attn

#include "ops/flash_attention_score.h"

#include <torch/library.h>

#include <vector>

#include "autograd/operator_function.h"

namespace ascend_attn {
namespace {

using c10::IValue;

IValue list_value(at::OptionalSymIntArrayRef list) {
  return list.has_value() ? IValue(*list) : IValue();
}

// A list that was saved for the backward.
class SavedList {
 public:
  explicit SavedList(const IValue& value)
      : given_(!value.isNone()),
        values_(given_ ? value.toSymIntVector() : std::vector<c10::SymInt>()) {}

  operator at::OptionalSymIntArrayRef() const {
    return given_ ? at::OptionalSymIntArrayRef(values_) : std::nullopt;
  }

 private:
  bool given_;
  std::vector<c10::SymInt> values_;
};

struct FlashAttentionFunction : OperatorFunction<FlashAttentionFunction, FlashAttentionScore> {
  static bool differentiable(const FlashAttentionScore& op) {
    const auto& pse = op.options.pse_shift;
    if (pse && pse->requires_grad()) {
      check_implemented(op.options.pse_type <= 1, op.name, "pse_shift",
                        "expected no gradient to be wanted of the slopes of pse_type ",
                        op.options.pse_type, ", got a tensor that requires grad; detach it");
      check_implemented(pse->device().is_cpu() || pse->is_meta(), op.name, "pse_shift",
                        "expected no gradient to be wanted on ", pse->device(),
                        ", whose aclnnFlashAttentionScoreGradV2 has none for it, got a tensor that "
                        "requires grad; detach it, or use the CPU");
    }
    return true;
  }

  static void save(AutogradContext* context, const FlashAttentionScore& op,
                   const Outputs& outputs) {
    const auto& [out, softmax_max, softmax_sum] = outputs;
    const auto& o = op.options;
    context->save_for_backward({op.query, op.key, op.value, out, softmax_max, softmax_sum,
                                o.pse_shift.value_or(at::Tensor()),
                                o.drop_mask.value_or(at::Tensor()),
                                o.atten_mask.value_or(at::Tensor())});
    context->mark_non_differentiable({softmax_max, softmax_sum});
    auto& saved = context->saved_data;
    saved["num_heads"] = o.num_heads;
    saved["layout"] = std::string(o.layout);
    saved["prefix"] = list_value(o.prefix);
    saved["actual_seq_lengths_query"] = list_value(o.actual_seq_lengths_query);
    saved["actual_seq_lengths_key"] = list_value(o.actual_seq_lengths_key);
    saved["q_start_idx"] = list_value(o.q_start_idx);
    saved["kv_start_idx"] = list_value(o.kv_start_idx);
    saved["scale_value"] = o.scale_value;
    saved["keep_prob"] = o.keep_prob;
    saved["pre_tokens"] = o.pre_tokens;
    saved["next_tokens"] = o.next_tokens;
    saved["inner_precise"] = o.inner_precise;
    saved["sparse_mode"] = o.sparse_mode;
    saved["pse_type"] = o.pse_type;
    saved["pse_requires_grad"] = o.pse_shift && o.pse_shift->requires_grad();
  }

  static variable_list gradients(AutogradContext* context, const variable_list& incoming) {
    auto gradients = no_gradients();
    if (!incoming[0].defined()) {
      return gradients;
    }
    std::tie(gradients[0], gradients[1], gradients[2]) =
        call_grad<FlashAttentionScoreGrad>(context, incoming[0]);
    if (context->saved_data["pse_requires_grad"].toBool()) {
      constexpr size_t pse_shift = 5;
      std::tie(gradients[pse_shift]) = call_grad<FlashAttentionPseGrad>(context, incoming[0]);
    }
    return gradients;
  }

 private:
  template <typename Grad>
  static typename Grad::Outputs call_grad(AutogradContext* context, const at::Tensor& d_out) {
    const auto tensors = context->get_saved_variables();
    const auto optional = [&tensors](size_t index) {
      return tensors[index].defined() ? std::optional(tensors[index]) : std::nullopt;
    };
    auto& saved = context->saved_data;
    const SavedList prefix(saved["prefix"]);
    const SavedList query_lengths(saved["actual_seq_lengths_query"]);
    const SavedList key_lengths(saved["actual_seq_lengths_key"]);
    const SavedList q_start_idx(saved["q_start_idx"]);
    const SavedList kv_start_idx(saved["kv_start_idx"]);
    return call<Grad>(tensors[0], tensors[1], tensors[2], d_out, tensors[4], tensors[5], tensors[3],
                      saved["num_heads"].toSymInt(), saved["layout"].toStringRef(), optional(6),
                      optional(7), optional(8), prefix, query_lengths, key_lengths, q_start_idx,
                      kv_start_idx, saved["scale_value"].toDouble(), saved["keep_prob"].toDouble(),
                      saved["pre_tokens"].toInt(), saved["next_tokens"].toInt(),
                      saved["inner_precise"].toInt(), saved["sparse_mode"].toInt(),
                      saved["pse_type"].toInt());
  }
};

TORCH_LIBRARY_IMPL(ascend, Autograd, m) {
  m.impl(FlashAttentionScore::name, &FlashAttentionFunction::kernel);
  m.impl(FlashAttentionScoreGrad::name, &FirstDerivativeOnly<FlashAttentionScoreGrad>::kernel);
  m.impl(FlashAttentionPseGrad::name, &FirstDerivativeOnly<FlashAttentionPseGrad>::kernel);
}

}  // namespace
}  // namespace ascend_attn

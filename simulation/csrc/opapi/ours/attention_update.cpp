// AttentionUpdate. Prototype: docs/specification/attention_update.md.
#include <ATen/core/TensorBody.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

// The device's results for rows that are -inf in every part are not documented: here they are NaN.
std::tuple<at::Tensor, at::Tensor> as_on_the_device(at::TensorList lse, at::TensorList local_out) {
  static const auto operation =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ascend::attention_update", "")
          .typed<std::tuple<at::Tensor, at::Tensor>(at::TensorList, at::TensorList)>();
  const auto [out, lse_out] = operation.call(lse, local_out);
  const auto empty = lse_out.eq(-std::numeric_limits<double>::infinity());
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  return {out.masked_fill(empty.unsqueeze(-1), kNaN), lse_out.masked_fill(empty, kNaN)};
}

TORCH_LIBRARY(cann_sim, m) {
  m.def("attention_update(Tensor[] lse, Tensor[] local_out) -> (Tensor, Tensor)", as_on_the_device);
}

const Function attention_update{
    .name = "aclnnAttentionUpdate",
    .schema_name = "cann_sim::attention_update",
    .workspace = 2048,
    .arguments = {input("lse", "lse", {ACL_FLOAT}),
                  input("localOut", "local_out", {ACL_FLOAT16, ACL_BF16, ACL_FLOAT}),
                  attribute("updateType"), output("out"), optional_output("lseOut")}};

}  // namespace

extern "C" {

int aclnnAttentionUpdateGetWorkspaceSize(TensorList lse, TensorList local_out, int64_t update_type,
                                         Tensor out, Tensor lse_out, uint64_t* workspace_size,
                                         aclOpExecutor** executor) {
  return prepare(attention_update, workspace_size, executor, lse, local_out, update_type, out,
                 lse_out);
}
int aclnnAttentionUpdate(void* workspace, uint64_t size, aclOpExecutor* executor,
                         aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

}  // extern "C"

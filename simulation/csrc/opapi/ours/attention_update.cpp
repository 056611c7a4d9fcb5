// AttentionUpdate. Prototype: docs/specification/attention_update.md.
#include <limits>

#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

// The device's results for rows that are infinite in every part are not documented: here they are
// NaN.
torch::jit::Stack as_on_the_device(const Call& call) {
  const auto results = call.results();
  const auto lse = results[1].toTensor();
  const auto empty = lse.eq(-std::numeric_limits<double>::infinity());
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  return {results[0].toTensor().masked_fill(empty.unsqueeze(-1), kNaN),
          lse.masked_fill(empty, kNaN)};
}

const Function attention_update{
    .name = "aclnnAttentionUpdate",
    .schema_name = "ascend::attention_update",
    .workspace = 2048,
    .arguments = {input("lse", "lse", {ACL_FLOAT}),
                  input("localOut", "local_out", {ACL_FLOAT16, ACL_BF16, ACL_FLOAT}),
                  attribute("updateType"), output("out"), optional_output("lseOut")},
    .compute = as_on_the_device};

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

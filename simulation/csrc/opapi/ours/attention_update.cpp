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

}  // namespace

CANN_SIM_FUNCTION(aclnnAttentionUpdate,
                  {.schema_name = "ascend::attention_update",
                   .workspace = 2048,
                   .compute = as_on_the_device},
                  input<TensorList>("lse", "lse", kFloat),
                  input<TensorList>("localOut", "local_out", kHalfOrFloat),
                  attribute<int64_t>("updateType"), output("out"), optional_output("lseOut"))

// AttentionUpdate. Prototype: docs/operators/attention_update.md.
#include <limits>

#include "ascendcl/runtime.h"
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

// CANN has these in aclnn_attention_update.cpp and in the tiling.
void check(const Call& call) {
  const auto type = call.get<int64_t>("updateType");
  const auto& parts = call.get<std::vector<TensorView>>("localOut");
  const size_t most = cann_version() >= kCann91 ? 128 : 16;
  TORCH_CHECK(type == 0 || type == 1, "updateType ", type, " is not 0 or 1");
  TORCH_CHECK(type == 1 || !call.find<TensorView>("lseOut"), "updateType 0 has no lseOut");
  TORCH_CHECK(parts.size() <= most, "localOut has ", parts.size(), " tensors, more than ", most);
  TORCH_CHECK(parts.empty() || parts.front().sizes.empty() || parts.front().sizes.back() % 8 == 0,
              "localOut: the last size is no multiple of 8");
  if (type == 1 && !call.find<TensorView>("lseOut")) {
    throw Refusal(kNullPointer, "lseOut is nullptr");
  }
}

}  // namespace

CANN_SIM_FUNCTION(aclnnAttentionUpdate,
                  {.schema_name = "ascend::attention_update",
                   .workspace = 2048,
                   .device = {.check = check},
                   .compute = as_on_the_device},
                  input<TensorList>("lse", "lse", kFloat),
                  input<TensorList>("localOut", "local_out", kHalfOrFloat),
                  attribute<int64_t>("updateType"), output("out").like("localOut"),
                  optional_output("lseOut").like("lse"))

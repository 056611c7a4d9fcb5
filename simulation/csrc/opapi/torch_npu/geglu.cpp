// GeGlu and its gradient: one half times the gelu of the other.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>

#include <utility>

#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;

const char* approximation(const Call& call) {
  return call.get<int64_t>("approximate") == 1 ? "tanh" : "none";
}

// The half that is multiplied, and the one that goes through gelu.
std::pair<at::Tensor, at::Tensor> halves(const Call& call) {
  const auto parts = call.tensor("self").to(at::kFloat).chunk(2, call.get<int64_t>("dim"));
  return call.get<bool>("activateLeft") ? std::pair(parts[1], parts[0])
                                        : std::pair(parts[0], parts[1]);
}

Stack product(const Call& call) {
  const auto [factor, gated] = halves(call);
  const auto gelu = at::gelu(gated, approximation(call));
  return {factor * gelu, gelu};
}

Stack gradient(const Call& call) {
  const auto [factor, gated] = halves(call);
  const auto dy = call.tensor("gradOutput").to(at::kFloat);
  auto left = dy * call.tensor("gelu").to(at::kFloat);
  auto right = at::gelu_backward(dy * factor, gated, approximation(call));
  if (call.get<bool>("activateLeft")) {
    std::swap(left, right);
  }
  return {at::cat({left, right}, call.get<int64_t>("dim"))};
}

constexpr auto kOptions = join(attribute<int64_t>("dim"), attribute<int64_t>("approximate"),
                               attribute<bool>("activateLeft"));

}  // namespace

CANN_SIM_FUNCTION(aclnnGeGluV3, {.compute = product}, input("self", "", kHalfOrFloat), kOptions,
                  output("out"), output("outGelu"))
CANN_SIM_FUNCTION(aclnnGeGluV3Backward, {.compute = gradient},
                  input("gradOutput", "", kHalfOrFloat), input("self", "", kHalfOrFloat),
                  input("gelu", "", kHalfOrFloat), kOptions, output("gradInput"))

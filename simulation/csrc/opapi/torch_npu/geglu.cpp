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

const Arguments kOptions{attribute("dim"), attribute("approximate"), attribute("activateLeft")};
const Function geglu{
    .name = "aclnnGeGluV3",
    .arguments =
        join({{input("self", "", kHalfOrFloat)}, kOptions, {output("out"), output("outGelu")}}),
    .compute = product};
const Function geglu_grad{
    .name = "aclnnGeGluV3Backward",
    .arguments = join({{input("gradOutput", "", kHalfOrFloat), input("self", "", kHalfOrFloat),
                        input("gelu", "", kHalfOrFloat)},
                       kOptions,
                       {output("gradInput")}}),
    .compute = gradient};

}  // namespace

extern "C" {

int aclnnGeGluV3GetWorkspaceSize(Tensor x, int64_t dim, int64_t approximate, bool activate_left,
                                 Tensor out, Tensor gelu, uint64_t* workspace_size,
                                 aclOpExecutor** executor) {
  return prepare(geglu, workspace_size, executor, x, dim, approximate, activate_left, out, gelu);
}
CANN_SIM_SECOND_PHASE(aclnnGeGluV3)

int aclnnGeGluV3BackwardGetWorkspaceSize(Tensor dy, Tensor x, Tensor gelu, int64_t dim,
                                         int64_t approximate, bool activate_left, Tensor dx,
                                         uint64_t* workspace_size, aclOpExecutor** executor) {
  return prepare(geglu_grad, workspace_size, executor, dy, x, gelu, dim, approximate, activate_left,
                 dx);
}
CANN_SIM_SECOND_PHASE(aclnnGeGluV3Backward)

}  // extern "C"

// SwiGlu and its gradient: silu of the first half times the second.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;

std::vector<at::Tensor> halves(const Call& call) {
  return call.tensor("x").to(at::kFloat).chunk(2, call.get<int64_t>("dimOptional"));
}

Stack product(const Call& call) {
  const auto parts = halves(call);
  return {at::silu(parts[0]) * parts[1]};
}

Stack gradient(const Call& call) {
  const auto parts = halves(call);
  const auto dy = call.tensor("yGrad").to(at::kFloat);
  return {at::cat({at::silu_backward(dy * parts[1], parts[0]), dy * at::silu(parts[0])},
                  call.get<int64_t>("dimOptional"))};
}

}  // namespace

CANN_SIM_FUNCTION(aclnnSwiGlu, {.compute = product}, input("x", "", kHalfOrFloat),
                  attribute<int64_t>("dimOptional"), output("out"))
CANN_SIM_FUNCTION(aclnnSwiGluGrad, {.compute = gradient}, input("yGrad", "", kHalfOrFloat),
                  input("x", "", kHalfOrFloat), attribute<int64_t>("dimOptional"), output("out"))

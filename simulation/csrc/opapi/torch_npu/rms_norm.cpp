// RmsNorm, its gradient, and AddRmsNorm.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>

#include <numeric>

#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;

// The axes that gamma scales: the last ones.
std::vector<int64_t> normalized_axes(const at::Tensor& gamma) {
  std::vector<int64_t> axes(gamma.dim());
  std::iota(axes.begin(), axes.end(), -gamma.dim());
  return axes;
}

// The normalized x, and the reciprocal of its root mean square, in float32.
Stack normalized(const Call& call, const at::Tensor& given) {
  const auto gamma = call.tensor("gamma");
  const auto x = given.to(at::kFloat);
  const auto squares = at::mean(x * x, normalized_axes(gamma), /*keepdim=*/true);
  const auto rstd = at::rsqrt(squares + call.get<double>("epsilon"));
  return {x * rstd * gamma.to(at::kFloat), rstd};
}

Stack norm(const Call& call) { return normalized(call, call.tensor("x")); }

// The sum is normalized as it is given out, rounded.
Stack add_norm(const Call& call) {
  const auto x1 = call.tensor("x1");
  const auto sum = (x1.to(at::kFloat) + call.tensor("x2").to(at::kFloat)).to(x1.scalar_type());
  auto results = normalized(call, sum);
  results.emplace_back(sum);
  return results;
}

Stack norm_gradient(const Call& call) {
  const auto gamma = call.tensor("gamma").to(at::kFloat);
  const auto dy = call.tensor("dy").to(at::kFloat);
  const auto rstd = call.tensor("rstd");
  const auto x = call.tensor("x").to(at::kFloat) * rstd;
  const auto dx = dy * gamma;
  const auto along_x = at::mean(dx * x, normalized_axes(gamma), /*keepdim=*/true);
  return {(dx - x * along_x) * rstd, (dy * x).sum_to_size(gamma.sizes())};
}

}  // namespace

CANN_SIM_FUNCTION(aclnnRmsNorm, {.compute = norm}, input("x", "", kHalfOrFloat),
                  input("gamma", "", kHalfOrFloat), attribute<double>("epsilon"), output("yOut"),
                  output("rstdOut"))
CANN_SIM_FUNCTION(aclnnAddRmsNorm, {.compute = add_norm}, input("x1", "", kHalfOrFloat),
                  input("x2", "", kHalfOrFloat), input("gamma", "", kHalfOrFloat),
                  attribute<double>("epsilon"), output("yOut"), output("rstdOut"), output("xOut"))
CANN_SIM_FUNCTION(aclnnRmsNormGrad, {.compute = norm_gradient}, input("dy", "", kHalfOrFloat),
                  input("x", "", kHalfOrFloat), input("rstd", "", kFloat),
                  input("gamma", "", kHalfOrFloat), output("dxOut"), output("dgammaOut"))

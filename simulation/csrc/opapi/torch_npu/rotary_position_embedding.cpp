// RotaryPositionEmbedding and its gradient: y = x * cos + turned(x) * sin.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

using torch::jit::Stack;

enum Mode : int64_t { kHalves = 0, kInterleaved = 1, kQuarters = 2, kInterleavedHalves = 3 };

at::Tensor turned_halves(const at::Tensor& x) {
  const auto parts = x.chunk(2, -1);
  return at::cat({-parts[1], parts[0]}, -1);
}

// Maps pairs of elements (a, b) to (-b, a). The transpose of this map is its negative.
at::Tensor turned(const at::Tensor& x, int64_t mode) {
  switch (mode) {
    case kHalves:
    case kInterleavedHalves:
      return turned_halves(x);
    case kInterleaved: {
      const auto pairs = x.unflatten(-1, {-1, 2});
      return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
    }
    case kQuarters: {
      const auto halves = x.chunk(2, -1);
      return at::cat({turned_halves(halves[0]), turned_halves(halves[1])}, -1);
    }
    default:
      TORCH_CHECK(false, "the simulation has no mode ", mode);
  }
}

// Mode 3 takes the elements of even position in front of those of odd position.
at::Tensor in_order(const at::Tensor& x, int64_t mode) {
  return mode == kInterleavedHalves ? x.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2) : x;
}
at::Tensor in_order_before(const at::Tensor& x, int64_t mode) {
  return mode == kInterleavedHalves ? x.unflatten(-1, {2, -1}).transpose(-1, -2).flatten(-2) : x;
}

at::Tensor in_float(const Call& call, std::string_view name) {
  return call.tensor(name).to(at::kFloat);
}

Stack rotation(const Call& call) {
  const auto mode = call.get<int64_t>("mode");
  const auto x = in_order(in_float(call, "x"), mode);
  return {x * in_float(call, "cos") + turned(x, mode) * in_float(call, "sin")};
}

// The caller may pass a rotation matrix instead of a mode.
Stack rotation_v2(const Call& call) {
  if (!call.optional_tensor("rotateOptional")) {
    return rotation(call);
  }
  const auto x = in_float(call, "x");
  const auto by_matrix = x.matmul(in_float(call, "rotateOptional"));
  return {x * in_float(call, "cos") + by_matrix * in_float(call, "sin")};
}

// Without x there are no gradients of cos and sin.
Stack gradient(const Call& call) {
  const auto mode = call.get<int64_t>("mode");
  const auto dy = in_float(call, "dy");
  const auto cos = in_float(call, "cos");
  const auto sin = in_float(call, "sin");
  Stack gradients{in_order_before(dy * cos - turned(dy * sin, mode), mode)};
  if (call.optional_tensor("xOptional")) {
    const auto x = in_order(in_float(call, "xOptional"), mode);
    gradients.emplace_back((dy * x).sum_to_size(cos.sizes()));
    gradients.emplace_back((dy * turned(x, mode)).sum_to_size(sin.sizes()));
  }
  return gradients;
}

constexpr auto kInputs = join(input("x", "", kHalfOrFloat), input("cos", "", kHalfOrFloat),
                              input("sin", "", kHalfOrFloat), attribute<int64_t>("mode"));

}  // namespace

CANN_SIM_FUNCTION(aclnnRotaryPositionEmbedding, {.compute = rotation}, kInputs, output("out"))
CANN_SIM_FUNCTION(aclnnRotaryPositionEmbeddingV2, {.compute = rotation_v2}, kInputs,
                  optional_input("rotateOptional"), output("out"))
CANN_SIM_FUNCTION(aclnnRotaryPositionEmbeddingGrad, {.compute = gradient},
                  input("dy", "", kHalfOrFloat), input("cos", "", kHalfOrFloat),
                  input("sin", "", kHalfOrFloat), optional_input("xOptional", "", kHalfOrFloat),
                  attribute<int64_t>("mode"), output("dxOut"), output("dcosOut"), output("dsinOut"))

// The mask of a dropout, which torch_npu draws before it calls an attention.
#include "opapi/torch_npu/dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>

#include "opapi/core/opapi.h"

using namespace cann_sim;

at::Tensor cann_sim::dropout_bits(int64_t seed, int64_t offset, double keep, int64_t bytes) {
  constexpr int64_t kBitsPerByte = 8;
  constexpr uint64_t kOddFactor = 0x9E3779B97F4A7C15U;
  const auto mixed = static_cast<uint64_t>(seed) ^ (static_cast<uint64_t>(offset) * kOddFactor);
  auto kept = at::empty({bytes, kBitsPerByte});
  kept.bernoulli_(keep, at::make_generator<at::CPUGeneratorImpl>(mixed));
  return kept.mv(at::pow(2, at::arange(kBitsPerByte, at::kFloat))).to(at::kByte);
}

namespace {

torch::jit::Stack drop_mask(const Call& call) {
  const auto in_tensor = [&](const char* name) {
    const auto tensor = call.optional_tensor(name);
    return tensor ? tensor->item<int64_t>() : 0;
  };
  const auto* seed = call.find<int64_t>("seed");
  return {dropout_bits(seed ? *seed : in_tensor("seedTensor"),
                       call.get<int64_t>("offset") + in_tensor("offsetTensor"),
                       1.0 - call.get<double>("prob"), call.get<TensorView>("out").sizes.at(0))};
}

constexpr auto kShapeAndProbability = join(attribute<IntArray>("shape"), attribute<double>("prob"));
constexpr auto kRest =
    join(attribute<int64_t>("offset"), attribute<aclDataType>("probDataType"), output("out"));

}  // namespace

CANN_SIM_FUNCTION(aclnnDropoutGenMaskV2, {.compute = drop_mask}, kShapeAndProbability,
                  attribute<int64_t>("seed"), kRest)
// In a graph, a replay writes the seed and the offset that its calls begin with.
CANN_SIM_FUNCTION(aclnnDropoutGenMaskV2Tensor, {.compute = drop_mask}, kShapeAndProbability,
                  input("seedTensor", "", {ACL_INT64}), input("offsetTensor", "", {ACL_INT64}),
                  kRest)

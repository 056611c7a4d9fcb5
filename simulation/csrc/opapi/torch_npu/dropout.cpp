// The mask of a dropout, which torch_npu draws before it calls an attention.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>

#include "opapi/torch_npu/fusion_attention.h"

namespace cann_sim {

at::Tensor dropout_bits(int64_t seed, int64_t offset, double keep, int64_t bytes) {
  constexpr int64_t kBitsPerByte = 8;
  constexpr uint64_t kOddFactor = 0x9E3779B97F4A7C15U;
  const auto mixed = static_cast<uint64_t>(seed) ^ (static_cast<uint64_t>(offset) * kOddFactor);
  auto kept = at::empty({bytes, kBitsPerByte});
  kept.bernoulli_(keep, at::make_generator<at::CPUGeneratorImpl>(mixed));
  return kept.mv(at::pow(2, at::arange(kBitsPerByte, at::kFloat))).to(at::kByte);
}

}  // namespace cann_sim

using namespace cann_sim;

namespace {

torch::jit::Stack drop_mask(const Call& call) {
  return {dropout_bits(call.get<int64_t>("seed"), call.get<int64_t>("offset"),
                       1.0 - call.get<double>("prob"), call.get<TensorView>("out").sizes.at(0))};
}

const Function drop_mask_v2{
    .name = "aclnnDropoutGenMaskV2",
    .arguments = {attribute("shape"), attribute("prob"), attribute("seed"), attribute("offset"),
                  attribute("probDataType"), output("out")},
    .compute = drop_mask};

}  // namespace

extern "C" {

int aclnnDropoutGenMaskV2GetWorkspaceSize(IntArray shape, double prob, int64_t seed, int64_t offset,
                                          aclDataType dtype, Tensor out, uint64_t* workspace_size,
                                          aclOpExecutor** executor) {
  return prepare(drop_mask_v2, workspace_size, executor, shape, prob, seed, offset, int64_t{dtype},
                 out);
}
CANN_SIM_SECOND_PHASE(aclnnDropoutGenMaskV2)

}  // extern "C"

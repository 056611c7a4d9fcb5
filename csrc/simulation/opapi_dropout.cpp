// The mask of a dropout, which torch_npu draws before it calls an attention.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>

#include "opapi.h"

using namespace cann_sim;

namespace {

constexpr int64_t kBitsPerByte = 8;

// One bit per element, the first of a byte its lowest, 1 for what is kept. The same seed and offset
// give the same mask, as the backward expects; the device's own numbers are others.
torch::jit::Stack drop_mask(const Call& call) {
  const auto bytes = call.get<TensorView>("out").sizes.at(0);
  auto seed = static_cast<uint64_t>(call.get<int64_t>("seed"));
  seed ^= static_cast<uint64_t>(call.get<int64_t>("offset")) * 0x9E3779B97F4A7C15U;
  auto kept = at::empty({bytes, kBitsPerByte});
  kept.bernoulli_(1.0 - call.get<double>("prob"), at::make_generator<at::CPUGeneratorImpl>(seed));
  const auto values = at::pow(2, at::arange(kBitsPerByte, at::kFloat));
  return {kept.mv(values).to(at::kByte)};
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

// Paged KV caches. Prototype: docs/operators/scatter_pa_kv_cache.md.
#include <ATen/TensorOperators.h>
#include <c10/util/accumulate.h>

#include "ascendcl/runtime.h"
#include "opapi/core/opapi.h"

using namespace cann_sim;

namespace {

// The dtypes of Ascend 950, and those of Atlas A2 and A3.
constexpr Dtypes kCache{ACL_FLOAT16, ACL_BF16,   ACL_INT8,  ACL_FLOAT, ACL_UINT8,
                        ACL_INT16,   ACL_UINT16, ACL_INT32, ACL_UINT32};
constexpr Dtypes kCacheOfA2{ACL_FLOAT16, ACL_BF16, ACL_INT8};
constexpr Dtypes kIndex{ACL_INT32, ACL_INT64};

bool reads_dense_rows() { return product() == Product::a2 || product() == Product::a3; }

std::vector<int64_t> dense_strides(const TensorView& view) {
  std::vector<int64_t> strides(view.sizes.size(), 1);
  for (size_t axis = strides.size(); axis-- > 1;) {
    strides[axis - 1] = strides[axis] * view.sizes[axis];
  }
  return strides;
}

// Releases before 9.1 refuse rows with gaps.
void check_dtypes_and_rows(const Call& call) {
  for (const auto* name : {"key", "value"}) {
    const auto* view = call.find<TensorView>(name);
    TORCH_CHECK(!view || product() == Product::p950 || kCacheOfA2.allow(view->dtype), name,
                ": dtype ", c10::str(scalar_type(view->dtype)), " is not supported");
    TORCH_CHECK(
        !view || !reads_dense_rows() || cann_version() >= kCann91 || view->tensor().is_contiguous(),
        name, " is not contiguous");
  }
}

// 9.1 takes rows with gaps, and reads row t at t * N * D all the same. Ascend 950 ignores the modes
// before 9.1.
void change_sources(const Call& call) {
  if (product() == Product::p950 && cann_version() < kCann91) {
    call.get<std::string>("cacheModeOptional") = "Norm";
    call.get<std::string>("scatterModeOptional") = "None";
  }
  for (const auto* name : {"key", "value"}) {
    auto* view = call.find<TensorView>(name);
    if (view && reads_dense_rows()) {
      view->strides = dense_strides(*view);
      TORCH_CHECK(view->offset + c10::multiply_integers(view->sizes) <=
                      c10::multiply_integers(view->storage_sizes),
                  name, " is read behind the end of its memory");
    }
  }
}

// The mean of a window does not fit into a core's memory.
std::string large_head(const Call& call) {
  constexpr int64_t kLargest = 1472;
  const auto* mode = call.find<std::string>("scatterModeOptional");
  if (!mode || *mode != "Rope") {
    return {};
  }
  const auto windows = call.optional_tensor("compressLensOptional");
  for (const auto* name : {"key", "value"}) {
    const auto* view = call.find<TensorView>(name);
    if (view && !view->sizes.empty() && view->sizes.back() > kLargest && windows &&
        windows->gt(0).any().item<bool>()) {
      return c10::str(name, " has heads of ", view->sizes.back(),
                      ": the device writes behind a core's memory from ", kLargest + 1, " on");
    }
  }
  return {};
}

}  // namespace

// It writes to two of its inputs and has no outputs.
CANN_SIM_FUNCTION(
    aclnnScatterPaKvCache,
    {.schema_name = "ascend::scatter_pa_kv_cache_",
     .workspace = 256,
     .device = {.check = check_dtypes_and_rows,
                .change = change_sources,
                .faults = {{Harm::bounds, large_head}}}},
    input("key", "key", kCache).or_status(kInnerNullPointer),
    input("keyCacheRef", "key_cache", kCache).or_status(kInnerNullPointer),
    input("slotMapping", "slot_mapping", kIndex).or_status(kInnerNullPointer),
    input_or_none("value", "value", kCache).or_status(kInnerNullPointer),
    input_or_none("valueCacheRef", "value_cache", kCache).or_status(kInnerNullPointer),
    optional_input("compressLensOptional", "compress_lens", kIndex),
    optional_input("compressSeqOffsetOptional", "compress_seq_offset", kIndex),
    optional_input("seqLensOptional", "seq_lens", kIndex),
    attribute<char*>("cacheModeOptional", "cache_mode"),
    attribute<char*>("scatterModeOptional", "scatter_mode"),
    attribute<IntArray>("stridesOptional", "strides"),
    attribute<IntArray>("offsetsOptional", "offsets"))

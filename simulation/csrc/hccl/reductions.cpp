#include "hccl/reductions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>

namespace cann_sim {
namespace {

template <typename T>
void reduce(HcclReduceOp op, void* into, const void* from, size_t count) {
  auto* result = static_cast<T*>(into);
  const auto* values = static_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) {
    switch (op) {
      case HCCL_REDUCE_PROD:
        result[i] = static_cast<T>(result[i] * values[i]);
        break;
      case HCCL_REDUCE_MAX:
        result[i] = std::max(result[i], values[i]);
        break;
      case HCCL_REDUCE_MIN:
        result[i] = std::min(result[i], values[i]);
        break;
      default:
        result[i] = static_cast<T>(result[i] + values[i]);
    }
  }
}

}  // namespace

size_t size_of(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    case HCCL_DATA_TYPE_INT128:
      return 16;
    default:
      return 1;
  }
}

Reduction reduction_of(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8:
      return &reduce<int8_t>;
    case HCCL_DATA_TYPE_INT16:
      return &reduce<int16_t>;
    case HCCL_DATA_TYPE_INT32:
      return &reduce<int32_t>;
    case HCCL_DATA_TYPE_INT64:
      return &reduce<int64_t>;
    case HCCL_DATA_TYPE_FP16:
      return &reduce<c10::Half>;
    case HCCL_DATA_TYPE_BFP16:
      return &reduce<c10::BFloat16>;
    case HCCL_DATA_TYPE_FP32:
      return &reduce<float>;
    default:
      return nullptr;
  }
}

}  // namespace cann_sim

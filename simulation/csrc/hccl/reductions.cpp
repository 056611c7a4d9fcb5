#include "hccl/reductions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <map>

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

struct Number {
  size_t size;
  Reduction reduction = nullptr;
};

Number number(HcclDataType dtype) {
  static const std::map<HcclDataType, Number> numbers{
      {HCCL_DATA_TYPE_INT8, {1, &reduce<int8_t>}},
      {HCCL_DATA_TYPE_INT16, {2, &reduce<int16_t>}},
      {HCCL_DATA_TYPE_INT32, {4, &reduce<int32_t>}},
      {HCCL_DATA_TYPE_INT64, {8, &reduce<int64_t>}},
      {HCCL_DATA_TYPE_FP16, {2, &reduce<c10::Half>}},
      {HCCL_DATA_TYPE_BFP16, {2, &reduce<c10::BFloat16>}},
      {HCCL_DATA_TYPE_FP32, {4, &reduce<float>}},
      {HCCL_DATA_TYPE_UINT16, {2}},
      {HCCL_DATA_TYPE_UINT32, {4}},
      {HCCL_DATA_TYPE_UINT64, {8}},
      {HCCL_DATA_TYPE_FP64, {8}},
      {HCCL_DATA_TYPE_INT128, {16}}};
  const auto found = numbers.find(dtype);
  return found == numbers.end() ? Number{1} : found->second;
}

}  // namespace

size_t size_of(HcclDataType dtype) { return number(dtype).size; }

Reduction reduction_of(HcclDataType dtype) { return number(dtype).reduction; }

}  // namespace cann_sim

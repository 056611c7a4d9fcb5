// Paged KV caches. Prototype: docs/specification/scatter_pa_kv_cache.md.
#include "opapi.h"

using namespace cann_sim;

namespace {

// Those of Atlas A2 and A3.
const std::vector<aclDataType> kCache{ACL_FLOAT16, ACL_BF16, ACL_INT8};
const std::vector<aclDataType> kIndex{ACL_INT32, ACL_INT64};

// It writes to two of its inputs and has no outputs.
const Function scatter_pa_kv_cache{
    .name = "aclnnScatterPaKvCache",
    .schema_name = "ascend::scatter_pa_kv_cache_",
    .workspace = 256,
    .arguments = {
        input("key", "key", kCache), input("keyCacheRef", "key_cache", kCache),
        input("slotMapping", "slot_mapping", kIndex), input_or_none("value", "value", kCache),
        input_or_none("valueCacheRef", "value_cache", kCache),
        optional_input("compressLensOptional", "compress_lens", kIndex),
        optional_input("compressSeqOffsetOptional", "compress_seq_offset", kIndex),
        optional_input("seqLensOptional", "seq_lens", kIndex),
        attribute("cacheModeOptional", "cache_mode"),
        attribute("scatterModeOptional", "scatter_mode"), attribute("stridesOptional", "strides"),
        attribute("offsetsOptional", "offsets")}};

}  // namespace

extern "C" {

int aclnnScatterPaKvCacheGetWorkspaceSize(Tensor key, Tensor key_cache, Tensor slot_mapping,
                                          Tensor value, Tensor value_cache, Tensor compress_lens,
                                          Tensor compress_seq_offset, Tensor seq_lens,
                                          char* cache_mode, char* scatter_mode, IntArray strides,
                                          IntArray offsets, uint64_t* workspace_size,
                                          aclOpExecutor** executor) {
  return prepare(scatter_pa_kv_cache, workspace_size, executor, key, key_cache, slot_mapping, value,
                 value_cache, compress_lens, compress_seq_offset, seq_lens, cache_mode,
                 scatter_mode, strides, offsets);
}
int aclnnScatterPaKvCache(void* workspace, uint64_t size, aclOpExecutor* executor,
                          aclrtStream stream) {
  return execute(workspace, size, executor, stream);
}

}  // extern "C"

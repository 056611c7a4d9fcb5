// Times a call of an aclnn function without PyTorch: host_time.py compiles and calls it.
#include <acl/acl.h>

#include <array>
#include <chrono>
#include <cstdint>

struct aclTensor;
struct aclIntArray;
struct aclOpExecutor;

extern "C" {

int aclnnSparseFlashAttentionGradGetWorkspaceSize(
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    const aclTensor*, const aclTensor*, double, int64_t, char*, int64_t, int64_t, int64_t, bool,
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    uint64_t*, aclOpExecutor**);
int aclnnSparseFlashAttentionGrad(void*, uint64_t, aclOpExecutor*, aclrtStream);
int aclnnScatterPaKvCacheGetWorkspaceSize(const aclTensor*, const aclTensor*, const aclTensor*,
                                          const aclTensor*, const aclTensor*, const aclTensor*,
                                          const aclTensor*, const aclTensor*, char*, char*,
                                          const aclIntArray*, const aclIntArray*, uint64_t*,
                                          aclOpExecutor**);
int aclnnScatterPaKvCache(void*, uint64_t, aclOpExecutor*, aclrtStream);
int aclnnLightningIndexerGetWorkspaceSize(const aclTensor*, const aclTensor*, const aclTensor*,
                                          const aclTensor*, const aclTensor*, const aclTensor*,
                                          char*, char*, int64_t, int64_t, int64_t, int64_t, bool,
                                          const aclTensor*, const aclTensor*, uint64_t*,
                                          aclOpExecutor**);
int aclnnLightningIndexer(void*, uint64_t, aclOpExecutor*, aclrtStream);
int aclnnSparseFlashAttentionGetWorkspaceSize(const aclTensor*, const aclTensor*, const aclTensor*,
                                              const aclTensor*, const aclTensor*, const aclTensor*,
                                              const aclTensor*, const aclTensor*, const aclTensor*,
                                              double, int64_t, char*, char*, int64_t, int64_t,
                                              int64_t, int64_t, bool, const aclTensor*,
                                              const aclTensor*, const aclTensor*, uint64_t*,
                                              aclOpExecutor**);
int aclnnSparseFlashAttention(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclTensor* aclCreateTensor(const int64_t*, uint64_t, aclDataType, const int64_t*, int64_t,
                           aclFormat, const int64_t*, uint64_t, void*);
int aclDestroyTensor(const aclTensor*);
aclIntArray* aclCreateIntArray(const int64_t*, uint64_t);
int aclDestroyIntArray(const aclIntArray*);

}  // extern "C"

namespace {

// Microseconds per call: `count` tensors made, the two phases, the tensors destroyed.
template <size_t count, typename FirstPhase, typename SecondPhase>
double microseconds(int calls, FirstPhase first_phase, SecondPhase second_phase) {
  const std::array<int64_t, 4> sizes{1, 2, 3, 4};
  const std::array<int64_t, 4> strides{24, 12, 4, 1};
  const int64_t elements = 24;
  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  const auto start = std::chrono::steady_clock::now();
  for (int call = 0; call < calls; ++call) {
    std::array<const aclTensor*, count> tensors;
    for (auto& tensor : tensors) {
      tensor = aclCreateTensor(sizes.data(), 4, ACL_BF16, strides.data(), 0, ACL_FORMAT_ND,
                               &elements, 1, nullptr);
    }
    first_phase(tensors, &workspace_size, &executor);
    second_phase(nullptr, 0, executor, nullptr);
    for (const auto* tensor : tensors) {
      aclDestroyTensor(tensor);
    }
  }
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count() / calls;
}

}  // namespace

extern "C" {

double bare_sparse_flash_attention_grad(int calls) {
  char layout[] = "BSND";
  return microseconds<15>(
      calls,
      [&](const auto& t, auto* workspace_size, auto* executor) {
        aclnnSparseFlashAttentionGradGetWorkspaceSize(
            t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], nullptr, nullptr, t[8], t[9], 1.0, 1,
            layout, 3, INT32_MAX, INT32_MAX, false, t[10], t[11], t[12], t[13], t[14],
            workspace_size, executor);
      },
      &aclnnSparseFlashAttentionGrad);
}

double bare_scatter_pa_kv_cache_(int calls) {
  char cache_mode[] = "Norm";
  char scatter_mode[] = "None";
  const std::array<int64_t, 2> ones{1, 1};
  const std::array<int64_t, 2> zeros{0, 0};
  return microseconds<5>(
      calls,
      [&](const auto& t, auto* workspace_size, auto* executor) {
        const auto* strides = aclCreateIntArray(ones.data(), 2);
        const auto* offsets = aclCreateIntArray(zeros.data(), 2);
        aclnnScatterPaKvCacheGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], nullptr, nullptr,
                                              nullptr, cache_mode, scatter_mode, strides, offsets,
                                              workspace_size, executor);
        aclDestroyIntArray(strides);
        aclDestroyIntArray(offsets);
      },
      &aclnnScatterPaKvCache);
}

double bare_lightning_indexer(int calls) {
  char layout[] = "TND";
  char key_layout[] = "PA_BSND";
  return microseconds<8>(
      calls,
      [&](const auto& t, auto* workspace_size, auto* executor) {
        aclnnLightningIndexerGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], layout,
                                              key_layout, 2048, 3, INT64_MAX, INT64_MAX, false,
                                              t[6], t[7], workspace_size, executor);
      },
      &aclnnLightningIndexer);
}

double bare_sparse_flash_attention(int calls) {
  char layout[] = "TND";
  char key_layout[] = "PA_BSND";
  return microseconds<12>(
      calls,
      [&](const auto& t, auto* workspace_size, auto* executor) {
        aclnnSparseFlashAttentionGetWorkspaceSize(
            t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], 1.0, 1, layout, key_layout, 3,
            INT64_MAX, INT64_MAX, 2, false, t[9], t[10], t[11], workspace_size, executor);
      },
      &aclnnSparseFlashAttention);
}

}  // extern "C"

// What a call of aclnnSparseFlashAttentionGrad costs without PyTorch: benchmarks/host_time.py.
#include <array>
#include <chrono>

#include "opapi.h"

extern "C" {

int aclnnSparseFlashAttentionGradGetWorkspaceSize(
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    const aclTensor*, const aclTensor*, double, int64_t, char*, int64_t, int64_t, int64_t, bool,
    const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
    uint64_t*, aclOpExecutor**);
int aclnnSparseFlashAttentionGrad(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclTensor* aclCreateTensor(const int64_t*, uint64_t, aclDataType, const int64_t*, int64_t,
                           aclFormat, const int64_t*, uint64_t, void*);
int aclDestroyTensor(const aclTensor*);

// Microseconds per call: 15 tensors made, the two phases, 15 tensors destroyed.
double cann_sim_bare_call(int calls) {
  const std::array<int64_t, 4> sizes{1, 2, 3, 4};
  const std::array<int64_t, 4> strides{24, 12, 4, 1};
  const int64_t elements = 24;
  char layout[] = "BSND";
  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  const auto start = std::chrono::steady_clock::now();
  for (int call = 0; call < calls; ++call) {
    std::array<const aclTensor*, 15> t;
    for (auto& tensor : t) {
      tensor = aclCreateTensor(sizes.data(), 4, ACL_BF16, strides.data(), 0, ACL_FORMAT_ND,
                               &elements, 1, nullptr);
    }
    aclnnSparseFlashAttentionGradGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7],
                                                  nullptr, nullptr, t[8], t[9], 1.0, 1, layout, 3,
                                                  INT32_MAX, INT32_MAX, false, t[10], t[11], t[12],
                                                  t[13], t[14], &workspace_size, &executor);
    aclnnSparseFlashAttentionGrad(nullptr, 0, executor, nullptr);
    for (const auto* tensor : t) {
      aclDestroyTensor(tensor);
    }
  }
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count() / calls;
}

}  // extern "C"

// Symbols that torch_npu's library for ATB, of CANN's NNAL package, needs to load and to register
// its schemas. The simulation has no ATB operation; cpu_fallback/atb_operators.cpp computes them.
#include <cstdint>

namespace atb {

class Context;
class Operation;
struct Tensor;

namespace infer {
struct ElewiseParam;
struct GroupTopkParam;
struct LinearParam;
struct PagedAttentionParam;
struct ReshapeAndCacheParam;
struct RmsNormParam;
struct RopeParam;
struct SelfAttentionParam;
}  // namespace infer

namespace {
constexpr int kUnsupported = 8;
}

int CreateContext(Context**);
int DestroyContext(Context*);
int DestroyOperation(Operation*);

int CreateContext(Context**) { return kUnsupported; }
int DestroyContext(Context*) { return 0; }
int DestroyOperation(Operation*) { return 0; }

class Utils {
 public:
  static uint64_t GetTensorSize(const Tensor&);
};
uint64_t Utils::GetTensorSize(const Tensor&) { return 0; }

template <typename Param>
int CreateOperation(const Param&, Operation**) {
  return kUnsupported;
}

template int CreateOperation(const infer::ElewiseParam&, Operation**);
template int CreateOperation(const infer::GroupTopkParam&, Operation**);
template int CreateOperation(const infer::LinearParam&, Operation**);
template int CreateOperation(const infer::PagedAttentionParam&, Operation**);
template int CreateOperation(const infer::ReshapeAndCacheParam&, Operation**);
template int CreateOperation(const infer::RmsNormParam&, Operation**);
template int CreateOperation(const infer::RopeParam&, Operation**);
template int CreateOperation(const infer::SelfAttentionParam&, Operation**);

}  // namespace atb

// Differences between the releases of torch_npu that this library compiles with. Post releases of
// one version differ too, so only the names that the headers declare can tell, and no version
// macro.
#pragma once

#include <ATen/Context.h>
#include <op_plugin/utils/op_api_common_base.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>
#include <torch_npu/csrc/framework/OpParamMaker.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ascend_attn {

namespace undeclared {
struct Type {};
Type ApplyDeterministicLevel(...);  // any other function of the name is a better match
}  // namespace undeclared

// Qualified lookup in a namespace without names of its own finds those of both.
namespace declared_or_not {
using namespace at_npu::native;
using namespace undeclared;
}  // namespace declared_or_not

inline constexpr bool has_deterministic_levels =
    !std::is_same_v<decltype(declared_or_not::ApplyDeterministicLevel(int64_t{}, false, false)),
                    undeclared::Type>;

// A thread's settings of determinism, to be applied on another.
struct DeterminismByLevel {
  uint32_t level = c10_npu::GetDeterministicLevel();
  bool algorithms = at::globalContext().deterministicAlgorithms();

  void apply() const {
    declared_or_not::ApplyDeterministicLevel(static_cast<int64_t>(level), algorithms, true);
  }
};

// The same without levels: CacheParams holds the setting, in its first field, whose accessor is not
// exported.
template <typename Params>
struct DeterminismByParams {
  Params params = GetCacheParams();
  bool level = *reinterpret_cast<const bool*>(&params);
  bool algorithms = at::globalContext().deterministicAlgorithms();

  // Declared only in the releases without levels: a template finds it by its argument.
  void apply() const { SetExecConfigV2(params); }
};

using Determinism = std::conditional_t<has_deterministic_levels, DeterminismByLevel,
                                       DeterminismByParams<CacheParams>>;

// The limits on the numbers of cores: the last two fields, which have no exported accessors. In
// releases without levels a bool stands before them, with padding of any value.
inline std::array<uint32_t, 2> core_limits(const CacheParams& params) {
  std::array<uint32_t, 2> limits;
  static_assert(sizeof(CacheParams) == sizeof(limits) + (has_deterministic_levels ? 0 : 4));
  std::memcpy(limits.data(), reinterpret_cast<const char*>(&params + 1) - sizeof(limits),
              sizeof(limits));
  return limits;
}

}  // namespace ascend_attn

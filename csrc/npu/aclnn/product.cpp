#include "npu/aclnn/product.h"

#include <acl/acl.h>
#include <op_plugin/utils/op_api_common_base.h>
#include <torch_npu/csrc/core/npu/GetCANNInfo.h>

#include <charconv>
#include <system_error>
#include <utility>

#include "npu/aclnn/library.h"

namespace ascend_attn {
namespace {

// Returns the first two numbers of a version, such as "9.0.0.RC1".
std::optional<std::pair<int, int>> numbers_of(std::string_view text) {
  std::pair<int, int> parts;
  const auto* end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, parts.first);
  if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.' ||
      std::from_chars(major.ptr + 1, end, parts.second).ec != std::errc()) {
    return std::nullopt;
  }
  return parts;
}

}  // namespace

std::string soc_name() {
  const char* name = aclrtGetSocName();
  return name ? name : "";
}

bool is_newer_than_known(std::string_view version) {
  const auto given = numbers_of(version);
  return given && given > numbers_of(cann_name(kNewestCann));
}

Cann cann_of_version(std::string_view version) {
  const auto given = numbers_of(version);
  if (!given) {
    return kNewestCann;
  }
  auto found = kCannVersions.front().cann;
  for (const auto& each : kCannVersions) {
    if (numbers_of(each.name) <= given) {
      found = each.cann;
    }
  }
  return found;
}

std::optional<Device> device_of_process() {
  const auto product = product_of_soc(soc_name());
  if (!product) {
    return std::nullopt;
  }
  return Device{*product, cann_of_version(GetCANNVersion("CANN"))};
}

uint32_t ai_cores_of_stream() {
  using GetLimit = int (*)(aclrtStream stream, int type, uint32_t* value);
  static const GetLimit get = aclnn::find_runtime_function("aclrtGetStreamResLimit");
  constexpr int kCubeCores = 0;
  uint32_t cores = 0;
  return get && get(GetAclStream(), kCubeCores, &cores) == 0 ? cores : 0;
}

}  // namespace ascend_attn

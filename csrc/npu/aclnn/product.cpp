#include "npu/aclnn/product.h"

#include <acl/acl.h>
#include <op_plugin/utils/op_api_common_base.h>
#include <torch_npu/csrc/core/npu/GetCANNInfo.h>

#include <charconv>
#include <system_error>
#include <utility>

#include "npu/aclnn/library.h"

namespace ascend_attn {

std::string soc_name() {
  const char* name = aclrtGetSocName();
  return name ? name : "";
}

std::optional<Product> product_of_soc(std::string_view soc) {
  for (const auto& each : kProducts) {
    if (soc.starts_with(each.soc)) {
      return each.product;
    }
  }
  return std::nullopt;
}

Cann cann_of_version(std::string_view version) {
  const auto numbers = [](std::string_view text) -> std::optional<std::pair<int, int>> {
    std::pair<int, int> parts;
    const auto* end = text.data() + text.size();
    const auto major = std::from_chars(text.data(), end, parts.first);
    if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.' ||
        std::from_chars(major.ptr + 1, end, parts.second).ec != std::errc()) {
      return std::nullopt;
    }
    return parts;
  };
  const auto given = numbers(version);
  if (!given) {
    return kNewestCann;
  }
  auto found = kCannVersions.front().cann;
  for (const auto& each : kCannVersions) {
    if (numbers(each.name) <= given) {
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

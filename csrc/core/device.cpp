#include "core/device.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace ascend_attn {
namespace {

// Returns the entry of that name.
template <typename Table>
const auto& entry_of(const Table& table, std::string_view argument, std::string_view none,
                     std::string_view name) {
  std::string names;
  for (const auto& entry : table) {
    if (entry.name == name) {
      return entry;
    }
    names += c10::str(names.empty() ? "'" : ", '", entry.name, "'");
  }
  raise(Violation::value, "limits", argument,
        c10::str("expected ", none, " or one of ", names, ", got ", quoted(name)), Status::none);
}

}  // namespace

std::string_view product_name(Product product) {
  return std::ranges::find(kProducts, product, &ProductNames::product)->name;
}

std::string_view cann_name(Cann cann) {
  return std::ranges::find(kCannVersions, cann, &CannName::cann)->name;
}

std::optional<Product> product_of_soc(std::string_view soc) {
  const auto found = std::ranges::find_if(
      kProducts, [soc](const ProductNames& names) { return soc.starts_with(names.soc); });
  return found == kProducts.end() ? std::nullopt : std::optional(found->product);
}

Product product_of(std::string_view name) {
  for (const auto* prefix : {"", "Ascend"}) {
    if (const auto product = product_of_soc(c10::str(prefix, name))) {
      return *product;
    }
  }
  return entry_of(kProducts, "product", "None", name).product;
}

Cann cann_of(std::string_view name) {
  return entry_of(kCannVersions, "cann", "None for the newest", name).cann;
}

}  // namespace ascend_attn

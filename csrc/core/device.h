// The devices that limits depend on: a product with a version of CANN.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ascend_attn {

enum class Product : uint8_t { A2 = 1, A3 = 2, P950 = 4, P310 = 8 };

struct ProductNames {
  Product product;
  std::string_view name;
  std::string_view soc;  // how the names begin that aclrtGetSocName gives its SoCs
};
inline constexpr std::array<ProductNames, 4> kProducts{{
    {Product::A2, "A2", "Ascend910B"},
    {Product::A3, "A3", "Ascend910_93"},
    {Product::P950, "950", "Ascend950"},
    {Product::P310, "310P", "Ascend310P"},
}};

enum class Cann : uint8_t { v8_5 = 1, v9_0 = 2, v9_1 = 4 };

struct CannName {
  Cann cann;
  std::string_view name;
};
// Oldest first.
inline constexpr std::array<CannName, 3> kCannVersions{{
    {Cann::v8_5, "8.5"},
    {Cann::v9_0, "9.0"},
    {Cann::v9_1, "9.1"},
}};
inline constexpr Cann kNewestCann = kCannVersions.back().cann;

struct Device {
  Product product = Product::A2;
  Cann cann = kNewestCann;

  bool operator==(const Device&) const = default;
};

// A set of devices: these products with these versions of CANN.
struct Devices {
  uint8_t products = 0xff;
  uint8_t cann_versions = 0xff;

  constexpr bool contain(Device device) const {
    return (products & static_cast<uint8_t>(device.product)) != 0 &&
           (cann_versions & static_cast<uint8_t>(device.cann)) != 0;
  }
  constexpr Devices since(Cann first) const {
    return {products, static_cast<uint8_t>(cann_versions & ~(static_cast<uint8_t>(first) - 1))};
  }
  constexpr Devices before(Cann first) const {
    return {products, static_cast<uint8_t>(cann_versions & (static_cast<uint8_t>(first) - 1))};
  }
};

inline constexpr Devices kAllDevices{};

// Returns these products with every version of CANN.
template <std::same_as<Product>... Products>
constexpr Devices on(Products... each) {
  return {static_cast<uint8_t>((static_cast<uint8_t>(each) | ...))};
}

inline constexpr Devices kA2A3 = on(Product::A2, Product::A3);
inline constexpr Devices k950 = on(Product::P950);
inline constexpr Devices k310P = on(Product::P310);

std::string_view product_name(Product product);
std::string_view cann_name(Cann cann);
// Returns nullopt for a SoC of none of the products.
std::optional<Product> product_of_soc(std::string_view soc);
// Return the product or the version of that name; otherwise raise an error with the valid names. A
// product is also known by its SoCs: "Ascend910B2", or "910B".
Product product_of(std::string_view name);
Cann cann_of(std::string_view name);

}  // namespace ascend_attn

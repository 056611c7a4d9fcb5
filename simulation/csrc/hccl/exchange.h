// One call of a function of HCCL on one rank: what it sends and receives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "hccl/connections.h"
#include "hccl/reductions.h"

namespace cann_sim {

// The parts of a buffer that belong to the ranks, in bytes.
struct Parts {
  std::vector<size_t> sizes;
  std::vector<size_t> offsets;

  Parts(std::vector<size_t> sizes_, std::vector<size_t> offsets_)
      : sizes(std::move(sizes_)), offsets(std::move(offsets_)) {}
  explicit Parts(std::vector<size_t> sizes_) : sizes(std::move(sizes_)), offsets(sizes.size()) {
    std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), size_t{0});
  }
  static Parts equal(int ranks, size_t size) {
    return Parts(std::vector<size_t>(static_cast<size_t>(ranks), size));
  }
  // From counts and displacements of elements.
  static Parts given(int ranks, const void* counts, const void* displacements, size_t element) {
    const auto scaled = [&](const void* numbers) {
      const auto* values = static_cast<const uint64_t*>(numbers);
      std::vector<size_t> result(values, values + ranks);
      std::ranges::transform(result, result.begin(), [&](size_t x) { return x * element; });
      return result;
    };
    return {scaled(counts), scaled(displacements)};
  }
};

// One call of a function on one rank.
class Exchange {
 public:
  Exchange(const char* function, Connections& connections)
      : function_(function), connections_(connections) {}

  int rank() const { return connections_.rank(); }
  int ranks() const { return connections_.ranks(); }

  void send(int to, const void* data, size_t bytes) const {
    connections_.send(to, function_, data, bytes);
  }
  void receive(int from, void* data, size_t bytes) const {
    connections_.receive(from, function_, data, bytes);
  }

  // Part i of `source` goes to rank i, and what it sends into part i of `target`.
  void all_to_all(const char* source, const Parts& sent, char* target, const Parts& got) const {
    for_others(
        [&](int other) { send(other, source + at(sent.offsets, other), at(sent.sizes, other)); });
    if (const auto size = at(got.sizes, rank())) {
      std::memmove(target + at(got.offsets, rank()), source + at(sent.offsets, rank()), size);
    }
    for_others(
        [&](int other) { receive(other, target + at(got.offsets, other), at(got.sizes, other)); });
  }

  void all_gather(const char* source, char* target, const Parts& got) const {
    const auto size = at(got.sizes, rank());
    for_others([&](int other) { send(other, source, size); });
    if (size) {
      std::memmove(target + at(got.offsets, rank()), source, size);
    }
    for_others(
        [&](int other) { receive(other, target + at(got.offsets, other), at(got.sizes, other)); });
  }

  // Part i of every rank's `source` is reduced on rank i.
  void reduce_scatter(const char* source, char* target, const Parts& parts, HcclDataType dtype,
                      HcclReduceOp op) const {
    for_others(
        [&](int other) { send(other, source + at(parts.offsets, other), at(parts.sizes, other)); });
    reduce_received(source + at(parts.offsets, rank()), target, at(parts.sizes, rank()), dtype, op);
  }

  // Adds the data that the others have sent and `own`, in the order of the ranks.
  void reduce_received(const char* own, char* target, size_t bytes, HcclDataType dtype,
                       HcclReduceOp op) const {
    std::vector<char> sum(bytes);
    std::vector<char> next(bytes);
    for (int other = 0; other < ranks(); ++other) {
      const char* values = own;
      if (other != rank()) {
        receive(other, next.data(), bytes);
        values = next.data();
      }
      if (other == 0) {
        std::copy_n(values, bytes, sum.begin());
      } else {
        reduction_of(dtype)(op, sum.data(), values, bytes / size_of(dtype));
      }
    }
    std::copy_n(sum.begin(), bytes, target);
  }

  template <typename Function>
  void for_others(const Function& function) const {
    for (int other = 0; other < ranks(); ++other) {
      if (other != rank()) {
        function(other);
      }
    }
  }

 private:
  static size_t at(const std::vector<size_t>& values, int index) {
    return values[static_cast<size_t>(index)];
  }

  const char* function_;
  Connections& connections_;
};

}  // namespace cann_sim

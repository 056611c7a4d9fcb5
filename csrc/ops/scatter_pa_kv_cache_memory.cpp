// Checks that what a call reads does not overlap the caches that it writes.
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>

#include "core/error.h"
#include "core/memory.h"
#include "core/tensor_checks.h"
#include "ops/scatter_pa_kv_cache.h"

namespace ascend_attn {
namespace {

// Returns the number of elements from the first of the tensor to the end of its storage.
int64_t reachable_elements(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().nbytes()) / tensor.itemsize() -
         tensor.storage_offset();
}

// The caches of a call, which nothing that the call reads may overlap.
class Caches {
 public:
  void add(NamedTensor cache) {
    const auto elements = elements_of(cache.tensor);
    if (!elements) {
      return;
    }
    const auto blocks = blocks_of(cache.tensor, *elements);
    for (const auto& other : caches_) {
      check_apart(cache.name, blocks.alternate_with(other.blocks) ? std::nullopt : elements, other);
    }
    caches_.push_back({cache.name, blocks});
  }

  void check_apart(std::string_view argument, const std::optional<Elements>& elements) const {
    for (const auto& cache : caches_) {
      check_apart(argument, elements, cache);
    }
  }
  void check_apart(std::string_view argument, const at::Tensor& tensor) const {
    check_apart(argument, elements_of(tensor));
  }
  void check_apart(std::string_view argument, const std::optional<at::Tensor>& tensor) const {
    if (tensor) {
      check_apart(argument, *tensor);
    }
  }

  // Checks the rows that "Nct" reads, anywhere in the buffer that starts at `source`.
  void check_rows_apart(NamedTensor source, int64_t stride, int64_t offset) const {
    const auto& tensor = source.tensor;
    const std::array sizes{tensor.size(0), tensor.numel() / tensor.size(0)};
    const auto [rows, row] = sizes;
    const auto available = reachable_elements(tensor);
    // Compared without products, which could overflow.
    const bool fits = offset <= available - row &&
                      (rows == 1 || stride <= (available - row - offset) / (rows - 1));
    check_value(fits, ScatterPaKvCache::name, source.name, "expected a buffer that holds ", rows,
                " rows of ", row, " elements at ", offset, " + t * ", stride, ", got one of ",
                available);
    const std::array<int64_t, 2> strides{stride, 1};
    const auto itemsize = static_cast<int64_t>(tensor.itemsize());
    const auto* first = static_cast<const char*>(tensor.storage().data()) +
                        (tensor.storage_offset() + offset) * itemsize;
    check_apart(source.name, Elements(first, sizes, strides, itemsize));
  }

 private:
  struct Cache {
    std::string_view name;
    Blocks blocks;
  };

  static Blocks blocks_of(const at::Tensor& cache, const Elements& elements) {
    if (cache.is_contiguous()) {
      return {elements.span(), 1, elements.span().end - elements.span().begin};
    }
    const auto itemsize = static_cast<int64_t>(cache.itemsize());
    const auto* first = elements.span().begin;
    const auto bytes = cache.numel() / cache.size(0) * itemsize;
    // A single block may have any stride, also 0.
    const auto stride = cache.size(0) == 1 ? bytes : cache.stride(0) * itemsize;
    return {{first, first + bytes}, cache.size(0), stride};
  }

  static void check_apart(std::string_view argument, const std::optional<Elements>& elements,
                          const Cache& cache) {
    check_value(!elements || !elements->any_in(cache.blocks), ScatterPaKvCache::name, argument,
                "expected memory of its own, got some of ", cache.name, "'s");
  }

  c10::SmallVector<Cache, 2> caches_;
};

}  // namespace

void ScatterPaKvCache::check_memory() const {
  Caches caches;
  caches.add({"key_cache", key_cache});
  if (value_cache) {
    caches.add({"value_cache", *value_cache});
  }
  if (scatter() == Scatter::strided_rows && key.numel() != 0) {
    caches.check_rows_apart({"key", key}, strides[0], offsets[0]);
    if (value) {
      caches.check_rows_apart({"value", *value}, strides[1], offsets[1]);
    }
  } else {
    caches.check_apart("key", key);
    caches.check_apart("value", value);
  }
  // A device may read the indices while it writes.
  caches.check_apart("slot_mapping", slot_mapping);
  caches.check_apart("compress_lens", compress_lens);
  caches.check_apart("compress_seq_offset", compress_seq_offset);
  caches.check_apart("seq_lens", seq_lens);
}

}  // namespace ascend_attn

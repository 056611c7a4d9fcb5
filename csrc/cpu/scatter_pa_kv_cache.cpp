// Row copies into a paged cache. Every index is checked before the first byte is written.
#include "ops/scatter_pa_kv_cache.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <c10/util/MaybeOwned.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "core/error.h"
#include "dispatch/operator.h"

namespace ascend_attn::cpu {
namespace {

// Large enough for a decode step to need no heap allocation.
using Indices = c10::SmallVector<int64_t, 64>;

Indices read(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    return read(tensor.cpu());
  }
  const auto values = [&](const auto* data) { return Indices(data, data + tensor.numel()); };
  return tensor.scalar_type() == at::kInt ? values(tensor.const_data_ptr<int32_t>())
                                          : values(tensor.const_data_ptr<int64_t>());
}

// The copy of key into key_cache, or of value into value_cache. Sizes and strides are in bytes.
struct Side {
  // `stride` and `offset` locate the rows of "Nct", in elements.
  Side(const at::Tensor& source, const at::Tensor& cache, Scatter scatter, int64_t block_size,
       std::optional<int64_t> stride, int64_t offset)
      : rows(source.strides().back() == 1 || source.sizes().back() == 1
                 ? c10::MaybeOwned<at::Tensor>::borrowed(source)
                 : c10::MaybeOwned<at::Tensor>::owned(source.contiguous())),
        itemsize(static_cast<int64_t>(rows->itemsize())),
        from(static_cast<const char*>(rows->const_data_ptr()) + offset * itemsize),
        to(static_cast<char*>(cache.mutable_data_ptr())),
        block_size(block_size),
        block_stride(cache.stride(0) * itemsize) {
    const auto sizes = rows->sizes();
    const auto strides = rows->strides();
    const auto last = sizes.size() - 1;
    head_bytes = sizes[last] * itemsize;
    row_bytes = sizes[last - 1] * head_bytes;
    head_stride = strides[last - 1] * itemsize;
    row_stride = stride.value_or(strides[last - 2]) * itemsize;
    batch_stride = last == 3 ? strides[0] * itemsize : 0;
    if (scatter == Scatter::nz_rows) {
      piece_bytes = slot_stride = ScatterPaKvCache::kFractalBytes;
      piece_stride = block_size * piece_bytes;
    } else if (!is_run(scatter)) {
      flat = cache.is_contiguous();
      slot_stride = flat ? row_bytes : cache.stride(1) * itemsize;
      piece_stride = flat ? head_bytes : cache.stride(2) * itemsize;
      const bool dense =
          row_bytes == head_bytes || (head_stride == head_bytes && piece_stride == head_bytes);
      piece_bytes = dense ? row_bytes : head_bytes;
    }
  }

  char* target(int64_t slot) const {
    return to + (flat ? slot * slot_stride
                      : slot / block_size * block_stride + slot % block_size * slot_stride);
  }

  // Borrowed where possible: with an owned reference, torch acquires Python's GIL.
  c10::MaybeOwned<at::Tensor> rows;
  int64_t itemsize;
  const char* from;
  char* to;
  int64_t block_size, block_stride;
  int64_t head_bytes, row_bytes;
  int64_t head_stride, row_stride, batch_stride;
  // Where rows are written one by one, each in pieces:
  int64_t slot_stride = 0;
  int64_t piece_bytes = 0;
  int64_t piece_stride = 0;
  bool flat = false;  // slots are contiguous, across the borders of blocks as well
};

using Sides = c10::SmallVector<Side, 2>;

Sides sides_of(const ScatterPaKvCache& op, Scatter scatter, int64_t block_size) {
  Sides sides;
  const auto add = [&](const at::Tensor& source, const at::Tensor& cache) {
    const bool strided = scatter == Scatter::strided_rows;
    const auto index = sides.size();
    sides.emplace_back(source, cache, scatter, block_size,
                       strided ? std::optional(op.strides[index]) : std::nullopt,
                       strided ? op.offsets[index] : 0);
  };
  add(op.key, op.key_cache);
  if (op.value) {
    add(*op.value, *op.value_cache);
  }
  return sides;
}

constexpr int64_t kRows = 64;  // that are copied at a time

// Returns the number of rows below which a second thread costs more than it saves.
int64_t grain(const Sides& sides) {
  constexpr int64_t kBytes = 128 * 1024;
  int64_t row_bytes = 1;
  for (const auto& side : sides) {
    row_bytes += side.row_bytes;
  }
  return std::max<int64_t>(1, kBytes / row_bytes);
}

// Copies a row with non-temporal stores, which do not read the overwritten cache lines first.
inline void stream(char* to, const char* from, int64_t bytes) {
#ifdef __SSE2__
  if ((reinterpret_cast<uintptr_t>(to) | bytes) % sizeof(__m128i) == 0) {
    for (int64_t i = 0; i < bytes; i += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

void finish_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

inline void copy(bool streamed, char* to, const char* from, int64_t bytes) {
  constexpr auto kFractal = ScatterPaKvCache::kFractalBytes;
  if (streamed) {
    stream(to, from, bytes);
  } else if (bytes == kFractal) {
    std::memcpy(to, from, kFractal);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void check_slots(const Indices& slots, int64_t capacity) {
  const auto beyond = std::find_if(slots.begin(), slots.end(),
                                   [capacity](int64_t slot) { return slot >= capacity; });
  check_value(beyond == slots.end(), ScatterPaKvCache::name, "slot_mapping",
              "expected values below num_blocks * block_size = ", capacity, ", got ",
              beyond == slots.end() ? 0 : *beyond, " for row ", beyond - slots.begin());
}

// Copies a few rows at a time, piece by piece. In fractal layout a row is scattered over its block,
// which holds fractal c of all positions, then fractal c + 1; neighbours share the cache lines that
// they read and, usually, those that they write.
void write_rows(const Sides& sides, const Indices& slots, int64_t grain) {
  constexpr int64_t kStreamedBytes = 32 * 1024 * 1024;  // so many would not stay in a cache anyway
  // Rows go to pages in any order: the target of one is prefetched while others are copied.
  constexpr int64_t kAhead = 4;
  const auto count = static_cast<int64_t>(slots.size());
  at::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (const auto& side : sides) {
      const bool streamed = count * side.row_bytes >= kStreamedBytes;
      const auto bytes = std::max<int64_t>(side.piece_bytes, 1);
      const auto pieces_of_head = std::max<int64_t>(side.head_bytes / bytes, 1);
      for (int64_t begin = first; begin < last; begin += kRows) {
        int64_t written = 0;
        const char* from[kRows];
        char* to[kRows];
        for (int64_t row = begin; row < std::min(begin + kRows, last); ++row) {
          if (slots[row] >= 0) {
            from[written] = side.from + row * side.row_stride;
            to[written++] = side.target(slots[row]);
          }
        }
        for (int64_t piece = 0; piece < side.row_bytes / bytes; ++piece) {
          const auto source =
              piece / pieces_of_head * side.head_stride + piece % pieces_of_head * side.piece_bytes;
          const auto target = piece * side.piece_stride;
          for (int64_t i = 0; i < written; ++i) {
            if (piece == 0 && i + kAhead < written) {
              __builtin_prefetch(to[i + kAhead], /*write=*/1);
            }
            copy(streamed, to[i] + target, from[i] + source, side.piece_bytes);
          }
        }
      }
    }
    finish_streams();
  });
}

// The rows of one batch and head, written as one run: [0, window), the mean of the window if
// requested, and [window + width, length).
struct Run {
  int64_t slot;
  int64_t batch;
  int64_t head;
  int64_t first_row;  // of the sequence, if sequences are packed
  int64_t window;
  int64_t width;
  int64_t length;
  int64_t written;  // rows, from `slot` on
};

std::vector<Run> runs_of(const ScatterPaKvCache& op, Scatter scatter, int64_t capacity) {
  constexpr auto name = ScatterPaKvCache::name;
  const bool packed = op.key.dim() == 3;
  const auto rows = op.key.size(packed ? 0 : 1);
  const auto heads = op.key.size(-2);
  const auto slots = read(op.slot_mapping);
  const auto lens = read(*op.compress_lens);
  const auto lengths = read(*op.seq_lens);
  const auto windows =
      scatter == Scatter::alibi ? Indices(slots.size(), 0) : read(*op.compress_seq_offset);

  std::vector<Run> runs;
  runs.reserve(slots.size());
  int64_t total = 0;
  for (size_t batch = 0; batch < lengths.size(); ++batch) {
    const auto length = lengths[batch];
    check_value(length >= 0 && length <= rows - (packed ? total : 0), name, "seq_lens",
                packed ? "expected lengths >= 0 whose sum is the number of rows of key, "
                       : "expected lengths in [0, S], S = ",
                rows, ", got ", length, " for batch ", batch);
    for (int64_t head = 0; head < heads; ++head) {
      const auto task = static_cast<int64_t>(batch) * heads + head;
      const auto slot = slots[task];
      if (slot < 0) {
        continue;
      }
      auto width = lens[task];
      auto window = windows[task];
      check_value(width >= 0 && width <= length, name, "compress_lens",
                  "expected values in [0, seq_lens], seq_lens = ", length, ", got ", width,
                  " for batch ", batch, ", head ", head);
      if (scatter == Scatter::alibi) {
        width = length - width;
      } else if (window == -1 || window == length || width == 0) {
        window = width = 0;
      } else {
        check_value(window >= 0 && window <= length - width, name, "compress_seq_offset",
                    "expected -1 or a window of compress_lens = ", width,
                    " rows inside of seq_lens = ", length, ", got ", window, " for batch ", batch,
                    ", head ", head);
      }
      const auto written = length - width + (scatter == Scatter::rope && width > 0);
      check_value(slot <= capacity - written, name, "slot_mapping",
                  "expected a run that ends by num_blocks * block_size = ", capacity, ", got ",
                  written, " rows from ", slot, " for batch ", batch, ", head ", head);
      runs.push_back({slot, static_cast<int64_t>(batch), head, packed ? total : 0, window, width,
                      length, written});
    }
    total += length;
  }
  check_value(!packed || total == rows, name, "seq_lens", "expected a sum of ", rows,
              ", the rows of key, got ", total);
  return runs;
}

// Writes the mean of some rows, summed in row order in float32 (float64 for float64).
template <typename T>
void write_mean(const char* from, int64_t row_stride, int64_t rows, char* to, int64_t size) {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::vector<Sum> sums(size);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* x = reinterpret_cast<const T*>(from + row * row_stride);
    for (int64_t i = 0; i < size; ++i) {
      sums[i] += static_cast<Sum>(x[i]);
    }
  }
  auto* mean = reinterpret_cast<T*>(to);
  for (int64_t i = 0; i < size; ++i) {
    const auto value = sums[i] / static_cast<Sum>(rows);
    if constexpr (std::is_integral_v<T>) {
      // Clamped, because float32 rounds the largest integers up to values that T cannot hold.
      constexpr auto lowest = static_cast<double>(std::numeric_limits<T>::min());
      constexpr auto highest = static_cast<double>(std::numeric_limits<T>::max());
      mean[i] = static_cast<T>(std::clamp<double>(std::nearbyint(value), lowest, highest));
    } else {
      mean[i] = static_cast<T>(value);
    }
  }
}

using WriteMean = void (*)(const char*, int64_t, int64_t, char*, int64_t);

WriteMean mean_of(at::ScalarType dtype) {
  return AT_DISPATCH_V2(dtype, ScatterPaKvCache::name,
                        AT_WRAP([] { return &write_mean<scalar_t>; }), AT_EXPAND(AT_INTEGRAL_TYPES),
                        at::kUInt16, at::kUInt32, at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                        at::kFloat8_e5m2, at::kFloat8_e4m3fn);
}

void write_runs(const Sides& sides, const std::vector<Run>& runs, bool with_mean) {
  at::parallel_for(0, runs.size(), 1, [&](int64_t begin, int64_t end) {
    for (const auto& side : sides) {
      const auto mean = mean_of(side.rows->scalar_type());
      const auto bytes = side.head_bytes;
      for (int64_t index = begin; index < end; ++index) {
        const auto& run = runs[index];
        const auto* from = side.from + run.batch * side.batch_stride +
                           run.first_row * side.row_stride + run.head * side.head_stride;
        auto* to = side.to + run.slot * bytes;
        const auto copy = [&](int64_t first, int64_t last) {
          for (int64_t row = first; row < last; ++row, to += bytes) {
            std::memcpy(to, from + row * side.row_stride, bytes);
          }
        };
        copy(0, run.window);
        if (with_mean && run.width > 0) {
          mean(from + run.window * side.row_stride, side.row_stride, run.width, to,
               bytes / side.itemsize);
          to += bytes;
        }
        copy(run.window + run.width, run.length);
      }
    }
  });
}

// The slots that an entry of slot_mapping writes.
struct SlotSpan {
  int64_t slot;
  int64_t count;
  int64_t entry;
};

std::vector<SlotSpan> spans_of(const ScatterPaKvCache& op, Scatter scatter, int64_t capacity) {
  std::vector<SlotSpan> spans;
  if (is_run(scatter)) {
    for (const auto& run : runs_of(op, scatter, capacity)) {
      spans.push_back({run.slot, run.written, run.batch * op.key.size(-2) + run.head});
    }
    return spans;
  }
  const auto slots = read(op.slot_mapping);
  check_slots(slots, capacity);
  for (size_t row = 0; row < slots.size(); ++row) {
    if (slots[row] >= 0) {
      spans.push_back({slots[row], 1, static_cast<int64_t>(row)});
    }
  }
  return spans;
}

// Checks that no slot is written twice. Sorting costs more than a call, so only check_values() does
// it.
void check_apart(std::vector<SlotSpan> spans) {
  std::erase_if(spans, [](const SlotSpan& span) { return span.count == 0; });
  std::ranges::stable_sort(spans, {}, &SlotSpan::slot);
  for (size_t i = 1; i < spans.size(); ++i) {
    const auto& [slot, count, entry] = spans[i - 1];
    check_value(slot + count <= spans[i].slot, ScatterPaKvCache::name, "slot_mapping",
                "expected no slot twice (a negative one skips its row), got ", spans[i].slot,
                " written by entries ", entry, " and ", spans[i].entry);
  }
}

int64_t capacity_of(const ScatterPaKvCache& op, Scatter scatter) {
  return op.key_cache.size(0) * op.key_cache.size(op.block_size_axis(scatter));
}

void scatter_pa_kv_cache(const ScatterPaKvCache& op, ScatterPaKvCache::Outputs&) {
  op.check_memory();
  const auto scatter = op.scatter();
  const auto block_size = op.key_cache.size(op.block_size_axis(scatter));
  const auto capacity = capacity_of(op, scatter);
  if (is_run(scatter)) {
    const auto runs = runs_of(op, scatter, capacity);
    write_runs(sides_of(op, scatter, block_size), runs, scatter == Scatter::rope);
    return;
  }
  const auto slots = read(op.slot_mapping);
  check_slots(slots, capacity);
  const auto sides = sides_of(op, scatter, block_size);
  write_rows(sides, slots, std::max(grain(sides), scatter == Scatter::nz_rows ? kRows : 1));
}

TORCH_LIBRARY_IMPL(ascend, CPU, m) { register_kernel<ScatterPaKvCache, scatter_pa_kv_cache>(m); }

}  // namespace
}  // namespace ascend_attn::cpu

void ascend_attn::ScatterPaKvCache::check_values() const {
  const auto scenario = scatter();
  cpu::check_apart(cpu::spans_of(*this, scenario, cpu::capacity_of(*this, scenario)));
}

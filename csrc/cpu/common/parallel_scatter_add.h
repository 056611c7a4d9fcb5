// Parallel loops over the tokens of a sequence, and scatter-adds into rows that any token may
// select.
//
// Each worker takes every workers-th token: under a causal mask later tokens have more keys, so
// that contiguous chunks would differ in cost. Each worker adds to rows of its own, which are then
// summed in worker order: results do not depend on timing.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/huge_pages.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

inline int64_t worker_count(int64_t tokens) {
  return std::clamp<int64_t>(tokens, 1, at::get_num_threads());
}

// Calls function(worker) for every worker, each on its own thread if there are enough threads.
template <typename Function>
void for_each_worker(int64_t workers, const Function& function) {
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    const TileGemmScope scope;
    for (int64_t worker = begin; worker < end; ++worker) {
      function(worker);
    }
  });
}

template <typename T>
class ParallelScatterAdd {
 public:
  // Allocates room for sequences of up to `max_rows` keys.
  ParallelScatterAdd(int64_t workers, int64_t max_rows, int64_t width) : width_(width) {
    const auto bytes = static_cast<size_t>(max_rows * width) * sizeof(T);
    for (int64_t worker = 0; worker < workers; ++worker) {
      sums_.push_back(c10::GetCPUAllocator()->allocate(bytes));
      prefer_huge_pages(sums_.back().get(), bytes);
    }
  }

  // Zeroes the first `rows` rows of a worker, before it adds to them for the next sequence.
  void clear(int64_t worker, int64_t rows) {
    if (rows * width_ > 0) {
      std::memset(row(worker, 0), 0, static_cast<size_t>(rows * width_) * sizeof(T));
    }
  }

  // Adds `count` rows of `from`, `columns` wide, to the rows `positions`, starting at `column`.
  template <typename Position>
  void add(int64_t worker, const Position* positions, int64_t count, const T* from, int64_t stride,
           int64_t columns, int64_t column) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kRowsAhead < count) {
        prefetch(row(worker, positions[i + kRowsAhead]) + column, columns);
      }
      cpu::add(from + i * stride, row(worker, positions[i]) + column, columns);
    }
  }

  // Sums each of the first `rows` rows over the first `workers` workers and calls store(index,
  // sum).
  template <typename Store>
  void reduce(int64_t workers, int64_t rows, const Store& store) {
    constexpr int64_t grain = 64;
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        T* sum = row(0, index);
        for (int64_t worker = 1; worker < workers; ++worker) {
          cpu::add(row(worker, index), sum, width_);
        }
        store(index, static_cast<const T*>(sum));
      }
    });
  }

 private:
  T* row(int64_t worker, int64_t index) const {
    return static_cast<T*>(sums_[static_cast<size_t>(worker)].get()) + index * width_;
  }

  int64_t width_;
  std::vector<at::DataPtr> sums_;
};

}  // namespace ascend_attn::cpu

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
#include <memory>
#include <vector>

#include "core/huge_pages.h"
#include "core/sequence_lengths.h"
#include "cpu/common/sparse_indices.h"
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

// The sums of one worker, a row per key of a sequence.
template <typename T>
class RowSums {
 public:
  RowSums(int64_t rows, int64_t width) : width_(width) {
    const auto bytes = static_cast<size_t>(rows * width) * sizeof(T);
    memory_ = c10::GetCPUAllocator()->allocate(bytes);
    prefer_huge_pages(memory_.get(), bytes);
  }

  T* row(int64_t index) const { return static_cast<T*>(memory_.get()) + index * width_; }
  int64_t width() const { return width_; }

  // Zeroes the first `rows` rows.
  void clear(int64_t rows) {
    if (rows * width_ > 0) {
      std::memset(row(0), 0, static_cast<size_t>(rows * width_) * sizeof(T));
    }
  }

  // Adds `count` rows of `from`, `columns` wide, to the rows `positions`, starting at `column`.
  template <typename Position>
  void add(const Position* positions, int64_t count, const Matrix<T>& from, int64_t columns,
           int64_t column) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kRowsAhead < count) {
        prefetch(row(positions[i + kRowsAhead]) + column, columns);
      }
      cpu::add(from.row(i), row(positions[i]) + column, columns);
    }
  }

 private:
  int64_t width_;
  at::DataPtr memory_;
};

// Sums over the tokens of a sequence, for each of its keys. A thread has a Worker, and sums, for
// all sequences.
template <typename T, typename Worker>
class KeySums {
 public:
  KeySums(const std::vector<Sequence>& sequences, int64_t width) {
    const int64_t workers = worker_count(longest(sequences, &Sequence::queries));
    workers_.resize(workers);
    for (int64_t worker = 0; worker < workers; ++worker) {
      sums_.emplace_back(longest(sequences, &Sequence::keys), width);
    }
  }

  // Calls add(worker, sums, token) for every token of the sequence, divided among threads, then
  // store(key, sum) for every key. The first token of a thread makes its worker, make_worker() ->
  // std::unique_ptr.
  template <typename MakeWorker, typename Add, typename Store>
  void operator()(const Sequence& sequence, const MakeWorker& make_worker, const Add& add,
                  const Store& store) {
    const int64_t workers = worker_count(sequence.queries);
    for_each_worker(workers, [&](int64_t worker) {
      sums_[worker].clear(sequence.keys);
      for (int64_t token = worker; token < sequence.queries; token += workers) {
        if (!workers_[worker]) {
          workers_[worker] = make_worker();
        }
        add(*workers_[worker], sums_[worker], token);
      }
    });
    constexpr int64_t grain = 64;
    at::parallel_for(0, sequence.keys, grain, [&](int64_t begin, int64_t end) {
      for (int64_t key = begin; key < end; ++key) {
        T* sum = sums_[0].row(key);
        for (int64_t worker = 1; worker < workers; ++worker) {
          cpu::add(sums_[worker].row(key), sum, sums_[0].width());
        }
        store(key, static_cast<const T*>(sum));
      }
    });
  }

  // Null for those that had no token.
  const std::vector<std::unique_ptr<Worker>>& workers() const { return workers_; }

 private:
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<RowSums<T>> sums_;
};

}  // namespace ascend_attn::cpu

// Attention to some of the keys of a row, to be merged with that to its other keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/common/parallel_tasks.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// The rows of one task. `out` is not yet divided by `sum`. Without keys, the pointers may be null.
template <typename T>
struct Partial {
  int64_t keys;
  T* out;  // (rows, D)
  T* max;  // (rows)
  T* sum;  // (rows)
};

template <typename T>
class Partials {
 public:
  Partials(int64_t count, int64_t rows, int64_t size)
      : rows_(rows),
        out_(count * rows, size, TileContent::unset),
        statistics_(2 * count, rows, TileContent::unset) {}

  Partial<T> operator[](int64_t index) const {
    return {0, out_.row(index * rows_), statistics_.row(2 * index), statistics_.row(2 * index + 1)};
  }

 private:
  int64_t rows_;
  Tile<T> out_;
  Tile<T> statistics_;
};

// Merges rows [begin, end) of `next` into `merged`. Both have keys.
template <typename T>
void merge(const Partial<T>& merged, const Partial<T>& next, int64_t begin, int64_t end,
           int64_t size) {
  for (int64_t r = begin; r < end; ++r) {
    const T max = std::max(merged.max[r], next.max[r]);
    const T factor = softmax_weight(merged.max[r], max);
    const T next_factor = softmax_weight(next.max[r], max);
    merged.max[r] = max;
    merged.sum[r] = factor * merged.sum[r] + next_factor * next.sum[r];
    vectorized([=, out = merged.out + r * size, next = next.out + r * size] {
      for (int64_t i = 0; i < size; ++i) {
        out[i] = factor * out[i] + next_factor * next[i];
      }
    });
  }
}

// The sizes of the tile that a worker writes its results to.
struct ResultSize {
  int64_t rows;
  int64_t columns;
};

// Calls store(task, result, begin, end) for all rows [begin, end) of every task, with the results
// of its parts merged. A task is one thread's. `divided`: some have several parts.
template <typename T, typename Task, typename MakeWorker, typename Store>
void attend_by_tasks(std::vector<Task> tasks, bool divided, ResultSize size,
                     const MakeWorker& make_worker, const Store& store) {
  struct Worker {
    decltype(make_worker()) attention;
    Partials<T> results;
  };
  const auto make = [&] {
    const int64_t results = divided ? 2 : 1;
    return std::make_unique<Worker>(Worker{make_worker(), {results, size.rows, size.columns}});
  };
  for_each_task(std::move(tasks), make, [&](Worker& worker, const Task& task) {
    auto merged = worker.results[0];
    worker.attention->load(task);
    const int64_t parts = task.parts();
    for (int64_t part = 0; part < parts; ++part) {
      if (merged.keys == 0) {
        worker.attention->part(task, part, merged);
        continue;
      }
      auto next = worker.results[1];
      worker.attention->part(task, part, next);
      if (next.keys > 0) {
        merge(merged, next, 0, task.rows(), size.columns);
      }
    }
    store(task, merged, 0, task.rows());
  });
}

// The same for a few tasks, as when decoding: threads share the parts of each.
template <typename T, typename Task, typename MakeWorker, typename Store>
void attend_by_parts(const std::vector<Task>& tasks, ResultSize size, const MakeWorker& make_worker,
                     const Store& store) {
  struct Part {
    const Task* task;
    int64_t index;
    int64_t result;
    int64_t cost;
  };
  std::vector<Part> parts;
  std::vector<int64_t> first_parts{0};
  std::vector<int64_t> first_rows{0};
  for (const auto& task : tasks) {
    const int64_t count = task.parts();
    for (int64_t index = 0; index < count; ++index) {
      parts.push_back({&task, index, static_cast<int64_t>(parts.size()), task.cost / count});
    }
    first_parts.push_back(static_cast<int64_t>(parts.size()));
    first_rows.push_back(first_rows.back() + task.rows());
  }
  const Partials<T> partials(first_parts.back(), size.rows, size.columns);
  std::vector<Partial<T>> results;
  for (int64_t result = 0; result < first_parts.back(); ++result) {
    results.push_back(partials[result]);
  }
  for_each_task(std::move(parts), make_worker, [&](auto& worker, const Part& part) {
    worker.load(*part.task);
    worker.part(*part.task, part.index, results[part.result]);
  });
  constexpr int64_t grain = 8;
  at::parallel_for(0, first_rows.back(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const auto next = std::upper_bound(first_rows.begin(), first_rows.end(), at);
      const int64_t task = next - first_rows.begin() - 1;
      const int64_t row = at - first_rows[task];
      Partial<T> merged{};
      for (int64_t part = first_parts[task]; part < first_parts[task + 1]; ++part) {
        if (merged.keys == 0) {
          merged = results[part];
        } else if (results[part].keys > 0) {
          merge(merged, results[part], row, row + 1, size.columns);
        }
      }
      store(tasks[task], merged, row, row + 1);
    }
  });
}

// Computes attention with split-KV: the keys of a task are divided into parts, whose results are
// merged in order. One thread does the same, so results do not depend on the thread count.
//
// A task has parts(), rows() and a cost. A worker, from make_worker(), computes the parts of the
// task that it loaded: load(task), and part(task, index, result), which sets result.keys.
template <typename T, typename Task, typename MakeWorker, typename Store>
void attend_to_parts(std::vector<Task> tasks, ResultSize size, const MakeWorker& make_worker,
                     const Store& store) {
  const bool divided =
      std::any_of(tasks.begin(), tasks.end(), [](const Task& task) { return task.parts() > 1; });
  if (!divided || enough_tasks(static_cast<int64_t>(tasks.size()))) {
    attend_by_tasks<T>(std::move(tasks), divided, size, make_worker, store);
  } else {
    attend_by_parts<T>(tasks, size, make_worker, store);
  }
}

// The outputs of one token: out (heads, D), and unless they are null softmax_max and softmax_sum
// (heads).
template <typename Input, typename T>
struct TokenOutputs {
  Input* out;
  T* softmax_max;
  T* softmax_sum;

  void store(const Partial<T>& from, int64_t begin, int64_t end, int64_t size) const {
    for (int64_t h = begin; h < end; ++h) {
      T max = 0;
      T sum = 0;
      if (from.keys > 0) {
        // Where every score is -inf, the softmax is none.
        const bool none = from.sum[h] == 0;
        max = none ? -std::numeric_limits<T>::infinity() : from.max[h];
        sum = none ? std::numeric_limits<T>::quiet_NaN() : from.sum[h];
        scale(from.out + h * size, T(1) / sum, out + h * size, size);
      } else {
        std::fill_n(out + h * size, size, Input(0));
      }
      if (softmax_max) {
        softmax_max[h] = max;
        softmax_sum[h] = sum;
      }
    }
  }
};

}  // namespace ascend_attn::cpu

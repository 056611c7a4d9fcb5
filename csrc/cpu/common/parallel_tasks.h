// Dynamic scheduling of tasks of different cost. A free thread takes the next task, so that all
// threads finish together; results must not depend on which thread runs a task, or when.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "cpu/common/parallel_scatter_add.h"

namespace ascend_attn::cpu {

// Returns whether so many tasks keep all threads busy to the end. Fewer are divided by their keys.
inline bool enough_tasks(int64_t tasks) { return tasks >= 4 * at::get_num_threads(); }

// Calls run(worker, task) for every task, the costliest first. Each thread creates its own worker,
// make_worker() -> std::unique_ptr, when it gets its first task.
template <typename Task, typename MakeWorker, typename Run>
void for_each_task(std::vector<Task> tasks, const MakeWorker& make_worker, const Run& run) {
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& a, const Task& b) { return a.cost > b.cost; });
  std::atomic<size_t> next{0};
  for_each_worker(worker_count(static_cast<int64_t>(tasks.size())), [&](int64_t) {
    decltype(make_worker()) worker;
    for (size_t task = next++; task < tasks.size(); task = next++) {
      if (!worker) {
        worker = make_worker();
      }
      run(*worker, tasks[task]);
    }
  });
}

}  // namespace ascend_attn::cpu

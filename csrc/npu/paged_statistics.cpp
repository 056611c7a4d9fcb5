#include "npu/paged_statistics.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/memory.h"
#include "npu/kernel.h"
#include "npu/selection.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::aclnn {
namespace {

using Attend = void (*)(const SparseFlashAttention&, SparseFlashAttention::Outputs&);

// The most that the gathered keys of one launch take, unless a single token selects more.
constexpr int64_t kMostBytes = int64_t{256} << 20;

at::Tensor integers(int64_t count, const at::Tensor& like) {
  return at::arange(count, like.options().dtype(at::kLong));
}

// Returns the rows of a cache, (num_blocks, block_size, 1, D), in these slots: (count, 1, D).
at::Tensor rows_in_slots(const at::Tensor& cache, const at::Tensor& slots) {
  const int64_t block_size = cache.size(1);
  const int64_t row = cache.stride(1);
  const auto flat = slots.flatten();
  if (cache.is_contiguous() || row <= 0 || cache.stride(0) % row != 0) {
    return cache.flatten(0, 1).index_select(0, flat);
  }
  // Its blocks lie apart, as those of a slice of a larger buffer do: to flatten it would copy it.
  const int64_t pitch = cache.stride(0) / row;
  const auto rows =
      cache.as_strided({(cache.size(0) - 1) * pitch + block_size, cache.size(2), cache.size(3)},
                       {row, cache.stride(2), cache.stride(3)});
  return rows.index_select(0, flat + flat.floor_divide(block_size) * (pitch - block_size));
}

// Returns the slots of the keys at `positions` of `sequences`, and slot 0 where none exists.
at::Tensor slots_of(const SparseFlashAttention& op, const at::Tensor& sequences,
                    const at::Tensor& positions, const at::Tensor& exists) {
  const auto& table = *op.pages.block_table;
  const int64_t block_size = op.key.size(1);
  const auto existing = at::where(exists, positions, 0);
  const auto number = existing.floor_divide(block_size);
  const auto entries = sequences * table.size(1) + number;
  const auto blocks = table.flatten().index_select(0, entries.flatten()).view(entries.sizes());
  return at::where(exists, blocks * block_size + (existing - number * block_size), 0);
}

// Returns the call with the keys in these slots, whose leading sizes are `tokens`.
SparseFlashAttention with_keys(const SparseFlashAttention& op, const at::Tensor& slots,
                               at::IntArrayRef tokens) {
  const auto gather = [&](const at::Tensor& cache) {
    auto sizes = tokens.vec();
    sizes.insert(sizes.end(), {1, cache.size(-1)});
    return rows_in_slots(cache, slots).view(sizes);
  };
  auto dense = op;
  dense.pages = {};
  dense.key = gather(op.key);
  dense.value = same_elements(op.value, op.key) ? dense.key : gather(op.value);
  if (op.options.key_rope) {
    dense.options.key_rope = gather(*op.options.key_rope);
  }
  return dense;
}

int64_t bytes_of_key(const SparseFlashAttention& op) {
  const int64_t elements = op.key.size(-1) +
                           (same_elements(op.value, op.key) ? 0 : op.value.size(-1)) +
                           (op.options.key_rope ? op.options.key_rope->size(-1) : 0);
  return std::max<int64_t>(elements * static_cast<int64_t>(op.key.itemsize()), 1);
}

// Clears the rows in which the kernels may write anything: `nothing` is (rows).
void zero_rows(const at::Tensor& nothing, const SparseFlashAttention::Outputs& outputs) {
  const int64_t rows = nothing.size(0);
  const auto zero = [&](const at::Tensor& output) {
    output.view({rows, output.numel() / rows}).masked_fill_(nothing.unsqueeze(-1), 0);
  };
  zero(std::get<0>(outputs));
  zero(std::get<1>(outputs));
  zero(std::get<2>(outputs));
}

// The call with all keys of every sequence.
SparseFlashAttention with_whole_sequences(const SparseFlashAttention& op) {
  const auto& lengths = *op.options.actual_seq_lengths_key;
  const int64_t batches = op.pages.block_table->size(0);
  const int64_t most = op.pages.block_table->size(1) * op.key.size(1);
  if (op.options.layout == Layout::BSND) {
    const auto positions = integers(most, op.query).expand({batches, most});
    const auto sequences = integers(batches, op.query).unsqueeze(-1);
    const auto exists = positions < lengths.unsqueeze(-1);
    return with_keys(op, slots_of(op, sequences, positions, exists), {batches, most});
  }
  // One sequence behind the other, and rows that belong to none.
  const auto ends = lengths.cumsum(0, at::kInt);
  const auto rows = integers(batches * most, op.query);
  const auto sequences = sequences_of_rows(ends, rows);
  const auto positions = rows - (ends - lengths).index_select(0, sequences);
  const auto exists = rows < ends.narrow(0, batches - 1, 1);
  auto dense = with_keys(op, slots_of(op, sequences, positions, exists), {batches * most});
  dense.options.actual_seq_lengths_key = ends;
  return dense;
}

// The queries of a call as batches of one token, each with the keys that it selects.
class Tokens {
 public:
  Tokens(const SparseFlashAttention& op, const SparseFlashAttention::Outputs& outputs)
      : op_(op),
        outputs_(outputs),
        selection_(with_head_axis(op.sparse_indices, op.query).flatten(0, -2)),
        rows_(selection_.size(0)),
        block_(op.options.sparse_block_size),
        slots_(selection_.size(1) * block_) {
    const auto& options = op.options;
    const auto visible = visible_keys_of_rows(op.query, op.key, options, /*paged=*/true);
    const auto rows = integers(op.query.size(-3), op.query);
    if (options.layout == Layout::BSND) {
      const int64_t batches = op.query.size(0);
      const int64_t tokens = op.query.size(1);
      auto seen = visible.view({visible.size(0), visible.size(1)}).expand({batches, tokens});
      if (options.actual_seq_lengths_query) {
        seen = at::where(rows < options.actual_seq_lengths_query->unsqueeze(-1), seen, 0);
      }
      visible_ = seen.reshape({rows_, 1});
      sequences_ =
          integers(batches, op.query).unsqueeze(-1).expand({batches, tokens}).reshape({rows_, 1});
    } else {
      const auto& ends = *options.actual_seq_lengths_query;
      const auto inside = rows < ends.narrow(0, ends.size(0) - 1, 1);
      visible_ = at::where(inside.unsqueeze(-1), visible.view({rows_, 1}), 0);
      sequences_ = sequences_of_rows(ends, rows).unsqueeze(-1);
    }
  }

  void attend(Attend attend) const {
    const int64_t most = std::max<int64_t>(kMostBytes / (slots_ * bytes_of_key(op_)), 1);
    for (int64_t begin = 0; begin < rows_; begin += most) {
      attend_to(begin, std::min(most, rows_ - begin), attend);
    }
  }

 private:
  void attend_to(int64_t begin, int64_t count, Attend attend) const {
    const auto [slots, counts] = selected_slots(begin, count);
    auto call = with_keys(op_, slots, {count, slots_});
    call.query = rows_of(op_.query, begin, count);
    if (op_.options.query_rope) {
      call.options.query_rope = rows_of(*op_.options.query_rope, begin, count);
    }
    const auto int32 = op_.query.options().dtype(at::kInt);
    call.sparse_indices = at::arange(slots_, int32).expand({count, 1, 1, slots_}).contiguous();
    call.options.actual_seq_lengths_query = at::ones({count}, int32);
    // Nothing says how the kernel treats a batch without keys.
    call.options.actual_seq_lengths_key = counts.clamp_min(1);
    call.options.layout = LayoutArgument("BSND");
    call.options.sparse_mode = 0;
    call.options.sparse_block_size = 1;
    const auto& [out, softmax_max, softmax_sum] = outputs_;
    const auto statistics = [&](const at::Tensor& tensor) {
      return tensor.view({rows_, 1, 1, tensor.size(-1)}).narrow(0, begin, count);
    };
    SparseFlashAttention::Outputs results{rows_of(out, begin, count), statistics(softmax_max),
                                          statistics(softmax_sum)};
    attend(call, results);
    zero_rows(counts == 0, results);
  }

  at::Tensor rows_of(const at::Tensor& tensor, int64_t begin, int64_t count) const {
    return tensor.reshape({rows_, 1, tensor.size(-2), tensor.size(-1)}).narrow(0, begin, count);
  }

  // Returns the slots of the keys that the rows attend to, (count, slots), those of each row
  // first, and their number, (count).
  std::pair<at::Tensor, at::Tensor> selected_slots(int64_t begin, int64_t count) const {
    const auto selection = ended_by_first_gap(selection_.narrow(0, begin, count)).to(at::kLong);
    const auto visible = visible_.narrow(0, begin, count);
    const auto blocks = (visible + (block_ - 1)).floor_divide(block_);
    const auto read =
        (selection >= 0).logical_and_(integers(selection.size(1), selection) < blocks);
    const auto keys_of_blocks = [&](const at::Tensor& x) {
      return x.unsqueeze(-1).expand({count, x.size(1), block_});
    };
    const auto positions =
        (keys_of_blocks(selection) * block_ + integers(block_, selection)).flatten(1);
    const auto exists = keys_of_blocks(read).flatten(1).logical_and(positions < visible);
    const auto slots = slots_of(op_, sequences_.narrow(0, begin, count), positions, exists);
    // Keys that are masked, or that a cut block lacks, leave holes. The last column takes them.
    const auto numbers = exists.to(at::kInt).cumsum(-1, at::kInt);
    const auto targets = at::where(exists, numbers - 1, slots_).to(at::kLong);
    const auto in_order =
        at::zeros({count, slots_ + 1}, slots.options()).scatter_(1, targets, slots);
    return {in_order.narrow(1, 0, slots_), numbers.select(1, slots_ - 1)};
  }

  const SparseFlashAttention& op_;
  const SparseFlashAttention::Outputs& outputs_;
  at::Tensor selection_;  // (rows, K)
  int64_t rows_;
  int64_t block_;
  int64_t slots_;                   // keys per row
  at::Tensor visible_, sequences_;  // (rows, 1)
};

}  // namespace

void attend_to_gathered_keys(const SparseFlashAttention& op,
                             const SparseFlashAttention::Outputs& outputs, Attend attend) {
  const auto& [out, softmax_max, softmax_sum] = outputs;
  const auto& table = *op.pages.block_table;
  const int64_t keys = table.numel() * op.key.size(1);
  const int64_t selected = op.sparse_indices.numel() * op.options.sparse_block_size;
  if (softmax_max.numel() == 0 || selected == 0 || keys == 0 || op.key.size(0) == 0) {
    fill_outputs(outputs, 0);
    return;
  }
  if (keys >= selected || keys > kMostBytes / bytes_of_key(op)) {
    Tokens(op, outputs).attend(attend);
    return;
  }
  auto results = outputs;
  attend(with_whole_sequences(op), results);
  zero_rows(with_head_axis(op.sparse_indices, op.query).select(-1, 0).flatten() < 0, outputs);
}

}  // namespace ascend_attn::aclnn

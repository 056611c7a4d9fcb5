#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <optional>
#include <vector>

#include "core/sequence_lengths.h"
#include "npu/kernel.h"
#include "npu/packing.h"
#include "ops/lightning_indexer.h"

namespace ascend_attn::aclnn {
namespace {

using LightningIndexerGradPrototype = int(AclTensor query, AclTensor key, AclTensor dy,
                                          AclTensor sparse_indices, AclTensor weights,
                                          AclTensor actual_seq_q_len, AclTensor actual_seq_kv_len,
                                          int64_t head_num, char* input_layout, int64_t sparse_mode,
                                          int64_t pre_tokens, int64_t next_tokens,
                                          bool deterministic, AclTensor dq, AclTensor dk,
                                          AclTensor dweights);
constexpr Launcher<LightningIndexerGrad, LightningIndexerGradPrototype>
    aclnn_lightning_indexer_grad;

// Sequences one behind the other in queries and keys, none of them empty, all of the same lengths.
struct EqualSequences {
  Sequence first;
  int64_t count = 1;

  int64_t queries() const { return count * first.queries; }
  int64_t keys() const { return count * first.keys; }
  bool continues_with(const Sequence& next) const {
    return next.queries == first.queries && next.keys == first.keys &&
           next.query_begin == first.query_begin + queries() &&
           next.key_begin == first.key_begin + keys();
  }
};

std::vector<EqualSequences> runs_of(const std::vector<Sequence>& sequences) {
  std::vector<EqualSequences> runs;
  for (const auto& sequence : sequences) {
    if (sequence.empty()) {
      continue;
    }
    if (!runs.empty() && runs.back().continues_with(sequence)) {
      ++runs.back().count;
    } else {
      runs.push_back({sequence});
    }
  }
  return runs;
}

// The cumulative lengths of every run, counted from its own first token: row 0 of the queries, row
// 1 of the keys, one run behind the other.
at::Tensor ends_of(const std::vector<EqualSequences>& runs, const at::Tensor& like) {
  std::vector<int32_t> query_ends;
  std::vector<int32_t> key_ends;
  for (const auto& run : runs) {
    for (int64_t i = 1; i <= run.count; ++i) {
      query_ends.push_back(static_cast<int32_t>(i * run.first.queries));
      key_ends.push_back(static_cast<int32_t>(i * run.first.keys));
    }
  }
  return to_device(at::stack({at::tensor(query_ends), at::tensor(key_ends)}), like);
}

void launch_grad(const LightningIndexerGrad& op, const LightningIndexerGrad::Outputs& outputs) {
  const auto& [d_query, d_key, d_weights] = outputs;
  aclnn_lightning_indexer_grad(
      op.query, op.key, op.d_values, op.sparse_indices, op.weights, op.actual_seq_lengths_query,
      op.actual_seq_lengths_key, op.query.size(-2), op.layout.text(), op.sparse_mode, op.pre_tokens,
      op.next_tokens, is_deterministic(op.deterministic), d_query, d_key, d_weights);
}

// The kernel mistakes rows of packs whose sequences differ in length for the first of a sequence:
// it leaves rows of d_query and d_weights unwritten, and adds others to d_key twice. It does not
// where all are of the same lengths, so that every such run has a launch of its own, on views. An
// empty sequence, which divides by zero, is in none of them.
//
// Lengths in BSND, which the kernel ignores, are launched as well as runs in TND: between them lies
// the padding.
void launch_runs(const LightningIndexerGrad& op, const LightningIndexerGrad::Outputs& outputs) {
  const auto& [d_query, d_key, d_weights] = outputs;
  const bool packed = op.layout == Layout::TND;
  const auto sequences = sequences_on_host(op.name, op.layout.value(), op.query, op.key,
                                           op.actual_seq_lengths_query, op.actual_seq_lengths_key);
  op.check_key_lengths(sequences);
  const auto runs = runs_of(sequences);
  if (packed && runs.size() == 1 && runs[0].count == static_cast<int64_t>(sequences.size())) {
    launch_grad(op, outputs);
    return;
  }
  if (runs.empty()) {
    return;
  }
  const auto by_token = [&](const at::Tensor& tensor) {
    return packed ? tensor : tensor.flatten(0, 1);
  };
  const auto all_queries = by_token(op.query);
  const auto all_keys = by_token(op.key);
  const auto all_d_values = by_token(op.d_values);
  const auto all_indices = by_token(op.sparse_indices);
  const auto all_weights = by_token(op.weights);
  const LightningIndexerGrad::Outputs all_gradients{by_token(d_query), by_token(d_key),
                                                    by_token(d_weights)};
  const auto ends = ends_of(runs, op.query);
  int64_t sequence = 0;
  for (const auto& run : runs) {
    const auto of_queries = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, run.first.query_begin, run.queries());
    };
    const auto of_keys = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, run.first.key_begin, run.keys());
    };
    const auto of_sequences = [&](int64_t row) { return ends[row].narrow(0, sequence, run.count); };
    auto part = op;
    part.query = of_queries(all_queries);
    part.key = of_keys(all_keys);
    part.d_values = of_queries(all_d_values);
    part.sparse_indices = of_queries(all_indices);
    part.weights = of_queries(all_weights);
    part.actual_seq_lengths_query = of_sequences(0);
    part.actual_seq_lengths_key = of_sequences(1);
    part.layout = LayoutArgument("TND");
    launch_grad(part, {of_queries(std::get<0>(all_gradients)), of_keys(std::get<1>(all_gradients)),
                       of_queries(std::get<2>(all_gradients))});
    sequence += run.count;
  }
}

void lightning_indexer_grad(const LightningIndexerGrad& op,
                            LightningIndexerGrad::Outputs& outputs) {
  const bool packed = op.layout == Layout::TND;
  const int64_t sequences = packed ? op.actual_seq_lengths_query->numel() : op.query.size(0);
  const bool empty = sequences == 0 || op.query.numel() == 0 || op.key.numel() == 0;
  const bool padded = !packed && (op.actual_seq_lengths_query || op.actual_seq_lengths_key);
  if (packed || padded || empty) {
    // Rows of no sequence are not written.
    fill_outputs(outputs, 0);
  }
  if (empty) {
    return;
  }
  if (padded || (packed && sequences > 1)) {
    launch_runs(op, outputs);
  } else {
    launch_grad(op, outputs);
  }
}

TORCH_LIBRARY_IMPL(ascend, PrivateUse1, m) {
  register_checked_kernel<LightningIndexerGrad, lightning_indexer_grad>(m);
}

}  // namespace
}  // namespace ascend_attn::aclnn

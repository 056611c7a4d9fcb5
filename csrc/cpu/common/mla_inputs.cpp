#include "cpu/common/mla_inputs.h"

#include "core/tensor_checks.h"
#include "cpu/common/sparse_inputs.h"
#include "ops/compressed_keys.h"
#include "ops/sparse_indices.h"

namespace ascend_attn::cpu {
namespace {

// Batches of a call without compressed keys have none.
std::vector<Sequence> compressed_sequences(const std::vector<Sequence>& originals) {
  auto result = originals;
  for (auto& sequence : result) {
    sequence.key_begin = sequence.keys = 0;
  }
  return result;
}

// Tokens of BSND calls without a query and without a key belong to no sequence.
void make_equal(std::vector<Sequence>& a, std::vector<Sequence>& b) {
  const auto count = std::min(a.size(), b.size());
  a.resize(count);
  b.resize(count);
}

KeptKeys window_of(const SparseMlaOptions& options, const Sequence& sequence) {
  const auto mode = static_cast<SparseMode>(options.ori_mask_mode);
  if (mode != SparseMode::band) {
    return visible_keys(mode, sequence.queries, sequence.keys);
  }
  const auto bound = [](int64_t keys) { return keys < 0 ? KeptKeys::kUnbounded : keys; };
  return kept_keys(mode, sequence.queries, sequence.keys, bound(options.ori_win_left),
                   bound(options.ori_win_right), /*prefix=*/0, /*is_band=*/false);
}

void check_table(std::string_view op, const BlockTable& table, const Sequence& sequence,
                 int64_t begin, int64_t end, int64_t block_size) {
  for (int64_t key = begin / block_size * block_size; key < end; key += block_size) {
    table.check_block(op, sequence, key);
  }
}

}  // namespace

template <typename Op>
MlaInputs::MlaInputs(const Op& op, const SparseMlaPages& pages)
    : query(with_dense_rows(op.query)),
      ori_kv(with_dense_rows(op.ori_kv)),
      heads(query.size(-2)),
      size(query.size(-1)) {
  const auto& options = op.options;
  const auto layout = options.layout.value();
  const auto ori_pages = pages.ori();
  ori_table = BlockTable(ori_pages, op.ori_kv, "ori_block_table");
  auto originals = read_sequences(op.name, layout, op.query, op.ori_kv, ori_pages,
                                  options.actual_seq_lengths_query,
                                  options.actual_seq_lengths_ori_kv, "actual_seq_lengths_ori_kv");
  auto compressed = compressed_sequences(originals);
  const auto mode = static_cast<SparseMode>(options.cmp_mask_mode);
  std::vector<int64_t> residuals(originals.size());
  if (op.cmp_kv) {
    const auto cmp_pages = pages.cmp();
    cmp_kv = with_dense_rows(*op.cmp_kv);
    cmp_table = BlockTable(cmp_pages, *op.cmp_kv, "cmp_block_table");
    compressed = read_sequences(op.name, layout, op.query, *op.cmp_kv, cmp_pages,
                                options.actual_seq_lengths_query, options.actual_seq_lengths_cmp_kv,
                                "actual_seq_lengths_cmp_kv");
    make_equal(originals, compressed);
    if (options.cmp_residual_kv || mode == SparseMode::right_down_causal) {
      residuals = read_residuals(op.name, {"cmp_residual_kv", options.cmp_residual_kv},
                                 options.cmp_ratio, keys_of(originals), keys_of(compressed));
    }
  }
  const bool aligned = options.ori_mask_mode != static_cast<int64_t>(SparseMode::standard);
  for (size_t b = 0; b < originals.size(); ++b) {
    const auto& of = originals[b];
    const auto visible = op.cmp_kv ? visible_compressed_keys(mode, of.queries, compressed[b].keys,
                                                             options.cmp_ratio, residuals[b])
                                   : visible_keys(SparseMode::standard, of.queries, 0);
    sequences.push_back({of, compressed[b], window_of(options, of), visible,
                         aligned ? std::max<int64_t>(of.queries - of.keys, 0) : 0});
  }
  if (op.cmp_sparse_indices) {
    indices = with_dense_rows(with_head_axis(on_host(*op.cmp_sparse_indices), op.query));
    for (const auto& sequence : sequences) {
      check_index_rows(op.name, {"cmp_sparse_indices", indices}, layout,
                       sequence.originals.query_begin, sequence.originals.queries,
                       sequence.compressed.keys);
    }
  }
  if (options.sink) {
    sink = options.sink->contiguous();
  }
  if (ori_table.given()) {
    check_blocks(op.name);
  }
}

template MlaInputs::MlaInputs(const SparseFlashMla&, const SparseMlaPages&);
template MlaInputs::MlaInputs(const SparseFlashMlaGrad&, const SparseMlaPages&);

// Checks that the caches have every block that a query reads.
void MlaInputs::check_blocks(std::string_view op) const {
  for (const auto& sequence : sequences) {
    const int64_t first = sequence.blind_queries;
    const int64_t last = sequence.originals.queries - 1;
    if (first > last) {
      continue;
    }
    check_table(op, ori_table, sequence.originals, sequence.window.begin(first),
                sequence.window.end(last), ori_kv.size(1));
    if (!cmp_kv.defined()) {
      continue;
    }
    if (!indices.defined()) {
      check_table(op, cmp_table, sequence.compressed, 0, sequence.visible.end(last),
                  cmp_kv.size(1));
      continue;
    }
    const TokenRows<int32_t> rows(indices, sequence.originals.query_begin);
    for (int64_t query = first; query <= last; ++query) {
      auto keys = sequence.keys_of(query, rows.row(query), indices.size(-1));
      for (int64_t key = 0; keys.next(&key, 1) > 0;) {
        if (key >= sequence.originals.keys) {
          cmp_table.check_block(op, sequence.compressed, key - sequence.originals.keys);
        }
      }
    }
  }
}

std::vector<Sequence> MlaInputs::joined_sequences() const {
  std::vector<Sequence> result;
  for (const auto& sequence : sequences) {
    result.push_back(sequence.originals);
    result.back().keys = sequence.keys();
  }
  return result;
}

void MlaInputs::zero_unused(std::initializer_list<at::Tensor> of_query,
                            const at::Tensor& of_originals, const at::Tensor& of_compressed) const {
  for (const auto& output : of_query) {
    zero_unused_tokens(output, token_count(query), sequences, &Sequence::queries,
                       &MlaSequence::originals);
  }
  zero_unused_tokens(of_originals, token_count(ori_kv), sequences, &Sequence::keys,
                     &MlaSequence::originals);
  if (cmp_kv.defined()) {
    zero_unused_tokens(of_compressed, token_count(cmp_kv), sequences, &Sequence::keys,
                       &MlaSequence::compressed);
  }
}

}  // namespace ascend_attn::cpu

#include "npu/packing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/util/TypeCast.h>

#include "core/error.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

// Calls `copy` with the first token in a padded tensor, seen as (B * S, ...), the first one in a
// packed one, and their number, for every sequence.
template <typename Copy>
void for_each_span(const std::vector<Sequence>& sequences, TokensOf tokens, const Copy& copy) {
  int64_t packed = 0;
  for (const auto& sequence : sequences) {
    copy(tokens == kQueries ? sequence.query_begin : sequence.key_begin, packed, sequence.*tokens);
    packed += sequence.*tokens;
  }
}

}  // namespace

std::vector<Sequence> sequences_on_host(const char* op, Layout layout, const at::Tensor& query,
                                        const at::Tensor& key, const Lengths& query_lengths,
                                        const Lengths& key_lengths) {
  check_implemented(
      !is_capturing(), op, query_lengths ? "actual_seq_lengths_query" : "actual_seq_lengths_key",
      "expected a single sequence, or layout BSND without lengths, in a call that a graph "
      "captures, got ",
      (query_lengths ? query_lengths : key_lengths)->numel(),
      " sequences, whose lengths the launch has to know on the host");
  if (query_lengths.waits() && key_lengths.waits()) {
    const auto lengths = at::stack({*query_lengths, *key_lengths}).cpu();
    return read_sequences(op, layout, query, key, lengths[0], lengths[1]);
  }
  return read_sequences(op, layout, query, key, query_lengths, key_lengths);
}

Packing::Packing(const std::vector<Sequence>& sequences, const at::Tensor& query,
                 const at::Tensor& key) {
  for (const auto& sequence : sequences) {
    complete_ = complete_ && sequence.queries == query.size(1) && sequence.keys == key.size(1);
    if (sequence.empty()) {
      continue;
    }
    sequences_.push_back(sequence);
    const auto end = [](const std::vector<int32_t>& ends, int64_t length) {
      return c10::checked_convert<int32_t>((ends.empty() ? 0 : ends.back()) + length, "int32");
    };
    query_ends_.push_back(end(query_ends_, sequence.queries));
    key_ends_.push_back(end(key_ends_, sequence.keys));
  }
}

at::Tensor Packing::packed(TokensOf tokens, const at::Tensor& padded) const {
  const auto from = padded.flatten(0, 1);
  auto sizes = from.sizes().vec();
  sizes[0] = (tokens == kQueries ? query_ends_ : key_ends_).back();
  const auto to = at::empty(sizes, from.options());
  for_each_span(sequences_, tokens, [&](int64_t source, int64_t target, int64_t length) {
    to.narrow(0, target, length).copy_(from.narrow(0, source, length));
  });
  return to;
}

void Packing::unpack(TokensOf tokens, const at::Tensor& packed, const at::Tensor& padded) const {
  if (tokens == nullptr) {
    padded.copy_(packed);
  } else if (padded.numel() != 0) {
    const auto to = padded.flatten(0, 1);
    for_each_span(sequences_, tokens, [&](int64_t target, int64_t source, int64_t length) {
      const auto rows = to.narrow(0, target, length);
      rows.copy_(packed.narrow(0, source, length).view(rows.sizes()));
    });
  }
}

void Packing::pack_statistics(at::Tensor& max, at::Tensor& sum) const {
  for (auto* statistics : {&max, &sum}) {
    *statistics = packed(kQueries, statistics->squeeze(1)).unsqueeze(0);
  }
}
void Packing::pack_numbers(std::optional<at::Tensor>& of_batches) const {
  std::vector<int64_t> batches;
  for (const auto& sequence : sequences_) {
    batches.push_back(sequence.batch);
  }
  replace(of_batches, [&](const at::Tensor& numbers) {
    return numbers.index_select(0, to_device(at::tensor(batches), numbers));
  });
}
void Packing::set_lengths(DeviceLengths& lengths, const std::vector<int32_t>& ends,
                          const at::Tensor& query) {
  lengths = to_device(at::tensor(ends, at::kInt), query);
}
}  // namespace ascend_attn::aclnn

#include "npu/packing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/util/TypeCast.h>

#include "core/error.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

// Copies spans of tokens between a padded tensor, seen as (B * S, ...), and a packed one.
template <typename Copy>
void for_each_span(const std::vector<Sequence>& sequences, int64_t Sequence::* begin,
                   int64_t Sequence::* count, const Copy& copy) {
  int64_t packed = 0;
  for (const auto& sequence : sequences) {
    copy(sequence.*begin, packed, sequence.*count);
    packed += sequence.*count;
  }
}

at::Tensor pack(const at::Tensor& padded, const std::vector<Sequence>& sequences, int64_t tokens,
                int64_t Sequence::* begin, int64_t Sequence::* count) {
  const auto from = padded.flatten(0, 1);
  auto sizes = from.sizes().vec();
  sizes[0] = tokens;
  const auto to = at::empty(sizes, from.options());
  for_each_span(sequences, begin, count, [&](int64_t source, int64_t target, int64_t length) {
    to.narrow(0, target, length).copy_(from.narrow(0, source, length));
  });
  return to;
}

void unpack(const at::Tensor& packed, const at::Tensor& padded,
            const std::vector<Sequence>& sequences, int64_t Sequence::* begin,
            int64_t Sequence::* count) {
  const auto to = padded.flatten(0, 1);
  for_each_span(sequences, begin, count, [&](int64_t target, int64_t source, int64_t length) {
    to.narrow(0, target, length).copy_(packed.narrow(0, source, length));
  });
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

at::Tensor Packing::queries(const at::Tensor& padded) const {
  return pack(padded, sequences_, query_ends_.back(), &Sequence::query_begin, &Sequence::queries);
}
at::Tensor Packing::keys(const at::Tensor& padded) const {
  return pack(padded, sequences_, key_ends_.back(), &Sequence::key_begin, &Sequence::keys);
}
at::Tensor Packing::numbers(const at::Tensor& of_batches) const {
  std::vector<int64_t> batches;
  for (const auto& sequence : sequences_) {
    batches.push_back(sequence.batch);
  }
  return of_batches.index_select(0, to_device(at::tensor(batches), of_batches));
}
at::Tensor Packing::query_ends(const at::Tensor& like) const {
  return to_device(at::tensor(query_ends_, at::kInt), like);
}
at::Tensor Packing::key_ends(const at::Tensor& like) const {
  return to_device(at::tensor(key_ends_, at::kInt), like);
}
void Packing::unpack_queries(const at::Tensor& packed, const at::Tensor& to) const {
  unpack(packed, to, sequences_, &Sequence::query_begin, &Sequence::queries);
}
void Packing::unpack_keys(const at::Tensor& packed, const at::Tensor& to) const {
  unpack(packed, to, sequences_, &Sequence::key_begin, &Sequence::keys);
}

}  // namespace ascend_attn::aclnn

#include "npu/fused_infer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "core/error.h"
#include "core/sequence_lengths.h"
#include "core/sparse_mode.h"

namespace ascend_attn::aclnn {

at::Tensor dense(const char* op, const at::Tensor& tensor) {
  check_implemented(tensor.is_contiguous() || !GivenWorkspace::current(), op, "query, key, value",
                    "expected contiguous tensors, also of masks, scales and ropes, in a call whose "
                    "lengths a graph updates, got strides ",
                    tensor.strides());
  return tensor.contiguous();
}

std::optional<at::Tensor> dense(const char* op, const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(dense(op, *tensor)) : std::nullopt;
}

IntegerList lengths_per_batch(const Lengths& lengths, int64_t batches, int64_t tokens) {
  IntegerList all;
  for (int64_t b = 0; b < batches; ++b) {
    all.push_back(actual_length(lengths, b, tokens));
  }
  return all;
}

std::optional<at::Tensor> launched_mask(const char* op, const std::optional<at::Tensor>& mask,
                                        int64_t sparse_mode, bool rows_are_batches) {
  if (!mask || mask->numel() == 0) {
    return std::nullopt;
  }
  const auto without_gaps = dense(op, *mask);
  return mask->dim() > 2 || has_compressed_mask(static_cast<SparseMode>(sparse_mode))
             ? without_gaps
             : without_gaps.unsqueeze(rows_are_batches ? 1 : 0);
}

namespace {

// Returns a mask of one row per batch that masks out the keys before `begins` as well.
at::Tensor without_first_keys(const char* op, const std::optional<at::Tensor>& mask, int64_t keys,
                              const IntegerList& begins, const at::Tensor& query) {
  check_implemented(!GivenWorkspace::current(), op, "pre_tokens",
                    "expected a band from key 0 on where Sq = 1, in a call whose lengths a graph "
                    "updates, got ",
                    c10::IntArrayRef(begins), " as the first keys");
  const auto batches = static_cast<int64_t>(begins.size());
  auto result = mask ? mask->expand({batches, 1, mask->size(-1)})
                           .to(at::kBool, /*non_blocking=*/false,
                               /*copy=*/true)
                     : at::zeros({batches, 1, keys}, query.options().dtype(at::kBool));
  for (int64_t b = 0; b < batches; ++b) {
    if (begins[b] != 0) {
      result[b].narrow(-1, 0, begins[b]).fill_(true);
    }
  }
  return result;
}

}  // namespace

void keep_by_lengths(const char* op, FusedInfer& call, int64_t most_keys) {
  const auto mode = static_cast<SparseMode>(call.sparse_mode);
  auto& key_lengths = *call.key_lengths;
  IntegerList begins(key_lengths.size(), 0);
  for (size_t b = 0; b < key_lengths.size(); ++b) {
    auto& keys = key_lengths[b];
    auto kept = KeptKeys{keys};
    if (call.atten_mask) {
      kept = kept_keys(mode, /*queries=*/1, keys, call.pre_tokens, call.next_tokens, /*prefix=*/0,
                       /*is_band=*/false);
    }
    const bool is_dead = (*call.query_lengths)[b] == 0 || kept.begin(0) == kept.end(0);
    begins[b] = is_dead ? 0 : kept.begin(0);
    keys = is_dead ? 0 : kept.end(0);
  }
  if (call.atten_mask && has_compressed_mask(mode)) {
    call.atten_mask.reset();
  } else if (call.atten_mask) {
    call.atten_mask = dense(op, call.atten_mask->flatten(0, -3).narrow(-2, 0, 1));
  }
  if (std::ranges::any_of(begins, [](int64_t begin) { return begin != 0; })) {
    call.atten_mask = without_first_keys(op, call.atten_mask, most_keys, begins, call.query);
  }
  call.sparse_mode =
      static_cast<int64_t>(call.atten_mask ? SparseMode::all_mask : SparseMode::standard);
  call.pre_tokens = call.next_tokens = INT32_MAX;
}

}  // namespace ascend_attn::aclnn

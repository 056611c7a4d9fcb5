#include "npu/pack_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/sparse_mode.h"
#include "npu/dense_lists.h"
#include "npu/kernel.h"

namespace ascend_attn::aclnn {
namespace {

constexpr int64_t kMostLengthsWithPrefix = 1000;
constexpr int64_t kBitsPerByte = 8;

bool has_prefix(const FlashAttentionOptions& options) {
  return options.sparse_mode == static_cast<int64_t>(SparseMode::prefix_compressed);
}

int64_t most_lengths(const FlashAttentionOptions& options) {
  return has_prefix(options) ? kMostLengthsWithPrefix : kMostLengths;
}

// A pack and what of the call's tensors belongs to a run [begin, end) of its sequences.
class Pack {
 public:
  Pack(const at::Tensor& query, const at::Tensor& key, const FlashAttentionOptions& options)
      : options_(options),
        heads_(options.heads().expect_int()),
        query_tokens_(query.size(0)),
        key_tokens_(key.size(0)),
        sequences_(packed_sequences(options.actual_seq_lengths_query.values(),
                                    options.actual_seq_lengths_key.values())) {
    for (const auto& sequence : sequences_) {
      pairs_before_.push_back(pairs_);
      pairs_ += sequence.queries * sequence.keys;
    }
    pairs_before_.push_back(pairs_);
  }

  // Returns where each part ends. `closed_by_launch`: the launch adds a length to the last part.
  std::vector<int64_t> ends(bool closed_by_launch) const {
    const int64_t most = most_lengths(options_);
    const int64_t count = size();
    std::vector<int64_t> ends;
    int64_t begin = 0;
    while (count - begin + closed_by_launch > most) {
      begin = on_a_byte(begin + most / 2, std::min(begin + most, count - closed_by_launch));
      ends.push_back(begin);
    }
    ends.push_back(count);
    return ends;
  }

  PackPart part(int64_t begin, int64_t end) const {
    const bool last = end == size();
    const auto& first = sequences_[begin];
    const int64_t query_end = last ? query_tokens_ : sequences_[end].query_begin;
    const int64_t key_end = last ? key_tokens_ : sequences_[end].key_begin;
    PackPart part{first.query_begin,
                  query_end - first.query_begin,
                  first.key_begin,
                  key_end - first.key_begin,
                  pairs_before_[begin] < pairs_before_[end],
                  options_};
    if (part.has_scores) {
      auto& o = part.options;
      o.actual_seq_lengths_query =
          ends_from(begin, end, options_.actual_seq_lengths_query.values(), first.query_begin);
      o.actual_seq_lengths_key =
          ends_from(begin, end, options_.actual_seq_lengths_key.values(), first.key_begin);
      o.prefix = prefix(begin, end);
      o.sparse_mode = mode(begin, end);
      o.atten_mask = mask(begin, end);
      o.pse_shift = pse(begin, end);
      o.drop_mask = drop_mask(begin, end);
    }
    return part;
  }

 private:
  int64_t size() const { return static_cast<int64_t>(sequences_.size()); }

  // Returns the last end in [least, most] at which the bits of drop_mask fill their bytes, or
  // `most` if there is none.
  int64_t on_a_byte(int64_t least, int64_t most) const {
    if (!options_.drop_mask) {
      return most;
    }
    for (int64_t end = most; end >= least; --end) {
      if (heads_ * pairs_before_[end] % kBitsPerByte == 0) {
        return end;
      }
    }
    return most;
  }

  // Returns the cumulative lengths of the run, counted from its first token. A 0 that closes the
  // pack stays 0.
  static std::vector<int64_t> ends_from(int64_t begin, int64_t end, c10::ArrayRef<int64_t> ends,
                                        int64_t first) {
    std::vector<int64_t> of_run;
    for (int64_t b = begin; b < end; ++b) {
      of_run.push_back(std::max<int64_t>(ends[b] - first, 0));
    }
    return of_run;
  }

  // Other modes ignore the list, of whatever length.
  Lengths prefix(int64_t begin, int64_t end) const {
    if (!options_.prefix || !has_prefix(options_)) {
      return {};
    }
    return options_.prefix.values().slice(begin, end - begin).vec();
  }

  // In modes 7 and 8, one sequence of the pack has the band.
  int64_t mode(int64_t begin, int64_t end) const {
    const auto mode = static_cast<SparseMode>(options_.sparse_mode);
    if (mode == SparseMode::right_down_causal_band && pairs_before_[end] < pairs_) {
      return static_cast<int64_t>(SparseMode::right_down_causal);
    }
    if (mode == SparseMode::band_left_up_causal && pairs_before_[begin] > 0) {
      return static_cast<int64_t>(SparseMode::left_up_causal);
    }
    return options_.sparse_mode;
  }

  int64_t longest(int64_t begin, int64_t end, int64_t Sequence::* tokens) const {
    int64_t most = 0;
    for (int64_t b = begin; b < end; ++b) {
      most = std::max(most, sequences_[b].*tokens);
    }
    return most;
  }

  std::optional<at::Tensor> mask(int64_t begin, int64_t end) const {
    auto mask = options_.atten_mask;
    if (!mask || has_compressed_mask(static_cast<SparseMode>(options_.sparse_mode))) {
      return mask;
    }
    const auto corner = [&](int64_t first, int64_t last) {
      return std::pair(longest(first, last, &Sequence::queries),
                       longest(first, last, &Sequence::keys));
    };
    if (mask->dim() == 2 && std::pair(mask->size(0), mask->size(1)) != corner(0, size())) {
      // A mask of (sum Sq, sum Skv).
      const auto& first = sequences_[begin];
      const auto& last = sequences_[end - 1];
      return mask->narrow(0, first.query_begin, last.query_begin + last.queries - first.query_begin)
          .narrow(1, first.key_begin, last.key_begin + last.keys - first.key_begin);
    }
    if (mask->dim() == 4 && mask->size(0) > 1) {
      mask = mask->narrow(0, begin, end - begin);
    }
    const auto [queries, keys] = corner(begin, end);
    return mask->narrow(-2, 0, queries).narrow(-1, 0, keys);
  }

  std::optional<at::Tensor> pse(int64_t begin, int64_t end) const {
    const auto& pse = options_.pse_shift;
    if (!pse || (options_.pse_type > 1 && pse->dim() == 1)) {
      return pse;  // slopes that all sequences share
    }
    if (pse->dim() > 1) {
      return pse->size(0) > 1 ? pse->narrow(0, begin, end - begin) : *pse;
    }
    const int64_t scores = heads_ * (pairs_before_[end] - pairs_before_[begin]);
    if (pse->size(0) == heads_ * pairs_) {
      return pse->narrow(0, heads_ * pairs_before_[begin], scores);
    }
    const auto& last = sequences_[end - 1];
    const int64_t first_key = sequences_[begin].key_begin;
    const int64_t keys = last.key_begin + last.keys - first_key;
    if (heads_ * keys != scores) {
      return pse->narrow(0, heads_ * first_key, heads_ * keys);
    }
    // By its size, the device would take this part for one with a value of every score.
    std::vector<at::Tensor> of_scores;
    for (int64_t b = begin; b < end; ++b) {
      const auto& sequence = sequences_[b];
      of_scores.push_back(pse->narrow(0, heads_ * sequence.key_begin, heads_ * sequence.keys)
                              .view({heads_, 1, sequence.keys})
                              .expand({-1, sequence.queries, -1})
                              .flatten());
    }
    return at::cat(of_scores);
  }

  std::optional<at::Tensor> drop_mask(int64_t begin, int64_t end) const {
    if (!options_.drop_mask) {
      return std::nullopt;
    }
    // torch_npu draws masks of whole blocks of this size.
    constexpr int64_t kBlock = 16;
    const int64_t first = heads_ * pairs_before_[begin];
    const int64_t shift = first % kBitsPerByte;
    const int64_t bits = heads_ * pairs_before_[end] - first;
    const auto blocks = (bits + kBlock * kBitsPerByte - 1) / (kBlock * kBitsPerByte);
    const auto bytes = options_.drop_mask->flatten();
    const auto from = bytes.narrow(
        0, first / kBitsPerByte,
        std::min(blocks * kBlock + (shift != 0), bytes.size(0) - first / kBitsPerByte));
    if (shift == 0) {
      return from;
    }
    // Each byte ends with the first bits of the next one.
    const auto wide = from.to(at::kInt);
    const auto next = at::cat({wide.narrow(0, 1, wide.size(0) - 1), wide.new_zeros({1})});
    return wide.add(next, 1 << kBitsPerByte)
        .div(int64_t{1} << shift, "floor")
        .remainder(1 << kBitsPerByte)
        .to(at::kByte);
  }

  const FlashAttentionOptions& options_;
  int64_t heads_, query_tokens_, key_tokens_;
  std::vector<Sequence> sequences_;
  // The pairs of query and key of the sequences before each one, and of all.
  std::vector<int64_t> pairs_before_;
  int64_t pairs_ = 0;
};

}  // namespace

bool for_each_part(const char* op, const at::Tensor& query, const at::Tensor& key,
                   const FlashAttentionOptions& options,
                   const std::function<void(const PackPart&)>& launch) {
  const auto most = static_cast<size_t>(most_lengths(options));
  // The launch adds at most one length.
  const auto given = options.actual_seq_lengths_query.values().size();
  if (options.layout != Layout::TND || given < most) {
    return false;
  }
  const auto lengths = DenseLists(query, key, options).query_ends.size();
  if (lengths <= most) {
    return false;
  }
  check_implemented(GivenWorkspace::current() == nullptr, op, "actual_seq_lengths_query",
                    "expected at most ", most,
                    " lengths in a graph's call, whose lengths a replay may change, got ", lengths);
  const Pack pack(query, key, options);
  int64_t begin = 0;
  for (const auto end : pack.ends(lengths > given)) {
    launch(pack.part(begin, end));
    begin = end;
  }
  return true;
}

}  // namespace ascend_attn::aclnn

#include "opapi/ours/sparse_rows.h"

#include <algorithm>

namespace cann_sim {

std::vector<int64_t> SequenceLengths::of(const Call& call) const {
  const auto& sizes = call.get<TensorView>(tokens).sizes;
  if (lengths.empty() || !call.find<TensorView>(lengths)) {
    return std::vector<int64_t>(sizes.at(0), sizes.at(1));
  }
  auto result = call.elements(lengths);
  if (packed && !counts) {
    for (size_t i = result.size(); i-- > 1;) {
      result[i] -= result[i - 1];
    }
  }
  return result;
}

std::string pack_without_pairs(const Call& call) {
  const auto rows = call.get<TensorView>("query").sizes.at(0);
  const bool packed = call.is_tnd("layoutQueryOptional");
  if (!packed || rows == 0) {
    return {};
  }
  const auto queries = SequenceLengths{"query", "actualSeqLengthsQueryOptional", packed}.of(call);
  const bool in_pages = call.get<std::string>("layoutKeyOptional") == "PA_BSND";
  const auto keys =
      SequenceLengths{"key", "actualSeqLengthsKeyOptional", packed, in_pages}.of(call);
  for (size_t b = 0; b < queries.size(); ++b) {
    if (queries[b] > 0 && keys.at(b) > 0) {
      return {};
    }
  }
  return queries.size() < 2 ? ""
                            : c10::str("no sequence has queries and keys: the device writes ",
                                       queries.size() * rows, " rows into outputs of ", rows);
}

size_t SparseRow::leading() const { return std::ranges::find(slots, -1) - slots.begin(); }

std::string SparseRow::text(std::string_view what, size_t slot) const {
  return c10::str("row ", number, " of sparse_indices has ", what, " in slot ", slot, " of the ",
                  slots.size(), " that are read");
}

std::string find_in_rows(const Call& call, const SequenceLengths& queries,
                         const SequenceLengths& keys,
                         const std::function<std::string(const SparseRow&)>& fault) {
  constexpr int64_t kCausal = 3;
  const bool causal = call.get<int64_t>("sparseMode") == kCausal;
  const auto block = call.get<int64_t>("sparseBlockSize");
  const auto indices = call.tensor("sparseIndices").contiguous();
  const auto count = indices.size(-1);
  const auto of_queries = queries.of(call);
  const auto of_keys = keys.of(call);
  int64_t begin = 0;
  for (size_t b = 0; b < of_queries.size(); ++b) {
    for (int64_t i = 0; i < of_queries[b]; ++i) {
      const auto visible =
          causal ? std::max<int64_t>(of_keys.at(b) - of_queries[b] + i + 1, 0) : of_keys.at(b);
      const auto read = std::min(count, (visible + block - 1) / block);
      const auto* row = indices.const_data_ptr<int32_t>() + (begin + i) * count;
      auto text = fault({begin + i, visible, block, {row, static_cast<size_t>(read)}});
      if (!text.empty()) {
        return text;
      }
    }
    begin += queries.packed ? of_queries[b] : indices.size(1);
  }
  return {};
}

}  // namespace cann_sim

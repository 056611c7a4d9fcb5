// The queries of a sparse function, and what each reads of its row of sparse_indices.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "opapi/core/opapi.h"

namespace cann_sim {

// The lengths of the sequences of one side.
struct SequenceLengths {
  std::string_view tokens;        // the argument with the tokens, (B, S, ...) or (T, ...)
  std::string_view lengths = {};  // counts, or in layout TND ends; empty: none are read
  bool packed = false;
  bool counts = false;  // in spite of `packed`: the keys are in pages

  std::vector<int64_t> of(const Call& call) const;
};

// Describes the fault of the kernels of indexers in a pack of which no sequence has both queries
// and keys; empty if the call is none.
std::string pack_without_pairs(const Call& call);

struct SparseRow {
  int64_t number;   // among all rows
  int64_t visible;  // keys, from the first of the sequence
  int64_t block;    // sparseBlockSize
  // The slots that the device reads: as many as there are blocks of visible keys.
  std::span<const int32_t> slots;

  // The slots before the first -1.
  size_t leading() const;
  // "row 3 of sparse_indices has WHAT in slot 5 of the 16 that are read"
  std::string text(std::string_view what, size_t slot) const;
};

// Returns the text of `fault` for the first row that has one, or else an empty text.
std::string find_in_rows(const Call& call, const SequenceLengths& queries,
                         const SequenceLengths& keys,
                         const std::function<std::string(const SparseRow&)>& fault);

}  // namespace cann_sim

// Products of a few rows with keys that are read in place. For the few rows of decoding, packing a
// block of keys as an operand of tile_gemm takes longer than the product.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/common/portable_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// Computes products[r][j] = query r . key j for `rows` rows and `keys` keys. Both are constants,
// and so are the lanes: compilers then hold all sums in vector registers.
template <int64_t rows, int64_t keys, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void score_block(const Matrix<const Operand>& query, int64_t size,
                                               const Rows& key, int64_t head, int64_t first,
                                               const Matrix<T>& products) {
  constexpr int64_t lanes = bytes / sizeof(T);
  T sums[rows][keys][lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < keys; ++j) {
#pragma GCC unroll 8
      for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          sums[r][j][lane] = multiply_add<bytes>(static_cast<T>(query.row(r)[i + lane]),
                                                 static_cast<T>(key.row(first + j, head)[i + lane]),
                                                 sums[r][j][lane]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t j = 0; j < keys; ++j) {
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; ++r) {
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sum += sums[r][j][lane];
      }
      for (int64_t rest = i; rest < size; ++rest) {
        sum = multiply_add<bytes>(static_cast<T>(query.row(r)[rest]),
                                  static_cast<T>(key.row(first + j, head)[rest]), sum);
      }
      products.row(r)[first + j] = sum;
    }
  }
}

// Computes blocks of `rows` rows, then the remaining rows.
template <int64_t rows, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void score_blocks(Matrix<const Operand> query, int64_t count,
                                                int64_t size, const Rows& key, int64_t head,
                                                int64_t first_key, int64_t keys,
                                                Matrix<T> products) {
  constexpr int64_t step = rows == 1 ? 4 : 8 / rows;
  for (; count >= rows; count -= rows) {
    int64_t j = first_key;
    for (; j + step <= first_key + keys; j += step) {
      score_block<rows, step, bytes>(query, size, key, head, j, products);
    }
    for (; j < first_key + keys; ++j) {
      score_block<rows, 1, bytes>(query, size, key, head, j, products);
    }
    query = query.from(rows);
    products = products.from(rows);
  }
  if constexpr (rows > 1) {
    score_blocks<rows / 2, bytes>(query, count, size, key, head, first_key, keys, products);
  }
}

// The heads whose rows are computed together, and the keys that one of them reads before the next
// one does: few where the heads of a token are adjacent, so that memory is read in its order.
struct HeadsInTurn {
  int64_t heads;
  int64_t rows;  // of a head
  int64_t keys;
};

// Adjacent keys; the following ones, up to `available`, are prefetched.
struct KeysInPlace {
  int64_t count;
  int64_t available;
};

// Calls function(head, first key, number of keys).
template <typename Rows, typename Function>
[[gnu::always_inline]] inline void for_each_turn(const HeadsInTurn& turns, int64_t size,
                                                 const Rows& rows, const KeysInPlace& keys,
                                                 const Function& function) {
  for (int64_t first = 0; first < keys.count; first += turns.keys) {
    const int64_t count = std::min(turns.keys, keys.count - first);
    for (int64_t head = 0; head < turns.heads; ++head) {
      for (int64_t next = first + turns.keys; next < first + turns.keys + count; ++next) {
        prefetch(rows.row(std::min(next, keys.available - 1), head), size);
      }
      function(head, first, count);
    }
  }
}

// Row r of head h of `products`, which follows those of the heads before it: its products with the
// rows of head h of `key`.
template <typename T, typename Operand, typename Rows>
void score_rows(const HeadsInTurn& turns, const Matrix<const Operand>& query, int64_t size,
                const Rows& key, const KeysInPlace& keys, const Matrix<T>& products) {
  vectorized([=](auto bytes) {
    for_each_turn(turns, size, key, keys, [=](int64_t head, int64_t first, int64_t count) {
      const int64_t row = head * turns.rows;
      score_blocks<4, bytes>(query.from(row), turns.rows, size, key, head, first, count,
                             products.from(row));
    });
  });
}

// Adds to `rows` rows and `columns` columns of `out`. Both are constants, as in score_block.
template <int64_t rows, int64_t columns, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void add_block(const Matrix<const Operand>& weights,
                                             const Rows& value, int64_t head, int64_t first,
                                             int64_t count, int64_t column, const Matrix<T>& out) {
  T sums[rows][columns];
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      sums[r][i] = out.row(r)[column + i];
    }
  }
  for (int64_t j = first; j < first + count; ++j) {
    const auto* row = value.row(j, head) + column;
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; ++r) {
      const auto weight = static_cast<T>(weights.row(r)[j]);
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        sums[r][i] = multiply_add<bytes>(weight, static_cast<T>(row[i]), sums[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      out.row(r)[column + i] = sums[r][i];
    }
  }
}

template <int64_t rows, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void add_blocks(Matrix<const Operand> weights, int64_t count,
                                              int64_t size, const Rows& value, int64_t head,
                                              int64_t first, int64_t keys, Matrix<T> out) {
  constexpr int64_t lanes = bytes / sizeof(T);
  constexpr int64_t step = lanes * (rows == 1 ? 4 : 8 / rows);
  for (; count >= rows; count -= rows) {
    int64_t i = 0;
    for (; i + step <= size; i += step) {
      add_block<rows, step, bytes>(weights, value, head, first, keys, i, out);
    }
    for (; i + lanes <= size; i += lanes) {
      add_block<rows, lanes, bytes>(weights, value, head, first, keys, i, out);
    }
    for (; i < size; ++i) {
      add_block<rows, 1, bytes>(weights, value, head, first, keys, i, out);
    }
    weights = weights.from(rows);
    out = out.from(rows);
  }
  if constexpr (rows > 1) {
    add_blocks<rows / 2, bytes>(weights, count, size, value, head, first, keys, out);
  }
}

// Row r of head h of `out` += the sum of its weights * the rows of head h of `value`.
template <typename T, typename Operand, typename Rows>
void add_rows(const HeadsInTurn& turns, const Matrix<const Operand>& weights, int64_t size,
              const Rows& value, const KeysInPlace& keys, const Matrix<T>& out) {
  vectorized([=](auto bytes) {
    for_each_turn(turns, size, value, keys, [=](int64_t head, int64_t first, int64_t count) {
      const int64_t row = head * turns.rows;
      add_blocks<4, bytes>(weights.from(row), turns.rows, size, value, head, first, count,
                           out.from(row));
    });
  });
}

}  // namespace ascend_attn::cpu

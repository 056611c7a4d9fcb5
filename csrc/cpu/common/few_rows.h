// Products of a few rows with keys that are read in place. For the few rows of decoding, packing a
// block of keys as an operand of tile_gemm takes longer than the product.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/common/portable_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// A vector of `bytes` bytes, for what compilers do not vectorise well: widening 16-bit numbers, and
// sums of lanes. Functions take vectors by reference, because the ABI of passing them by value
// depends on the instructions that a function may use.
template <typename T, int64_t bytes>
struct VectorOf {
  typedef T Type [[gnu::vector_size(bytes)]];
};

// Element i of `to` becomes number Pattern::at(i) of the elements of a, followed by those of b.
template <typename Pattern, typename Vector, typename Result, size_t... i>
[[gnu::always_inline]] inline void shuffle(const Vector& a, const Vector& b, Result& to,
                                           std::index_sequence<i...>) {
#if defined(__clang__)
  to = (Result)__builtin_shufflevector(a, b, Pattern::at(i)...);
#else
  using Index = std::conditional_t<sizeof(a[0]) == 2, uint16_t, uint32_t>;
  to = (Result)__builtin_shuffle(
      a, b, typename VectorOf<Index, sizeof(Vector)>::Type{static_cast<Index>(Pattern::at(i))...});
#endif
}

// Half of the `lanes` elements of a, from `begin` on, each behind the first element of b.
template <int64_t lanes, int64_t begin>
struct Widened {
  static constexpr int64_t at(int64_t i) { return i % 2 == 0 ? lanes : begin + i / 2; }
};

// In every four elements, two from `begin` on of a and of b in turn.
template <int64_t lanes, int64_t begin>
struct Interleaved {
  static constexpr int64_t at(int64_t i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * lanes + begin; }
};

// Converts 16-bit floating-point numbers, given as the upper halves of `wide`.
template <typename From, typename Wide, typename Vector>
[[gnu::always_inline]] inline void convert_upper_halves(const Wide& wide, Vector& to) {
  if constexpr (std::is_same_v<From, at::BFloat16>) {
    to = (Vector)wide;
  } else {
    static_assert(std::is_same_v<From, at::Half>);
    // The exponent's bias grows by 112. Subnormal numbers are mantissas of numbers from 0.5 on.
    const Wide shifted = wide + wide;
    const Vector normal = (Vector)((shifted >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const Vector subnormal = (Vector)((shifted >> 17) | (126u << 23)) - 0.5f;
    const Wide magnitude = shifted < (1u << 27) ? (Wide)subnormal : (Wide)normal;
    to = (Vector)((wide & 0x80000000u) | magnitude);
  }
}

// Fills vectors with numbers from memory, converted to their type. Two vectors of 16-bit numbers
// take fewer instructions together than one at a time.
template <int64_t bytes, int64_t vectors, typename T, typename From>
[[gnu::always_inline]] inline void load_lanes(const From* from,
                                              typename VectorOf<T, bytes>::Type* to) {
  using Wide = typename VectorOf<uint32_t, bytes>::Type;
  constexpr int64_t lanes = bytes / sizeof(T);
  if constexpr (std::is_same_v<From, T>) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      std::memcpy(to + i, from + i * lanes, bytes);
    }
  } else if constexpr (sizeof(T) != 4) {
    T numbers[vectors * lanes];
    for (int64_t i = 0; i < vectors * lanes; ++i) {
      numbers[i] = static_cast<T>(from[i]);
    }
    std::memcpy(to, numbers, vectors * bytes);
  } else if constexpr (vectors == 1) {
    typename VectorOf<uint16_t, bytes / 2>::Type bits;
    std::memcpy(&bits, from, bytes / 2);
    convert_upper_halves<From>(__builtin_convertvector(bits, Wide) << 16, to[0]);
  } else {
    using Bits = typename VectorOf<uint16_t, bytes>::Type;
    constexpr std::make_index_sequence<2 * lanes> all;
    const Bits zero{};
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; i += 2) {
      Bits bits;
      std::memcpy(&bits, from + i * lanes, bytes);
      Wide wide;
      shuffle<Widened<2 * lanes, 0>>(bits, zero, wide, all);
      convert_upper_halves<From>(wide, to[i]);
      shuffle<Widened<2 * lanes, lanes>>(bits, zero, wide, all);
      convert_upper_halves<From>(wide, to[i + 1]);
    }
  }
}

// Halves the number of lanes that hold summands, and has those of both vectors in one: interleaves
// the first two elements of every 16 bytes, and the last two.
template <typename Vector>
[[gnu::always_inline]] inline void add_neighbours(const Vector& a, const Vector& b, Vector& to) {
  constexpr int64_t lanes = sizeof(Vector) / sizeof(float);
  constexpr std::make_index_sequence<lanes> all;
  Vector low, high;
  shuffle<Interleaved<lanes, 0>>(a, b, low, all);
  shuffle<Interleaved<lanes, 2>>(a, b, high, all);
  to = low + high;
}

// Computes the sums of the lanes of each of `count` vectors. The order of a sum does not depend on
// the count.
template <int64_t count, typename T, typename Vector>
[[gnu::always_inline]] inline void add_lanes(const Vector* vectors, T* sums) {
  constexpr int64_t lanes = sizeof(Vector) / sizeof(T);
  if constexpr (std::is_same_v<T, float>) {
    constexpr int64_t together = 4;
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; i += together) {
      const auto vector = [=](int64_t at) { return vectors + std::min(i + at, count - 1); };
      Vector even, odd, all;
      add_neighbours(*vector(0), *vector(2), even);
      add_neighbours(*vector(1), *vector(3), odd);
      add_neighbours(even, odd, all);
      T parts[lanes];
      std::memcpy(parts, &all, sizeof(Vector));
      for (int64_t width = lanes / 2; width >= together; width /= 2) {
        for (int64_t lane = 0; lane < width; ++lane) {
          parts[lane] += parts[lane + width];
        }
      }
      std::copy_n(parts, std::min(together, count - i), sums + i);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      T parts[lanes];
      std::memcpy(parts, vectors + i, sizeof(Vector));
      sums[i] = sum_of_lanes<lanes>(parts);
    }
  }
}

// Adds to sums[r][j] the products of `vectors` vectors of row r and key j, from element `at` on.
template <int64_t vectors, int64_t bytes, int64_t rows, int64_t keys, typename T, typename Operand,
          typename Rows>
[[gnu::always_inline]] inline void add_products(const Matrix<const Operand>& query, const Rows& key,
                                                int64_t head, int64_t first, int64_t at,
                                                typename VectorOf<T, bytes>::Type (*sums)[keys]) {
  typename VectorOf<T, bytes>::Type of_keys[keys][vectors], of_query[vectors];
#pragma GCC unroll 8
  for (int64_t j = 0; j < keys; ++j) {
    load_lanes<bytes, vectors, T>(key.row(first + j, head) + at, of_keys[j]);
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; ++r) {
    load_lanes<bytes, vectors, T>(query.row(r) + at, of_query);
#pragma GCC unroll 8
    for (int64_t j = 0; j < keys; ++j) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < vectors; ++i) {
        sums[r][j] = of_query[i] * of_keys[j][i] + sums[r][j];
      }
    }
  }
}

// Computes products[r][j] = query r . key j for `rows` rows and `keys` keys. Both are constants,
// and so are the lanes: compilers then hold all sums in vector registers, and fuse every product
// with its addition.
template <int64_t rows, int64_t keys, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void score_block(const Matrix<const Operand>& query, int64_t size,
                                               const Rows& key, int64_t head, int64_t first,
                                               const Matrix<T>& products) {
  constexpr int64_t lanes = bytes / sizeof(T);
  typename VectorOf<T, bytes>::Type sums[rows][keys] = {};
  int64_t i = 0;
  for (; i + 2 * lanes <= size; i += 2 * lanes) {
    add_products<2, bytes, rows, keys, T>(query, key, head, first, i, sums);
  }
  if (i + lanes <= size) {
    add_products<1, bytes, rows, keys, T>(query, key, head, first, i, sums);
    i += lanes;
  }
  T totals[rows * keys];
  add_lanes<rows * keys>(&sums[0][0], totals);
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < keys; ++j) {
      products.row(r)[first + j] = totals[r * keys + j];
    }
  }
  if (i < size) [[unlikely]] {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < keys; ++j) {
        T& sum = products.row(r)[first + j];
        for (int64_t rest = i; rest < size; ++rest) {
          sum = multiply_add<bytes>(static_cast<T>(query.row(r)[rest]),
                                    static_cast<T>(key.row(first + j, head)[rest]), sum);
        }
      }
    }
  }
}

// Computes blocks of `rows` rows, then the remaining rows.
template <int64_t rows, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void score_blocks(Matrix<const Operand> query, int64_t count,
                                                int64_t size, const Rows& key, int64_t head,
                                                int64_t first_key, int64_t keys,
                                                Matrix<T> products) {
  constexpr int64_t step = 8 / rows;
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

// Adds to `rows` rows and `vectors` vectors of `out`. Both are constants, as in score_block.
template <int64_t rows, int64_t vectors, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void add_block(const Matrix<const Operand>& weights,
                                             const Rows& value, int64_t head, int64_t first,
                                             int64_t count, int64_t column, const Matrix<T>& out) {
  using Vector = typename VectorOf<T, bytes>::Type;
  constexpr int64_t lanes = bytes / sizeof(T);
  Vector sums[rows][vectors];
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      std::memcpy(&sums[r][i], out.row(r) + column + i * lanes, bytes);
    }
  }
  for (int64_t j = first; j < first + count; ++j) {
    const auto* row = value.row(j, head) + column;
    Vector of_value[vectors];
    load_lanes<bytes, vectors, T>(row, of_value);
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; ++r) {
      const auto weight = static_cast<T>(weights.row(r)[j]);
#pragma GCC unroll 8
      for (int64_t i = 0; i < vectors; ++i) {
        sums[r][i] = weight * of_value[i] + sums[r][i];
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      std::memcpy(out.row(r) + column + i * lanes, &sums[r][i], bytes);
    }
  }
}

// Adds to columns [column, size) of `rows` rows, one at a time.
template <int64_t rows, int64_t bytes, typename T, typename Operand, typename Rows>
void add_columns(const Matrix<const Operand>& weights, const Rows& value, int64_t head,
                 int64_t first, int64_t count, int64_t column, int64_t size, const Matrix<T>& out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = column; i < size; ++i) {
      T sum = out.row(r)[i];
      for (int64_t j = first; j < first + count; ++j) {
        sum = multiply_add<bytes>(static_cast<T>(weights.row(r)[j]),
                                  static_cast<T>(value.row(j, head)[i]), sum);
      }
      out.row(r)[i] = sum;
    }
  }
}

template <int64_t rows, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void add_blocks(Matrix<const Operand> weights, int64_t count,
                                              int64_t size, const Rows& value, int64_t head,
                                              int64_t first, int64_t keys, Matrix<T> out) {
  constexpr int64_t lanes = bytes / sizeof(T);
  constexpr int64_t vectors = 8 / rows;
  constexpr int64_t step = vectors * lanes;
  for (; count >= rows; count -= rows) {
    int64_t i = 0;
    for (; i + step <= size; i += step) {
      add_block<rows, vectors, bytes>(weights, value, head, first, keys, i, out);
    }
    for (; i + lanes <= size; i += lanes) {
      add_block<rows, 1, bytes>(weights, value, head, first, keys, i, out);
    }
    add_columns<rows, bytes>(weights, value, head, first, keys, i, size, out);
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

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

// In every four elements, two from `begin` on of a and of b in turn.
template <int64_t lanes, int64_t begin>
struct Interleaved {
  static constexpr int64_t at(int64_t i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * lanes + begin; }
};

// In groups of as many elements, one half of each group of a, followed by those of b.
template <int64_t group, int64_t half>
struct HalfOfGroups {
  static constexpr int64_t at(int64_t i) {
    constexpr int64_t size = group / 2;
    return i / size * group + half * size + i % size;
  }
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

// Fills vectors with numbers from memory, converted to their type. Every two vectors of 16-bit
// numbers take those at even positions and those at odd ones, in one instruction each.
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
  } else if constexpr (sizeof(T) != 4 || sizeof(From) == 1) {
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
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; i += 2) {
      Wide pairs;
      std::memcpy(&pairs, from + i * lanes, bytes);
      convert_upper_halves<From>(pairs << 16, to[i]);
      convert_upper_halves<From>(pairs & 0xffff0000u, to[i + 1]);
    }
  }
}

// Whether load_lanes changes the order of numbers of this type, and leaves that of operands.
template <typename Number, typename Operand>
inline constexpr bool kChangesOrder = sizeof(Number) == 2 && sizeof(Operand) > 2;

// Returns rows in the order in which load_lanes has the elements of such keys: the rows themselves,
// or `ordered`.
template <typename Key, typename Operand>
Matrix<const Operand> in_order_of_keys(const Matrix<const Operand>& rows, int64_t count,
                                       int64_t size, const Matrix<Operand>& ordered) {
  if constexpr (!kChangesOrder<Key, Operand>) {
    return rows;
  } else {
    vectorized([=](auto bytes) {
      constexpr int64_t lanes = bytes / sizeof(Operand);
      for (int64_t r = 0; r < count; ++r) {
        const Operand* from = rows.row(r);
        Operand* to = ordered.row(r);
        int64_t i = 0;
        for (; i + 2 * lanes <= size; i += 2 * lanes) {
          for (int64_t lane = 0; lane < lanes; ++lane) {
            to[i + lane] = from[i + 2 * lane];
            to[i + lanes + lane] = from[i + 2 * lane + 1];
          }
        }
        std::copy(from + i, from + size, to + i);
      }
    });
    return ordered;
  }
}

// The inverse, for sums of the rows of such values.
template <typename Value, typename T>
void restore_order(const Matrix<T>& rows, int64_t count, int64_t size) {
  if constexpr (kChangesOrder<Value, T>) {
    vectorized([=](auto bytes) {
      constexpr int64_t lanes = bytes / sizeof(T);
      for (int64_t r = 0; r < count; ++r) {
        for (T* to = rows.row(r); to + 2 * lanes <= rows.row(r) + size; to += 2 * lanes) {
          T from[2 * lanes];
          std::memcpy(from, to, sizeof(from));
          for (int64_t lane = 0; lane < lanes; ++lane) {
            to[2 * lane] = from[lane];
            to[2 * lane + 1] = from[lanes + lane];
          }
        }
      }
    });
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

// The same for vectors in which every four numbers of `group` are the summands of four sums.
template <int64_t group, typename Vector>
[[gnu::always_inline]] inline void add_halves(const Vector& a, const Vector& b, Vector& to) {
  constexpr std::make_index_sequence<sizeof(Vector) / sizeof(float)> all;
  Vector first, second;
  shuffle<HalfOfGroups<group, 0>>(a, b, first, all);
  shuffle<HalfOfGroups<group, 1>>(a, b, second, all);
  to = first + second;
}

// Computes the sums of the lanes of each of `count` vectors. The order of a sum does not depend on
// the count.
template <int64_t count, typename T, typename Vector>
[[gnu::always_inline]] inline void add_lanes(const Vector* vectors, T* sums) {
  constexpr int64_t lanes = sizeof(Vector) / sizeof(T);
  if constexpr (std::is_same_v<T, float>) {
#pragma GCC unroll 8
    for (int64_t first = 0; first < count; first += lanes) {
      // Four sums for each vector, then `lanes` sums in the first one.
      Vector parts[lanes / 4];
#pragma GCC unroll 8
      for (int64_t part = 0; part < lanes / 4; ++part) {
        if (first + 4 * part >= count) {
          parts[part] = parts[part - 1];
          continue;
        }
        const auto vector = [=](int64_t at) {
          return vectors + std::min(first + 4 * part + at, count - 1);
        };
        Vector even, odd;
        add_neighbours(*vector(0), *vector(2), even);
        add_neighbours(*vector(1), *vector(3), odd);
        add_neighbours(even, odd, parts[part]);
      }
      if constexpr (lanes == 16) {
        add_halves<16>(parts[0], parts[1], parts[0]);
        add_halves<16>(parts[2], parts[3], parts[2]);
        add_halves<8>(parts[0], parts[2], parts[0]);
      } else if constexpr (lanes == 8) {
        add_halves<8>(parts[0], parts[1], parts[0]);
      }
      std::memcpy(sums + first, parts, std::min(lanes, count - first) * sizeof(T));
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
    std::memcpy(products.row(r) + first, totals + r * keys, keys * sizeof(T));
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

// How many vectors of sums a block has, so that the registers hold them beside their factors.
template <int64_t bytes>
inline constexpr int64_t kSums = bytes == 64 ? 16 : 8;

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

// Prefetches what a block reads after some more keys, so that memory is read while blocks compute.
// To prefetch more at a time would only make the processor wait.
struct Ahead {
  template <typename Rows>
  [[gnu::always_inline]] void prefetch(const Rows& rows, int64_t head, int64_t key,
                                       int64_t count = 1) const {
    for (int64_t k = key; size > 0 && k < key + count; ++k) {
      cpu::prefetch(rows.row(std::min(k + keys, last), head), size);
    }
  }

  int64_t keys;
  int64_t last;
  int64_t size;  // 0: prefetches nothing
};

// Computes blocks of `rows` rows, then the remaining rows.
template <int64_t rows, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void score_blocks(Matrix<const Operand> query, int64_t count,
                                                int64_t size, const Rows& key, int64_t head,
                                                int64_t first_key, int64_t keys, Matrix<T> products,
                                                Ahead ahead) {
  constexpr int64_t step = rows == 4 ? kSums<bytes> / rows : 8 / rows;
  for (; count >= rows; count -= rows) {
    int64_t j = first_key;
    for (; j + step <= first_key + keys; j += step) {
      ahead.prefetch(key, head, j, step);
      score_block<rows, step, bytes>(query, size, key, head, j, products);
    }
    for (; j < first_key + keys; ++j) {
      ahead.prefetch(key, head, j);
      score_block<rows, 1, bytes>(query, size, key, head, j, products);
    }
    query = query.from(rows);
    products = products.from(rows);
    ahead.size = 0;
  }
  if constexpr (rows > 1) {
    score_blocks<rows / 2, bytes>(query, count, size, key, head, first_key, keys, products, ahead);
  }
}

// Calls function(head, first key, number of keys, Ahead).
template <typename Function>
[[gnu::always_inline]] inline void for_each_turn(const HeadsInTurn& turns, int64_t size,
                                                 const KeysInPlace& keys,
                                                 const Function& function) {
  constexpr int64_t keys_ahead = 16;
  const Ahead ahead{keys_ahead, keys.available - 1, size};
  for (int64_t first = 0; first < keys.count; first += turns.keys) {
    for (int64_t head = 0; head < turns.heads; ++head) {
      function(head, first, std::min(turns.keys, keys.count - first), ahead);
    }
  }
}

// Row r of head h of `products`, which follows those of the heads before it: its products with the
// rows of head h of `key`. The query is in_order_of_keys.
template <typename T, typename Operand, typename Rows>
void score_rows(const HeadsInTurn& turns, const Matrix<const Operand>& query, int64_t size,
                const Rows& key, const KeysInPlace& keys, const Matrix<T>& products) {
  vectorized([=](auto bytes) {
    for_each_turn(turns, size, keys, [=](int64_t head, int64_t first, int64_t count, Ahead ahead) {
      const int64_t row = head * turns.rows;
      score_blocks<4, bytes>(query.from(row), turns.rows, size, key, head, first, count,
                             products.from(row), ahead);
    });
  });
}

// Adds to `rows` rows and `vectors` vectors of `out`. Both are constants, as in score_block.
template <int64_t rows, int64_t vectors, int64_t bytes, typename T, typename Operand, typename Rows>
[[gnu::always_inline]] inline void add_block(const Matrix<const Operand>& weights,
                                             const Rows& value, int64_t head, int64_t first,
                                             int64_t count, int64_t column, const Matrix<T>& out,
                                             const Ahead& ahead) {
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
    ahead.prefetch(value, head, j);
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
                                              int64_t first, int64_t keys, Matrix<T> out,
                                              Ahead ahead) {
  constexpr int64_t lanes = bytes / sizeof(T);
  constexpr int64_t vectors = std::min<int64_t>(8, kSums<bytes> / rows);
  constexpr int64_t step = vectors * lanes;
  for (; count >= rows; count -= rows) {
    int64_t i = 0;
    for (; i + step <= size; i += step) {
      add_block<rows, vectors, bytes>(weights, value, head, first, keys, i, out, ahead);
      ahead.size = 0;
    }
    for (; i + 2 * lanes <= size; i += 2 * lanes) {
      add_block<rows, 2, bytes>(weights, value, head, first, keys, i, out, ahead);
      ahead.size = 0;
    }
    for (; i + lanes <= size; i += lanes) {
      add_block<rows, 1, bytes>(weights, value, head, first, keys, i, out, ahead);
      ahead.size = 0;
    }
    add_columns<rows, bytes>(weights, value, head, first, keys, i, size, out);
    weights = weights.from(rows);
    out = out.from(rows);
  }
  if constexpr (rows > 1) {
    add_blocks<rows / 2, bytes>(weights, count, size, value, head, first, keys, out, ahead);
  }
}

// Row r of head h of `out` += the sum of its weights * the rows of head h of `value`, until
// restore_order in the order in which load_lanes has their elements.
template <typename T, typename Operand, typename Rows>
void add_rows(const HeadsInTurn& turns, const Matrix<const Operand>& weights, int64_t size,
              const Rows& value, const KeysInPlace& keys, const Matrix<T>& out) {
  vectorized([=](auto bytes) {
    for_each_turn(turns, size, keys, [=](int64_t head, int64_t first, int64_t count, Ahead ahead) {
      const int64_t row = head * turns.rows;
      add_blocks<4, bytes>(weights.from(row), turns.rows, size, value, head, first, count,
                           out.from(row), ahead);
    });
  });
}

}  // namespace ascend_attn::cpu

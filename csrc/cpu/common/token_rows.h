// Rows of a BSND or TND tensor, read through its strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#include "core/sequence_lengths.h"
#include "cpu/common/tile_gemm.h"
#include "cpu/common/vectorized.h"

namespace ascend_attn::cpu {

// Returns the number of tokens of a (B, S, heads, D) or (T, heads, D) tensor.
inline int64_t token_count(const at::Tensor& tensor) {
  return tensor.dim() == 4 ? tensor.size(0) * tensor.size(1) : tensor.size(0);
}

// Returns `tensor` itself if its rows are dense, otherwise a dense copy.
inline at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// Rows of several heads, by their strides: those of a sequence, say, in a (B, N, S, D) tensor.
template <typename T>
class HeadRows {
 public:
  HeadRows() = default;
  HeadRows(T* data, int64_t token_stride, int64_t head_stride = 0)
      : data_(data), token_stride_(token_stride), head_stride_(head_stride) {}
  HeadRows(T* data, const at::Tensor& tensor, int64_t batch, int64_t head, int64_t begin)
      : HeadRows(
            data + batch * tensor.stride(0) + head * tensor.stride(1) + begin * tensor.stride(2),
            tensor.stride(2), tensor.stride(1)) {}

  T* row(int64_t token, int64_t head = 0) const {
    return data_ + head * head_stride_ + token * token_stride_;
  }
  HeadRows from_head(int64_t head) const { return {row(0, head), token_stride_, head_stride_}; }
  int64_t token_stride() const { return token_stride_; }

 private:
  T* data_ = nullptr;
  int64_t token_stride_ = 0;
  int64_t head_stride_ = 0;
};

// The rows of the tokens of one sequence. The axes of the tensor are (B, S, heads, D) or
// (T, heads, D); `begin` counts over the flattened token axes, and the sequence stays in one batch.
template <typename T>
class TokenRows : public HeadRows<const T> {
 public:
  TokenRows() = default;
  // An undefined tensor has no rows.
  TokenRows(const at::Tensor& tensor, int64_t begin)
      : HeadRows<const T>(tensor.defined() ? of_token(tensor, begin) : HeadRows<const T>()) {}

 private:
  static HeadRows<const T> of_token(const at::Tensor& tensor, int64_t begin) {
    const auto* data = tensor.const_data_ptr<T>();
    if (tensor.dim() == 4 && tensor.size(1) > 0) {
      data += begin / tensor.size(1) * tensor.stride(0);
      begin %= tensor.size(1);
    }
    return {data + begin * tensor.stride(-3), tensor.stride(-3), tensor.stride(-2)};
  }
};

// A row of no elements may have no memory.
template <typename Operand, typename Input>
void load_row(const Input* from, Operand* to, int64_t width) {
  if (width == 0) {
    return;
  }
  if constexpr (std::is_same_v<Operand, Input>) {
    std::memcpy(to, from, static_cast<size_t>(width) * sizeof(Input));
  } else {
    convert(from, to, width);
  }
}

// Copies head h of `token` to row h of `tile`, starting at `column`.
template <typename Operand, typename Input>
void load_heads(const HeadRows<const Input>& rows, int64_t token, int64_t heads, int64_t width,
                const Tile<Operand>& tile, int64_t column = 0) {
  for (int64_t head = 0; head < heads; ++head) {
    load_row(rows.row(token, head), tile.row(head) + column, width);
  }
}

// Gathers the row of token positions[i] into row i of `tile`, starting at `column`.
template <typename Operand, typename Rows, typename Position>
void gather_rows(const Rows& rows, const Position* positions, int64_t count, int64_t width,
                 const Tile<Operand>& tile, int64_t column = 0) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kRowsAhead < count) {
      prefetch(rows.row(positions[i + kRowsAhead]), width);
    }
    load_row(rows.row(positions[i]), tile.row(i) + column, width);
  }
}

// The inverse of load_heads, into a dense (tokens, heads, width) tensor: stores factor times rows.
template <typename T, typename Output>
void store_heads(const Tile<T>& tile, int64_t column, int64_t heads, int64_t width, T factor,
                 Output* to) {
  for (int64_t head = 0; head < heads; ++head) {
    scale(tile.row(head) + column, factor, to + head * width, width);
  }
}

// Zeroes rows [begin, end) of `tile`.
template <typename T>
void zero_rows(const Tile<T>& tile, int64_t begin, int64_t end) {
  const auto bytes = static_cast<size_t>((end - begin) * tile.stride()) * sizeof(T);
  if (bytes > 0) {  // An empty tile has no memory.
    std::memset(tile.row(begin), 0, bytes);
  }
}

// Zeroes the tokens of a dense tensor that belong to no sequence: tokens of queries, or of keys.
// Sequences are ordered. An undefined tensor has none.
template <typename Sequences, typename Projection = std::identity>
void zero_unused_tokens(const at::Tensor& tensor, int64_t tokens, const Sequences& sequences,
                        int64_t Sequence::* count, Projection sequence_of = {}) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return;
  }
  const auto begin = count == &Sequence::queries ? &Sequence::query_begin : &Sequence::key_begin;
  const auto bytes_per_token = static_cast<int64_t>(tensor.nbytes()) / tokens;
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto zero = [&](int64_t from, int64_t to) {
    std::memset(data + from * bytes_per_token, 0,
                static_cast<size_t>((to - from) * bytes_per_token));
  };
  int64_t end = 0;
  for (const auto& each : sequences) {
    const Sequence& sequence = std::invoke(sequence_of, each);
    zero(end, sequence.*begin);
    end = sequence.*begin + sequence.*count;
  }
  zero(end, tokens);
}

}  // namespace ascend_attn::cpu

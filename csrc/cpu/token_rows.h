// Rows of a BSND or TND tensor, read through its strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <type_traits>

#include "cpu/tile_gemm.h"

namespace ascend_attn::cpu {

// `tensor` itself when its rows are dense, otherwise a dense copy.
inline at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// The rows of the tokens of one sequence. The axes of the tensor are (B, S, heads, D) or
// (T, heads, D); `begin` counts over the flattened token axes, and the sequence stays in one batch.
template <typename T>
class TokenRows {
 public:
  TokenRows() = default;
  TokenRows(const at::Tensor& tensor, int64_t begin)
      : data_(tensor.const_data_ptr<T>()),
        token_stride_(tensor.stride(-3)),
        head_stride_(tensor.stride(-2)) {
    if (tensor.dim() == 4 && tensor.size(1) > 0) {
      data_ += begin / tensor.size(1) * tensor.stride(0);
      begin %= tensor.size(1);
    }
    data_ += begin * token_stride_;
  }

  const T* row(int64_t token, int64_t head = 0) const {
    return data_ + token * token_stride_ + head * head_stride_;
  }

 private:
  const T* data_ = nullptr;
  int64_t token_stride_ = 0;
  int64_t head_stride_ = 0;
};

template <typename Operand, typename Input>
void load_row(const Input* from, Operand* to, int64_t width) {
  if constexpr (std::is_same_v<Operand, Input>) {
    std::memcpy(to, from, static_cast<size_t>(width) * sizeof(Input));
  } else {
    convert(from, to, width);
  }
}

// Row h of `tile`, from `column` on, becomes head h of `token`.
template <typename Operand, typename Input>
void load_heads(const TokenRows<Input>& rows, int64_t token, int64_t heads, int64_t width,
                const Tile<Operand>& tile, int64_t column = 0) {
  for (int64_t head = 0; head < heads; ++head) {
    load_row(rows.row(token, head), tile.row(head) + column, width);
  }
}

// Row i of `tile`, from `column` on, becomes the row of token positions[i].
template <typename Operand, typename Input>
void gather_rows(const TokenRows<Input>& rows, const int32_t* positions, int64_t count,
                 int64_t width, const Tile<Operand>& tile, int64_t column = 0) {
  for (int64_t i = 0; i < count; ++i) {
    load_row(rows.row(positions[i]), tile.row(i) + column, width);
  }
}

// Rows [begin, end) of `tile` become zero.
template <typename T>
void zero_rows(const Tile<T>& tile, int64_t begin, int64_t end) {
  std::memset(tile.row(begin), 0, static_cast<size_t>((end - begin) * tile.stride()) * sizeof(T));
}

}  // namespace ascend_attn::cpu

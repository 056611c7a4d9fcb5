// The operators that torch_npu has CANN compile: here those that change a tensor's format, for
// npu_format_cast. Any other fails, and by name where that is possible: see
// cpu_fallback_torch_npu.cpp.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "ascendcl/runtime.h"

using Dimensions = std::vector<int64_t>;

struct aclTensorDesc {
  Dimensions sizes;
  aclFormat format;
  Dimensions storage_sizes;
};

struct aclDataBuffer {
  char* data;
  size_t bytes;
};

namespace {

std::atomic<void (*)()> check{nullptr};

int64_t product_of(Dimensions::const_iterator begin, Dimensions::const_iterator end) {
  return std::accumulate(begin, end, int64_t{1}, std::multiplies<>());
}

// FRACTAL_NZ stores a matrix (M, N) as (N1, M1, M0, N0), with n = n1 * N0 + n0 and m alike.
struct Nz {
  explicit Nz(const aclTensorDesc& desc)
      : rows(desc.sizes.end()[-2]),
        columns(desc.sizes.end()[-1]),
        m1(desc.storage_sizes.end()[-3]),
        m0(desc.storage_sizes.end()[-2]),
        n0(desc.storage_sizes.end()[-1]),
        elements(product_of(desc.storage_sizes.end() - 4, desc.storage_sizes.end())),
        matrices(product_of(desc.sizes.begin(), desc.sizes.end() - 2)) {}

  int64_t position(int64_t row, int64_t column) const {
    return (((column / n0) * m1 + row / m0) * m0 + row % m0) * n0 + column % n0;
  }

  int64_t rows, columns, m1, m0, n0, elements, matrices;
};

void change_format(const aclTensorDesc& from, const aclDataBuffer& source, const aclTensorDesc& to,
                   const aclDataBuffer& target) {
  const bool to_nz = to.format == ACL_FORMAT_FRACTAL_NZ;
  const Nz nz(to_nz ? to : from);
  const auto& nz_buffer = to_nz ? target : source;
  const auto size = nz_buffer.bytes / static_cast<size_t>(nz.matrices * nz.elements);
  if (to_nz) {
    std::memset(target.data, 0, target.bytes);
  }
  for (int64_t matrix = 0; matrix < nz.matrices; ++matrix) {
    for (int64_t row = 0; row < nz.rows; ++row) {
      for (int64_t column = 0; column < nz.columns; ++column) {
        const auto in_nz = matrix * nz.elements + nz.position(row, column);
        const auto in_nd = (matrix * nz.rows + row) * nz.columns + column;
        std::memcpy(target.data + size * static_cast<size_t>(to_nz ? in_nz : in_nd),
                    source.data + size * static_cast<size_t>(to_nz ? in_nd : in_nz), size);
      }
    }
  }
}

bool is_nz(const aclTensorDesc& desc) {
  constexpr size_t kLeastStorageSizes = 4;
  return desc.format == ACL_FORMAT_FRACTAL_NZ && desc.sizes.size() >= 2 &&
         desc.storage_sizes.size() >= kLeastStorageSizes;
}

aclError run(const char* name, int inputs, const aclTensorDesc* const from[],
             const aclDataBuffer* const sources[], int outputs, const aclTensorDesc* const to[],
             const aclDataBuffer* const targets[], aclrtStream stream) {
  const std::string_view type = name;
  if ((type != "TransData" && type != "Identity") || inputs != 1 || outputs != 1) {
    cann_sim::set_error_message(std::string(type) + ": the simulated CANN compiles no operators");
    return ACL_ERROR_OP_NOT_FOUND;
  }
  return cann_sim::submit(
      stream, [from = *from[0], source = *sources[0], to = *to[0], target = *targets[0]] {
        if (is_nz(from) == is_nz(to)) {
          // Also casts to a format that torch_npu does not make: they leave everything as it is.
          std::memcpy(target.data, source.data, std::min(source.bytes, target.bytes));
        } else {
          change_format(from, source, to, target);
        }
        return ACL_SUCCESS;
      });
}

}  // namespace

namespace cann_sim {

void set_compiled_operator_check(void (*function)()) { check = function; }

}  // namespace cann_sim

extern "C" {

// torch_npu calls this first when it prepares a compiled operator, and for no other operator.
aclTensorDesc* aclCreateTensorDesc(aclDataType, int dimensions, const int64_t* sizes,
                                   aclFormat format) {
  if (const auto function = check.load()) {
    function();
  }
  return new aclTensorDesc{{sizes, sizes + dimensions}, format, {sizes, sizes + dimensions}};
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
  desc->format = format;
  return ACL_SUCCESS;
}
aclError aclSetTensorShape(aclTensorDesc* desc, int dimensions, const int64_t* sizes) {
  desc->storage_sizes.assign(sizes, sizes + dimensions);
  return ACL_SUCCESS;
}
aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) {
  return new aclDataBuffer{static_cast<char*>(data), bytes};
}
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

// torch_npu calls one or the other.
aclError aclopCompileAndExecute(const char* name, int inputs, const aclTensorDesc* const from[],
                                const aclDataBuffer* const sources[], int outputs,
                                const aclTensorDesc* const to[], aclDataBuffer* const targets[],
                                const aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                aclrtStream stream) {
  return run(name, inputs, from, sources, outputs, to, targets, stream);
}
aclError aclopCompileAndExecuteV2(const char* name, int inputs, aclTensorDesc* from[],
                                  aclDataBuffer* sources[], int outputs, aclTensorDesc* to[],
                                  aclDataBuffer* targets[], aclopAttr*, aclopEngineType,
                                  aclopCompileType, const char*, aclrtStream stream) {
  return run(name, inputs, from, sources, outputs, to, targets, stream);
}

}  // extern "C"

#include "ops/tensor_argument.h"

#include <c10/core/SymInt.h>

#include "ops/error.h"

namespace ascend_attn {

void check_same_device(std::string_view op, TensorArgument argument, TensorArgument other) {
  check_value(argument.tensor.device() == other.tensor.device(), op, argument.name,
              "expected device ", other.tensor.device(), " (", other.name, "'s), got ",
              argument.tensor.device());
}

void check_same_dtype(std::string_view op, TensorArgument argument, TensorArgument other) {
  check_type(argument.tensor.scalar_type() == other.tensor.scalar_type(), op, argument.name,
             "expected dtype ", dtype_name(other.tensor.scalar_type()), " (", other.name,
             "'s), got ", dtype_name(argument.tensor.scalar_type()));
}

void check_shape(std::string_view op, TensorArgument argument, c10::SymIntArrayRef expected,
                 std::string_view meaning) {
  const auto sizes = argument.tensor.sym_sizes();
  bool same = sizes.size() == expected.size();
  for (size_t axis = 0; same && axis < sizes.size(); ++axis) {
    same = sizes[axis].sym_eq(expected[axis]).expect_true(__FILE__, __LINE__);
  }
  check_value(same, op, argument.name, "expected shape ", meaning, " = ", expected, ", got ",
              sizes);
}

}  // namespace ascend_attn

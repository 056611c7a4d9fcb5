#include "dispatch/operator.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "core/error.h"

namespace ascend_attn {
namespace {

const c10::FunctionSchema& schema_of(const char* op) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(c10::str("ascend::", op).c_str(), "")
      .schema();
}

}  // namespace

const std::string& argument_name(const char* op, size_t position) {
  const auto& arguments = schema_of(op).arguments();
  return position < arguments.size() ? arguments[position].name()
                                     : output_name(op, position - arguments.size());
}

const std::string& output_name(const char* op, size_t index) {
  return schema_of(op).returns()[index].name();
}

std::string place_name(const char* op, Place place) {
  return element_name(argument_name(op, place.position), place.index);
}

size_t argument_position(const char* op, const char* name) {
  return schema_of(op).argumentIndexWithName(name).value();
}

void raise_no_tensor(const char* op, Place place, const at::Tensor& tensor) {
  const auto argument = place_name(op, place);
  check_present(tensor.defined(), op, argument, "expected a tensor, got None");
  check_implemented(!tensor.is_nested(), op, argument,
                    "expected a tensor of one shape, got a nested tensor");
  raise(Violation::value, op, argument,
        c10::str("expected a storage that holds every element, got one of ",
                 tensor.storage().nbytes(), " bytes for shape ", tensor.sizes(), " and strides ",
                 tensor.strides(), " at offset ", tensor.storage_offset(),
                 "; FSDP and resize_() free memory"));
}

}  // namespace ascend_attn

#include "dispatch/operator.h"

namespace ascend_attn {

c10::OperatorHandle find_operator(const char* op, const char* overload) {
  const auto name = std::string("ascend::") + op;
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload);
}

const std::string& argument_name(const char* op, size_t position) {
  const auto handle = find_operator(op);
  const auto& arguments = handle.schema().arguments();
  return position < arguments.size() ? arguments[position].name()
                                     : output_name(op, position - arguments.size());
}

const std::string& output_name(const char* op, size_t index) {
  return find_operator(op).schema().returns()[index].name();
}

size_t argument_position(const char* op, const char* name) {
  return find_operator(op).schema().argumentIndexWithName(name).value();
}

void raise_none(const char* op, size_t position, int64_t index) {
  raise(Violation::value, op, element_name(argument_name(op, position), index),
        "expected a tensor, got None", Status::null_pointer);
}

void raise_no_memory(const char* op, size_t position, int64_t index, const at::Tensor& tensor) {
  const auto argument = element_name(argument_name(op, position), index);
  check_implemented(!tensor.is_nested(), op, argument,
                    "expected a tensor of one shape, got a nested tensor");
  raise(Violation::value, op, argument,
        c10::str("expected a storage that holds every element, got one of ",
                 tensor.storage().nbytes(), " bytes for shape ", tensor.sizes(), " and strides ",
                 tensor.strides(), " at offset ", tensor.storage_offset(),
                 "; FSDP and resize_() free memory"));
}

size_t argument_count(const char* op) { return find_operator(op).schema().arguments().size(); }

}  // namespace ascend_attn

#include "ops/dense_shape.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/pack_hints.h"
#include "core/symbolic.h"

namespace ascend_attn {

DenseShape::DenseShape(const DenseTensors& call, const OperatorLimits& limits)
    : name_(call.op),
      layout_(call.layout),
      layout_name_(call.layout_name),
      axes_(axes_of(layout_)),
      query_(call.query),
      key_(call.key),
      value_(call.value),
      query_lengths_(call.query_lengths),
      key_lengths_(call.key_lengths),
      paged_(call.paged),
      limits_(limits),
      heads_(call.heads),
      key_heads_given_(call.key_heads.has_value()) {
  check_attention_dtype(name_, query(), call.or_int8);
  if (!call.int8_keys || query_.scalar_type() != at::kChar) {
    limits_.dtype("query", query_.scalar_type());
  }
  for (const auto& argument : {query(), NamedTensor{"key", key_}, NamedTensor{"value", value_}}) {
    if (!paged_ || &argument.tensor == &query_) {
      check_rank(argument);
    }
    check_device(name_, argument, query());
    call.int8_keys && &argument.tensor != &query_ ? check_dtype(name_, argument, at::kChar)
                                                  : check_dtype(name_, argument, query());
  }
  check_value(positive(heads_), name_, "num_heads",
              "expected the positive number of query heads, got ", heads_);
  if (key_heads_given_) {
    constexpr std::string_view kNumber = "num_key_value_heads";
    check_value(at_most(0, *call.key_heads), name_, kNumber,
                "expected the number of key heads, or 0 where it is num_heads, got ",
                *call.key_heads);
    key_heads_ = known_equal(*call.key_heads, 0) ? heads_ : *call.key_heads;
    check_value(divides(key_heads_, heads_), name_, kNumber,
                "expected a divisor of num_heads = ", heads_, ", got ", key_heads_);
  }
  head_size_ = size_of_heads(query(), "num_heads", heads_);
  queries_ = query_.sym_size(axes_.tokens);
  batch_ = is_packed() ? query_lengths_.count() : query_.sym_size(axes_.batch);
}

void DenseShape::check_rank(NamedTensor argument) const {
  check_value(argument.tensor.dim() == axes_.rank, name_, argument.name, "expected rank ",
              axes_.rank, " for layout ", layout_name_, ", got shape ", argument.tensor.sym_sizes(),
              hint_for_rank(layout_, argument.tensor.dim()));
}

c10::SymInt DenseShape::size_of_heads(NamedTensor argument, std::string_view number,
                                      const c10::SymInt& heads) const {
  const auto& tensor = argument.tensor;
  const bool fits = axes_.merged() ? divides(heads, tensor.sym_size(-1))
                                   : same(tensor.sym_size(axes_.heads), heads);
  check_value(fits, name_, argument.name, "expected ",
              axes_.merged() ? "H to be a multiple of " : "", number, " = ", heads, " on axis ",
              axes_.heads, " of layout ", layout_name_, ", got shape ", tensor.sym_sizes());
  const auto size = axes_.merged() ? tensor.sym_size(-1) / heads : tensor.sym_size(-1);
  check_value(positive(size), name_, argument.name,
              "expected a head size of at least 1, got shape ", tensor.sym_sizes());
  return size;
}

void DenseShape::read_keys() {
  const NamedTensor key{"key", key_};
  const NamedTensor value{"value", value_};
  c10::SymInt size = head_size_;
  if (key_heads_given_) {
    size = size_of_heads(key, "num_key_value_heads", key_heads_);
  } else if (axes_.merged()) {
    check_value(divides(head_size_, key_.sym_size(-1)), name_, key.name,
                "expected H to be a multiple of D = ", head_size_, ", got shape ",
                key_.sym_sizes());
    key_heads_ = key_.sym_size(-1) / head_size_;
  } else {
    key_heads_ = key_.sym_size(axes_.heads);
    size = key_.sym_size(-1);
  }
  check_value(same(size, head_size_), name_, key.name, "expected query's D = ", head_size_,
              ", got ", size, " of shape ", key_.sym_sizes());
  check_value(positive(key_heads_) && divides(key_heads_, heads_), name_, key.name,
              "expected a number of heads that divides query's, ", heads_, ", got ", key_heads_,
              " of shape ", key_.sym_sizes(), " on axis ", axes_.heads, " of layout ",
              layout_name_);
  value_size_ =
      size_of_heads(value, key_heads_given_ ? "num_key_value_heads" : "key's heads", key_heads_);
  keys_ = key_.sym_size(axes_.tokens);
  check_value(same(value_.sym_size(axes_.tokens), keys_), name_, value.name,
              "expected as many tokens as key, ", keys_, ", got shape ", value_.sym_sizes());
  for (const auto& argument : {key, value}) {
    check_value(is_packed() || same(argument.tensor.sym_size(axes_.batch), batch_), name_,
                argument.name, "expected query's batch size ", batch_, ", got shape ",
                argument.tensor.sym_sizes());
  }
}

bool DenseShape::read_ropes(const std::optional<at::Tensor>& of_query,
                            const std::optional<at::Tensor>& of_key) {
  check_present(of_query || !of_key, name_, "query_rope",
                "expected a tensor because key_rope is given, got None");
  check_present(of_key || !of_query, name_, "key_rope",
                "expected a tensor because query_rope is given, got None");
  if (!of_query) {
    return false;
  }
  const NamedTensor rope{"query_rope", *of_query};
  check_rank(rope);
  rope_size_ = size_of_heads(rope, "num_heads", heads_);
  check_rope(rope, query_sizes(layout_, rope_size_), "query");
  return true;
}

void DenseShape::check_rope(NamedTensor rope, c10::SymIntArrayRef sizes, const char* beside) const {
  check_device(name_, rope, query());
  // An int8 query has ropes that are not quantised.
  query_.scalar_type() == at::kChar ? check_dtype(name_, rope, at::kBFloat16)
                                    : check_dtype(name_, rope, query());
  check_value(fits_shape(rope.tensor, sizes), name_, rope.name, "expected ", beside,
              "'s shape with Dr = ", rope_size_, ", ", sizes, ", got ", rope.tensor.sym_sizes());
}

void DenseShape::check_sink(const std::optional<at::Tensor>& given) const {
  if (!given) {
    return;
  }
  const NamedTensor sink{"sink", *given};
  check_device(name_, sink, query());
  check_type(at::isFloatingType(given->scalar_type()), name_, sink.name,
             "expected a floating-point dtype, got ", dtype_name(given->scalar_type()));
  check_value(fits_shape(*given, {{heads_}}), name_, sink.name, "expected shape (", heads_,
              "), one score per query head, got ", given->sym_sizes());
}

void DenseShape::check_ends_given(std::string_view argument, const Lengths& lengths,
                                  bool required) const {
  check_present(lengths.given() || !required, name_, argument,
                "expected the cumulative sequence lengths (lengths 2, 3, 4 are given as 2, 5, 9), "
                "which layout ",
                layout_name_, " requires, got none");
}

void DenseShape::check_as_many_lengths() const {
  check_value(same(batch_, key_lengths_.count()), name_, kKeyLengths,
              "expected as many lengths as actual_seq_lengths_query, ", batch_, ", got ",
              key_lengths_.count());
}

c10::SymDimVector DenseShape::sizes_in(Layout layout, const c10::SymInt& tokens,
                                       const c10::SymInt& heads, const c10::SymInt& size) const {
  const auto axes = axes_of(layout);
  c10::SymDimVector sizes(static_cast<size_t>(axes.rank), size);
  if (!axes.packed()) {
    sizes[axes.batch] = batch_;
  }
  sizes[axes.tokens] = tokens;
  sizes[axes.heads] = axes.merged() ? heads * size : heads;
  return sizes;
}

std::vector<Sequence> DenseShape::sequences() const {
  const auto batches = batch_.maybe_as_int();
  const auto queries = queries_.maybe_as_int();
  const auto keys = keys_.maybe_as_int();
  if (!lengths_known() || (!is_packed() && !(batches && queries && keys))) {
    return {};
  }
  const bool all_alike = query_lengths_.values().size() <= 1 && key_lengths_.values().size() <= 1;
  const auto count = batches.value_or(0);
  return dense_sequences(layout_, all_alike ? std::min<int64_t>(count, 1) : count,
                         queries.value_or(0), keys.value_or(0), query_lengths_, key_lengths_,
                         paged_);
}

}  // namespace ascend_attn

// Operators of torch that NPUs compute and CPUs do not: `cann_sim::X` computes `aten::X`.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace cann_sim {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Every integer of 32 bits, and so every bin, is exact in double.
Tensor histogram(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  return at::isIntegralType(self.scalar_type(), /*includeBool=*/false)
             ? at::histc(self.to(at::kDouble), bins, min.toLong(), max.toLong()).to(self.dtype())
             : at::histc(self, bins, min, max);
}

Tensor histogram_out(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max,
                     Tensor out) {
  return out.resize_({bins}).copy_(histogram(self, bins, min, max));
}

Tensor widened(const Tensor& x) { return x.to(at::toOpMathType(x.scalar_type())); }

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? widened(gates) + widened(*bias) : widened(gates);
}

// The gates after their activation are what the gradient needs: input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const OptionalTensor& input_bias,
                                             const OptionalTensor& hidden_bias) {
  const auto gates =
      (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto input = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(),
             output = gates[3].sigmoid();
  const auto cy = forget * widened(cx) + input * cell;
  const auto dtype = cx.scalar_type();
  return {(output * cy.tanh()).to(dtype), cy.to(dtype),
          at::cat({input, forget, cell, output}, 1).to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy,
                                                      const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  const auto given = [&](const OptionalTensor& gradient) {
    return gradient && gradient->defined() ? widened(*gradient) : at::zeros_like(widened(cx));
  };
  const auto gates = widened(workspace).chunk(4, 1);
  const auto &input = gates[0], &forget = gates[1], &cell = gates[2], &output = gates[3];
  const auto tanh_cy = widened(cy).tanh();
  const auto dh = given(grad_hy);
  const auto dc = given(grad_cy) + dh * output * (1 - tanh_cy * tanh_cy);
  const auto of_gates =
      at::cat({dc * cell * input * (1 - input), dc * widened(cx) * forget * (1 - forget),
               dc * input * (1 - cell * cell), dh * tanh_cy * output * (1 - output)},
              1)
          .to(cx.scalar_type());
  return {of_gates, (dc * forget).to(cx.scalar_type()), has_bias ? of_gates.sum(0) : Tensor()};
}

// The gradient needs: reset, update and new gate after their activation, the hidden state, and what
// the reset gate multiplies.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const OptionalTensor& input_bias,
                                    const OptionalTensor& hidden_bias) {
  const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (of_input[0] + of_hidden[0]).sigmoid();
  const auto update = (of_input[1] + of_hidden[1]).sigmoid();
  const auto fresh = (of_input[2] + reset * of_hidden[2]).tanh();
  const auto before = widened(hx);
  const auto dtype = hx.scalar_type();
  return {((before - fresh) * update + fresh).to(dtype),
          at::cat({reset, update, fresh, before, of_hidden[2]}, 1).to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = widened(workspace).chunk(5, 1);
  const auto &reset = saved[0], &update = saved[1], &fresh = saved[2], &before = saved[3],
             &of_hidden = saved[4];
  const auto dy = widened(grad_hy);
  const auto of_update = dy * (before - fresh) * update * (1 - update);
  const auto of_fresh = dy * (1 - update) * (1 - fresh * fresh);
  const auto of_reset = of_fresh * of_hidden * reset * (1 - reset);
  const auto dtype = grad_hy.scalar_type();
  const auto input = at::cat({of_reset, of_update, of_fresh}, 1).to(dtype);
  const auto hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1).to(dtype);
  return {input, hidden, (dy * update).to(dtype), has_bias ? input.sum(0) : Tensor(),
          has_bias ? hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY(cann_sim, m) {
  m.def("histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor", histogram);
  m.def(
      "histc.out(Tensor self, int bins=100, Scalar min=0, Scalar max=0, *, Tensor(a!) out) -> "
      "Tensor(a!)",
      histogram_out);
  m.def(
      "_thnn_fused_lstm_cell(Tensor input_gates, Tensor hidden_gates, Tensor cx, Tensor? "
      "input_bias=None, Tensor? hidden_bias=None) -> (Tensor, Tensor, Tensor)",
      lstm_cell);
  m.def(
      "_thnn_fused_lstm_cell_backward_impl(Tensor? grad_hy, Tensor? grad_cy, Tensor cx, Tensor "
      "cy, Tensor workspace, bool has_bias) -> (Tensor, Tensor, Tensor)",
      lstm_cell_backward);
  m.def(
      "_thnn_fused_gru_cell(Tensor input_gates, Tensor hidden_gates, Tensor hx, Tensor? "
      "input_bias=None, Tensor? hidden_bias=None) -> (Tensor, Tensor)",
      gru_cell);
  m.def(
      "_thnn_fused_gru_cell_backward(Tensor grad_hy, Tensor workspace, bool has_bias) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      gru_cell_backward);
}

}  // namespace
}  // namespace cann_sim

// Operators of torch that NPUs compute and CPUs do not: `cann_sim::X` computes `aten::X`.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_thnn_differentiable_gru_cell_backward.h>
#include <ATen/ops/_thnn_differentiable_lstm_cell_backward.h>
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

// torch's own gradients take the gates, which the workspace keeps.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const OptionalTensor& input_bias,
                                             const OptionalTensor& hidden_bias) {
  const auto workspace = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto gates = workspace.chunk(4, 1);
  const auto cy = gates[1].sigmoid() * widened(cx) + gates[0].sigmoid() * gates[2].tanh();
  const auto dtype = cx.scalar_type();
  return {(gates[3].sigmoid() * cy.tanh()).to(dtype), cy.to(dtype), workspace};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy,
                                                      const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  const auto given = [&](const OptionalTensor& gradient) {
    return gradient && gradient->defined() ? widened(*gradient) : at::zeros_like(widened(cx));
  };
  const auto gradients = at::_thnn_differentiable_lstm_cell_backward(
      given(grad_hy), given(grad_cy), workspace, at::zeros_like(workspace), {}, {}, widened(cx),
      widened(cy));
  const auto of_gates = std::get<0>(gradients).to(cx.scalar_type());
  return {of_gates, std::get<2>(gradients).to(cx.scalar_type()),
          has_bias ? of_gates.sum(0) : Tensor()};
}

// The gates of the hidden state stand apart: the reset gate multiplies a part of them.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const OptionalTensor& input_bias,
                                    const OptionalTensor& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias);
  const auto hidden = with_bias(hidden_gates, hidden_bias);
  const auto of_input = input.chunk(3, 1), of_hidden = hidden.chunk(3, 1);
  const auto reset = (of_input[0] + of_hidden[0]).sigmoid();
  const auto update = (of_input[1] + of_hidden[1]).sigmoid();
  const auto fresh = (of_input[2] + reset * of_hidden[2]).tanh();
  return {((widened(hx) - fresh) * update + fresh).to(hx.scalar_type()),
          at::cat({input, hidden, widened(hx)}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const auto size = grad_hy.size(1);
  const auto saved = workspace.split({3 * size, 3 * size, size}, 1);
  const auto [of_input, of_hidden, of_hx, input_bias, hidden_bias] =
      at::_thnn_differentiable_gru_cell_backward(widened(grad_hy), saved[0], saved[1], saved[2], {},
                                                 {});
  const auto dtype = grad_hy.scalar_type();
  const auto input = of_input.to(dtype), hidden = of_hidden.to(dtype);
  return {input, hidden, of_hx.to(dtype), has_bias ? input.sum(0) : Tensor(),
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

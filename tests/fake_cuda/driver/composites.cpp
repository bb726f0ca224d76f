// Operators that need more than the fallback: composite ones, for which the fallback would never be asked, and those
// that have a CUDA kernel only.
#include <ATen/ops/empty.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>

#include "kernels.h"
#include "tensors.h"

namespace fake_cuda {
namespace {

using Maybe = std::optional<Tensor>;

bool is_given(const Maybe& tensor) { return tensor && tensor->defined(); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& x, const Tensor& h, const Tensor& cell, const Maybe& x_bias,
                                             const Maybe& h_bias) {
  auto gates = x + h;
  if (is_given(x_bias)) gates = gates + *x_bias + *h_bias;
  auto four = gates.chunk(4, 1);
  auto next = four[1].sigmoid() * cell + four[0].sigmoid() * four[2].tanh();
  return {four[3].sigmoid() * next.tanh(), next, at::empty({0}, x.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& x, const Tensor& h, const Tensor& hidden, const Maybe& x_bias,
                                    const Maybe& h_bias) {
  auto of_x = (is_given(x_bias) ? x + *x_bias : x).chunk(3, 1);
  auto of_h = (is_given(h_bias) ? h + *h_bias : h).chunk(3, 1);
  auto reset = (of_x[0] + of_h[0]).sigmoid();
  auto update = (of_x[1] + of_h[1]).sigmoid();
  auto fresh = (of_x[2] + reset * of_h[2]).tanh();
  return {fresh + update * (hidden - fresh), at::empty({0}, x.options())};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (auto name : {"native_dropout", "convolution", "convolution_backward", "native_group_norm", "native_layer_norm",
                    "silu_backward", "mish_backward"})
    m.impl(name, on_host());
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  for (auto name : {"clone", "zero_"}) m.impl(name, on_host());
}

}  // namespace
}  // namespace fake_cuda

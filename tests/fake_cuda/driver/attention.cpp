// scaled_dot_product_attention. Without dropout: the host's fused kernel. With dropout the host has none that is fused,
// and the card's memory would be several times too full; so there is one here that keeps what the CUDA kernels keep:
// inputs, result, a number per query, and the state of the generator, from which backward draws the same mask again.
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "kernels.h"
#include "tensors.h"

namespace fake_cuda {
namespace {

using MaybeTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

MaybeTensor as_bias(const MaybeTensor& mask, const Tensor& query) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  return at::zeros_like(*mask, mask->options().dtype(query.scalar_type())).masked_fill_(mask->logical_not(), -INFINITY);
}

// What both passes compute first, in float32 on the host.
struct Weights {
  Tensor probabilities, kept;  // softmax of the scores; 0 or 1 / (1 - dropout)
  double scale;

  Weights(const Tensor& q, const Tensor& k, const MaybeTensor& bias, double dropout, bool is_causal,
          std::optional<double> given_scale, std::optional<at::Generator> generator)
      : scale(given_scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))) {
    auto scores = q.to(at::kFloat).matmul(k.to(at::kFloat).transpose(-2, -1)) * scale;
    if (bias && bias->defined()) scores = scores + *bias;
    if (is_causal) {
      auto is_later = at::ones({q.size(-2), k.size(-2)}, scores.options().dtype(at::kBool)).triu(1);
      scores = scores.masked_fill(is_later, -INFINITY);
    }
    probabilities = scores.softmax(-1);
    kept = at::empty_like(probabilities).bernoulli_(1 - dropout, std::move(generator)) / (1 - dropout);
  }
};

Tensor dropout_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias, double dropout,
                       bool is_causal, std::optional<double> scale, std::optional<at::Generator> generator) {
  Weights weights(q, k, bias, dropout, is_causal, scale, std::move(generator));
  return (weights.probabilities * weights.kept).matmul(v.to(at::kFloat)).to(q.scalar_type());
}

ThreeTensors dropout_backward(const Tensor& given, const Tensor& q, const Tensor& k, const Tensor& v,
                              const MaybeTensor& bias, double dropout, bool is_causal, std::optional<double> scale,
                              std::optional<at::Generator> generator) {
  Weights weights(q, k, bias, dropout, is_causal, scale, std::move(generator));
  auto gradient = given.to(at::kFloat);
  auto of_v = (weights.probabilities * weights.kept).transpose(-2, -1).matmul(gradient);
  auto of_probabilities = gradient.matmul(v.to(at::kFloat).transpose(-2, -1)) * weights.kept;
  auto mean = (of_probabilities * weights.probabilities).sum(-1, true);
  auto of_scores = weights.probabilities * (of_probabilities - mean) * weights.scale;
  auto of_q = of_scores.matmul(k.to(at::kFloat)), of_k = of_scores.transpose(-2, -1).matmul(q.to(at::kFloat));
  return {of_q.to(q.scalar_type()), of_k.to(k.scalar_type()), of_v.to(v.scalar_type())};
}

// Operators, so that the fallback runs them on the card: with its generator, its stream and its race finder.
TORCH_LIBRARY(fake_cuda, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float dropout, bool is_causal, float? scale, "
      "Generator? generator) -> Tensor",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? bias, float dropout, "
      "bool is_causal, float? scale, Generator? generator) -> (Tensor, Tensor, Tensor)",
      {at::Tag::nondeterministic_seeded});
}
TORCH_LIBRARY_IMPL(fake_cuda, CPU, m) {
  m.impl("attention", dropout_forward);
  m.impl("attention_backward", dropout_backward);
}

class AttentionWithDropout : public torch::autograd::Function<AttentionWithDropout> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        const MaybeTensor& bias, double dropout, bool is_causal, std::optional<double> scale) {
    static auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("fake_cuda::attention", "").typed<decltype(dropout_forward)>();
    at::AutoDispatchBelowADInplaceOrView below;
    auto generator = at::globalContext().defaultGenerator(q.device());
    context->saved_data["random_state"] = generator.get_state();
    context->saved_data["dropout"] = dropout;
    context->saved_data["is_causal"] = is_causal;
    context->saved_data["scale"] = scale;
    auto result = op.call(q, k, v, bias, dropout, is_causal, scale, generator);
    auto log_sums = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
    context->save_for_backward({q, k, v, bias.value_or(Tensor()), result, log_sums});
    return result;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("fake_cuda::attention_backward", "")
                         .typed<decltype(dropout_backward)>();
    auto saved = context->get_saved_variables();
    auto generator = at::globalContext().defaultGenerator(saved[0].device()).clone();
    generator.set_state(context->saved_data["random_state"].toTensor());
    MaybeTensor bias = saved[3].defined() ? MaybeTensor(saved[3]) : std::nullopt;
    auto [of_q, of_k, of_v] = op.call(
        gradients[0], saved[0], saved[1], saved[2], bias, context->saved_data["dropout"].toDouble(),
        context->saved_data["is_causal"].toBool(), context->saved_data["scale"].toOptional<double>(), generator);
    return {of_q, of_k, of_v, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& mask, double dropout,
                 bool is_causal, std::optional<double> scale, bool enable_gqa) {
  bool learns_bias = mask && mask->defined() && mask->requires_grad();
  bool is_fused = q.dim() == 4 && q.size(3) == v.size(3) && !enable_gqa && !(dropout > 0 && learns_bias);
  if (!is_fused)
    return std::get<0>(
        at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, is_causal, std::nullopt, scale, enable_gqa));
  if (dropout > 0) return AttentionWithDropout::apply(q, k, v, as_bias(mask, q), dropout, is_causal, scale);
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, as_bias(mask, q), scale));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("scaled_dot_product_attention", attention); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", attention); }

}  // namespace
}  // namespace fake_cuda

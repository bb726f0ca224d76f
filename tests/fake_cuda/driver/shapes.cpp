#include "shapes.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/fill.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace fake_cuda {
namespace {

constexpr size_t kSmall = 4096;
constexpr size_t kMostKnown = 1 << 14;

std::mutex lock;
std::set<std::string> without_shapes;                              // that a meta kernel has refused once
std::unordered_map<std::string, std::vector<c10::IValue>> known;  // results by operator and arguments, as meta tensors

template <typename Do>
void each_tensor(const c10::IValue& value, Do what) {
  if (value.isTensor()) what(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& each : value.toTensorVector()) what(each);
  if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      if (each) what(*each);
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Arguments that it writes are its only results.
bool is_in_place(const c10::FunctionSchema& schema) {
  auto &arguments = schema.arguments(), &results = schema.returns();
  return std::any_of(arguments.begin(), arguments.end(), is_written) &&
         std::all_of(results.begin(), results.end(), is_written);
}

// An out= of another size than it will have; one of that size can be left as it is.
bool may_resize(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> given) {
  bool found = false;
  for (size_t i = 0; i < given.size(); ++i)
    if (is_written(schema.arguments()[i]))
      each_tensor(given[i], [&](const Tensor& tensor) { found |= !tensor.defined() || tensor.numel() == 0; });
  return found;
}

// Operator and arguments as far as shapes go by them; empty where they can't be told, or a result is an argument.
std::string key_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> given) {
  for (auto& result : schema.returns())
    if (result.alias_info()) return "";
  std::string key = c10::toString(schema.operator_name());
  auto add = [&](auto number) { key.append(reinterpret_cast<const char*>(&number), sizeof number); };
  auto add_all = [&](auto&& numbers) {
    add(numbers.size());
    for (auto number : numbers) add(static_cast<double>(number));
  };
  for (auto& value : given) {
    add(value.isNone() ? 'n' : 'v');
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      each_tensor(value, [&](const Tensor& tensor) {
        add(tensor.defined());
        if (!tensor.defined()) return;
        add(tensor.scalar_type());
        add_all(tensor.sizes());
        add_all(tensor.strides());
      });
    } else if (value.isInt()) {
      add(value.toInt());
    } else if (value.isDouble()) {
      add(value.toDouble());
    } else if (value.isBool()) {
      add(value.toBool());
    } else if (value.isIntList()) {
      add_all(value.toIntVector());
    } else if (value.isDoubleList()) {
      add_all(value.toDoubleVector());
    } else if (value.isBoolList()) {
      for (bool each : value.toBoolList()) add(each);
    } else if (value.isString()) {
      key += value.toStringRef();
    } else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) {
      return "";
    }
  }
  return key;
}

void replace_arguments(torch::jit::Stack* stack, size_t begin, const std::vector<c10::IValue>& results) {
  stack->resize(begin);
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace

bool has_numbers(const Tensor& tensor) {
  auto type = tensor.scalar_type();
  auto elements = tensor.storage().nbytes() / tensor.element_size();  // a part of what has no numbers has none
  return elements <= kSmall || type == at::kLong || type == at::kInt || type == at::kBool || type == at::kDouble;
}

bool has_known_shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given) {
  auto& schema = op.schema();
  bool is_large = false, is_of_host = false;
  for (auto& value : given)
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      is_of_host |= tensor.is_sparse() || (!is_on_card(tensor) && tensor.dim() > 0);
      is_large |= is_on_card(tensor) && !has_numbers(tensor);
    });
  if (!is_large || is_of_host) return false;
  if (is_in_place(schema) && !may_resize(schema, given)) return true;
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
  std::lock_guard<std::mutex> guard(lock);
  return without_shapes.count(c10::toString(schema.operator_name())) == 0;
}

bool call_for_shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto begin = stack->size() - given.size();
  if (is_in_place(schema) && !may_resize(schema, given)) {
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < given.size(); ++i) {
      auto& argument = schema.arguments()[i];
      if (!is_written(argument)) continue;
      if (argument.kwarg_only()) each_tensor(given[i], put_numbers);  // out=
      if (results.size() < schema.returns().size()) results.push_back((*stack)[begin + i]);
    }
    replace_arguments(stack, begin, results);
    return true;
  }
  auto key = key_of(schema, given);
  if (!key.empty()) {
    std::lock_guard<std::mutex> guard(lock);
    if (auto found = known.find(key); found != known.end()) {
      replace_arguments(stack, begin, found->second);
      return true;
    }
  }
  for (size_t i = begin; i < stack->size(); ++i)
    if ((*stack)[i].isGenerator()) (*stack)[i] = c10::IValue();
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  } catch (const std::exception&) {
    std::lock_guard<std::mutex> guard(lock);
    without_shapes.insert(c10::toString(schema.operator_name()));
    return false;
  }
  if (!key.empty()) {
    std::lock_guard<std::mutex> guard(lock);
    if (known.size() >= kMostKnown) known.clear();
    known[key].assign(stack->begin() + static_cast<int64_t>(begin), stack->end());
  }
  return true;
}

void put_numbers(const Tensor& result) {
  if (has_numbers(result)) host_view(result).fill_(at::isIntegralType(result.scalar_type(), true) ? 0 : 1);
}

Tensor shape_of(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(Device(DeviceType::Meta)));
}

}  // namespace fake_cuda

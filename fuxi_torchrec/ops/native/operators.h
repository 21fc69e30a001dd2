// What the operators share: tensors checked before the kernels get their pointers, and the kernels in use.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "parallel.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

const Kernels* chosen_kernels();

template <typename T>
constexpr ScalarType type_of() {
  if constexpr (std::is_same_v<T, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<T, double>) return ScalarType::Double;
  return ScalarType::Long;
}

// Contiguous tensors, held as long as their pointers are used.
class Held {
 public:
  template <typename T>
  const T* get(const Tensor& tensor, const char* name, Sizes sizes) {
    STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
    STD_TORCH_CHECK(tensor.scalar_type() == type_of<T>(), name, " is of the wrong dtype");
    bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
    same = same && std::equal(sizes.begin(), sizes.end(), tensor.sizes().begin());
    STD_TORCH_CHECK(same, name, " is of the wrong shape");
    tensors_.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
    return static_cast<const T*>(tensors_.back().const_data_ptr());
  }
  template <typename T>
  const T* get(const Maybe& tensor, const char* name, Sizes sizes) {
    return tensor.has_value() ? get<T>(*tensor, name, sizes) : nullptr;
  }

 private:
  std::vector<Tensor> tensors_;
};

template <typename T>
inline Tensor made(const Tensor& like, std::vector<int64_t> sizes, T** data) {
  Tensor tensor = torch::stable::new_empty(like, sizes, type_of<T>());
  *data = static_cast<T*>(tensor.mutable_data_ptr());
  return tensor;
}

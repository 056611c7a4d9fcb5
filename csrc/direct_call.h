// The way from Python to an operator that costs least.
//
// torch.ops.ascend.x(...) matches its arguments with the schema, boxes them and unboxes them again,
// which for a dozen of them takes longer than a small operator does. The public functions have all
// arguments, in the order of the schema: here each is read as what the signature has in its place,
// and the dispatcher is called unboxed. What is not plainly that (a subclass of Tensor, a symbolic
// number, a wrong type) is left to torch.ops, for which NotImplemented asks.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "ops/operator.h"

namespace ascend_attn {

// What a Python object says, kept while the call lasts.
template <typename Parameter>
class Read;

template <>
class Read<const at::Tensor&> {
 public:
  bool from(PyObject* object) {
    const bool plain = THPVariable_CheckExact(object);
    tensor_ = plain ? &THPVariable_Unpack(object) : nullptr;
    return plain;
  }
  const at::Tensor& value() const { return *tensor_; }

 private:
  const at::Tensor* tensor_ = nullptr;
};

template <>
class Read<const std::optional<at::Tensor>&> {
 public:
  Read() = default;
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;
  ~Read() {
    if (tensor_) {
      Borrow::destroyBorrow(*tensor_);
    }
  }

  bool from(PyObject* object) {
    if (object == Py_None) {
      return true;
    }
    const bool plain = THPVariable_CheckExact(object);
    if (plain) {
      tensor_ = Borrow::createBorrow(THPVariable_Unpack(object));
    }
    return plain;
  }
  const std::optional<at::Tensor>& value() const { return tensor_; }

 private:
  using Borrow = c10::MaybeOwnedTraits<at::Tensor>;

  // The caller's, without a reference of its own, which would ask for Python's lock twice.
  std::optional<at::Tensor> tensor_;
};

template <>
class Read<std::string_view> {
 public:
  bool from(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &size) : "";
    if (!text) {
      PyErr_Clear();
      return false;
    }
    text_ = {text, static_cast<size_t>(size)};
    return PyUnicode_CheckExact(object);
  }
  std::string_view value() const { return text_; }

 private:
  std::string_view text_;
};

template <>
class Read<bool> {
 public:
  bool from(PyObject* object) {
    value_ = object == Py_True;
    return PyBool_Check(object);
  }
  bool value() const { return value_; }

 private:
  bool value_ = false;
};

template <>
class Read<int64_t> {
 public:
  bool from(PyObject* object) {
    int overflow = 0;
    const bool plain = PyLong_CheckExact(object);
    value_ = plain ? PyLong_AsLongLongAndOverflow(object, &overflow) : 0;
    return plain && overflow == 0;
  }
  int64_t value() const { return value_; }

 private:
  int64_t value_ = 0;
};

template <>
class Read<c10::SymInt> : public Read<int64_t> {};

template <>
class Read<double> {
 public:
  bool from(PyObject* object) {
    const bool plain = PyFloat_CheckExact(object);
    value_ = plain ? PyFloat_AS_DOUBLE(object) : 0;
    return plain;
  }
  double value() const { return value_; }

 private:
  double value_ = 0;
};

// A tuple or a list of integers.
template <typename Number>
class ReadList {
 public:
  bool from(PyObject* object) {
    if (!PyTuple_CheckExact(object) && !PyList_CheckExact(object)) {
      return false;
    }
    const auto size = PySequence_Fast_GET_SIZE(object);
    numbers_.emplace();
    numbers_->reserve(size);
    Read<int64_t> number;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!number.from(PySequence_Fast_GET_ITEM(object, i))) {
        return false;
      }
      numbers_->push_back(number.value());
    }
    return true;
  }

 protected:
  std::optional<c10::SmallVector<Number, 4>> numbers_;
};

template <>
class Read<at::IntArrayRef> : public ReadList<int64_t> {
 public:
  at::IntArrayRef value() const { return *numbers_; }
};

template <>
class Read<at::OptionalSymIntArrayRef> : public ReadList<c10::SymInt> {
 public:
  bool from(PyObject* object) { return object == Py_None || ReadList::from(object); }
  at::OptionalSymIntArrayRef value() const {
    return numbers_ ? at::OptionalSymIntArrayRef(*numbers_) : std::nullopt;
  }
};

// As torch.ops returns them: None, a tensor, or a tuple of tensors.
template <typename... Tensors>
PyObject* to_python(const std::tuple<Tensors...>& outputs) {
  if constexpr (sizeof...(Tensors) == 0) {
    Py_RETURN_NONE;
  } else if constexpr (sizeof...(Tensors) == 1) {
    return THPVariable_Wrap(std::get<0>(outputs));
  } else {
    THPObjectPtr tuple(PyTuple_New(sizeof...(Tensors)));
    if (!tuple) {
      throw python_error();
    }
    Py_ssize_t index = 0;
    const auto add = [&](const at::Tensor& tensor) {
      auto* object = THPVariable_Wrap(tensor);
      if (!object) {
        throw python_error();
      }
      PyTuple_SET_ITEM(tuple.get(), index++, object);
    };
    std::apply([&](const auto&... tensors) { (add(tensors), ...); }, outputs);
    return tuple.release();
  }
}

template <typename Op, typename Signature = typename Op::Signature>
struct DirectCall;

template <typename Op, typename... Parameters>
struct DirectCall<Op, typename Op::Outputs(Parameters...)> {
  static PyObject* run(PyObject*, PyObject* const* objects, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    std::tuple<Read<Parameters>...> arguments;
    const auto read = [&](auto&... argument) { return (argument.from(*objects++) && ...); };
    if (count != sizeof...(Parameters) || at::impl::torch_function_mode_enabled() ||
        !std::apply(read, arguments)) {
      Py_RETURN_NOTIMPLEMENTED;
    }
    const auto outputs = [&] {
      const py::gil_scoped_release no_gil;
      return std::apply([](const auto&... argument) { return call<Op>(argument.value()...); },
                        arguments);
    }();
    return to_python(outputs);
    END_HANDLE_TH_ERRORS
  }

  // Python keeps a pointer to it.
  static inline PyMethodDef method{Op::name, reinterpret_cast<PyCFunction>(&run), METH_FASTCALL,
                                   nullptr};
};

template <typename Op>
void add_direct_call(py::module_& m) {
  auto& method = DirectCall<Op>::method;
  m.add_object(method.ml_name,
               py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
}

}  // namespace ascend_attn

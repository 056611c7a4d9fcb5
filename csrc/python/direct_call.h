// The way from Python to an operator that costs least.
//
// torch.ops.ascend.x(...) matches its arguments with the schema, boxes them and unboxes them again,
// which for a dozen of them takes longer than a small operator does. The public functions have all
// arguments, in the order of the schema: here each is read as what the signature has in its place,
// and the dispatcher is called unboxed. A call with anything that is not plainly that (a subclass
// of Tensor, a symbolic number, a wrong type) is left to a function that goes through torch.ops.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <new>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/operator.h"

namespace ascend_attn {

// What a Python object says, kept while the call lasts.
template <typename Parameter>
class Read;

// With a reference of its own: torch.utils.swap_tensors asks whether there is one, while other
// threads run.
template <>
class Read<const at::Tensor&> {
 public:
  bool from(PyObject* object) {
    const bool plain = THPVariable_CheckExact(object);
    if (plain) {
      tensor_ = THPVariable_Unpack(object);
    }
    return plain;
  }
  const at::Tensor& value() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

template <>
class Read<const std::optional<at::Tensor>&> {
 public:
  bool from(PyObject* object) {
    if (object == Py_None) {
      return true;
    }
    const bool plain = THPVariable_CheckExact(object);
    if (plain) {
      tensor_ = THPVariable_Unpack(object);
    }
    return plain;
  }
  const std::optional<at::Tensor>& value() const { return tensor_; }

 private:
  std::optional<at::Tensor> tensor_;
};

template <>
class Read<std::string_view> {
 public:
  bool from(PyObject* object) {
    if (!PyUnicode_CheckExact(object)) {
      return false;
    }
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (!text) {
      PyErr_Clear();
      return false;
    }
    text_ = {text, static_cast<size_t>(size)};
    return true;
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

// The exception that is being handled, as torch.ops raises it.
inline void raise_in_python() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

template <typename Op, typename Signature = typename Op::Signature>
struct DirectCall;

template <typename Op, typename... Parameters>
struct DirectCall<Op, typename Op::Outputs(Parameters...)> {
  // A function of Python whose `self` is the function for all other calls.
  static PyObject* run(PyObject* otherwise, PyObject* const* objects, Py_ssize_t count) {
    try {
      std::tuple<Read<Parameters>...> arguments;
      auto next = objects;
      const auto read = [&](auto&... argument) { return (argument.from(*next++) && ...); };
      if (count != sizeof...(Parameters) || at::impl::torch_function_mode_enabled() ||
          !std::apply(read, arguments)) {
        return PyObject_Vectorcall(otherwise, objects, count, nullptr);
      }
      const auto outputs = [&] {
        const py::gil_scoped_release no_gil;
        return std::apply([](const auto&... argument) { return call<Op>(argument.value()...); },
                          arguments);
      }();
      return to_python(outputs);
    } catch (...) {
      raise_in_python();
      return nullptr;
    }
  }

  // Python keeps a pointer to it.
  static inline PyMethodDef method{Op::name, reinterpret_cast<PyCFunction>(&run), METH_FASTCALL,
                                   nullptr};
};

template <typename Op>
py::object direct_call(const py::function& otherwise, const py::str& module_name) {
  return py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&DirectCall<Op>::method, otherwise.ptr(), module_name.ptr()));
}

}  // namespace ascend_attn

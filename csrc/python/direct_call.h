// The fast path from Python to an operator.
//
// torch.ops.ascend.x(...) matches its arguments with the schema, boxes them and unboxes them again,
// which for a dozen of them takes longer than a small operator does. The public functions pass all
// arguments in the order of the schema: each is read here as the type that the signature has in its
// place, and the dispatcher is called unboxed. A call with anything else (a subclass of Tensor, a
// symbolic number, a wrong type) is left to a function that goes through torch.ops.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
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
#include <vector>

#include "dispatch/operator.h"

namespace ascend_attn {

// Owns the value of a parameter while the call lasts. Tensors have a reference of their own:
// torch.utils.swap_tensors counts references, while other threads run.
template <typename Parameter>
struct Owner {
  using type = std::remove_cvref_t<Parameter>;
};
template <>
struct Owner<at::TensorList> {
  using type = std::vector<at::Tensor>;
};
template <>
struct Owner<at::IntArrayRef> {
  using type = c10::SmallVector<int64_t, 4>;
};
template <>
struct Owner<at::OptionalSymIntArrayRef> {
  using type = std::optional<c10::SmallVector<c10::SymInt, 4>>;
};

// Lengths are a tensor or, in Python, a list.
struct LengthsOwner {
  std::optional<at::Tensor> tensor;
};
template <typename Field, typename Parameter>
struct OwnerOf : Owner<Parameter> {};
template <std::derived_from<Lengths> Field, typename Parameter>
struct OwnerOf<Field, Parameter> {
  using type = LengthsOwner;
};

template <typename T>
const T& view(const T& argument) {
  return argument;
}
inline const std::optional<at::Tensor>& view(const LengthsOwner& lengths) { return lengths.tensor; }
inline at::OptionalSymIntArrayRef view(
    const std::optional<c10::SmallVector<c10::SymInt, 4>>& list) {
  return list ? at::OptionalSymIntArrayRef(*list) : std::nullopt;
}

// read(object, to) is false where the object is not plainly what the parameter takes.
inline bool read(PyObject* object, at::Tensor& to) {
  const bool plain = THPVariable_CheckExact(object);
  if (plain) {
    to = THPVariable_Unpack(object);
  }
  return plain;
}

inline bool read(PyObject* object, std::string_view& to) {
  if (!PyUnicode_CheckExact(object)) {
    return false;
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (!text) {
    PyErr_Clear();
    return false;
  }
  to = {text, static_cast<size_t>(size)};
  return true;
}

inline bool read(PyObject* object, bool& to) {
  to = object == Py_True;
  return PyBool_Check(object);
}

inline bool read(PyObject* object, int64_t& to) {
  int overflow = 0;
  const bool plain = PyLong_CheckExact(object);
  to = plain ? PyLong_AsLongLongAndOverflow(object, &overflow) : 0;
  return plain && overflow == 0;
}

inline bool read(PyObject* object, c10::SymInt& to) {
  int64_t number = 0;
  const bool plain = read(object, number);
  to = number;
  return plain;
}

inline bool read(PyObject* object, double& to) {
  const bool plain = PyFloat_CheckExact(object);
  to = plain ? PyFloat_AS_DOUBLE(object) : 0;
  return plain;
}

// A tuple or a list.
template <typename List>
  requires requires(List list) { list.emplace_back(); }
bool read(PyObject* object, List& to) {
  if (!PyTuple_CheckExact(object) && !PyList_CheckExact(object)) {
    return false;
  }
  const auto size = PySequence_Fast_GET_SIZE(object);
  to.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!read(PySequence_Fast_GET_ITEM(object, i), to.emplace_back())) {
      return false;
    }
  }
  return true;
}

template <typename T>
bool read(PyObject* object, std::optional<T>& to) {
  return object == Py_None || read(object, to.emplace());
}

// A mode, such as that of fake tensors, has to see how the tensor of a list is made.
inline bool read(PyObject* object, LengthsOwner& to) {
  if (read(object, to.tensor)) {
    return true;
  }
  c10::SmallVector<int64_t, 8> values;
  const bool plain = !c10::impl::TorchDispatchModeTLS::any_modes_set() && read(object, values);
  to.tensor = plain ? std::optional(lengths_tensor(values)) : std::nullopt;
  return plain;
}

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

// Raises the exception that is being handled as torch.ops would.
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

template <typename Op, typename Signature = SignatureOf<Op>, typename Fields = ArgumentsOf<Op>>
struct DirectCall;

template <typename Op, typename... Parameters, typename... Fields>
struct DirectCall<Op, typename Op::Outputs(Parameters...), std::tuple<const Fields&...>> {
  // A function of Python whose `self` is the function for all other calls.
  static PyObject* run(PyObject* otherwise, PyObject* const* objects, Py_ssize_t count) {
    try {
      std::tuple<typename OwnerOf<Fields, Parameters>::type...> arguments;
      auto next = objects;
      const auto read_all = [&](auto&... argument) { return (read(*next++, argument) && ...); };
      if (count != sizeof...(Parameters) || at::impl::torch_function_mode_enabled() ||
          !std::apply(read_all, arguments)) {
        return PyObject_Vectorcall(otherwise, objects, count, nullptr);
      }
      const auto outputs = [&] {
        torch::PyWarningHandler warnings;
        try {
          const py::gil_scoped_release no_gil;
          return std::apply(
              [](const auto&... argument) { return Overload<Op>::call(view(argument)...); },
              arguments);
        } catch (...) {
          warnings.set_in_exception();
          throw;
        }
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

// As much of JSON as the call log needs.
#pragma once

#include <cmath>
#include <cstdint>
#include <iomanip>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cann_sim {

class Json {
 public:
  Json(std::nullptr_t) : text_("null") {}
  Json(bool value) : text_(value ? "true" : "false") {}
  Json(int64_t value) : text_(std::to_string(value)) {}
  Json(double value) {
    std::ostringstream out;
    out << std::setprecision(17) << value;
    text_ = std::isfinite(value) ? out.str() : '"' + out.str() + '"';
  }
  Json(const std::string& value) : text_((std::ostringstream() << std::quoted(value)).str()) {}

  template <typename T>
  static Json array(const std::vector<T>& values) {
    Json result = nullptr;
    result.text_ = "[";
    for (const auto& value : values) {
      result.text_ += (result.text_.size() > 1 ? "," : "") + Json(value).text_;
    }
    result.text_ += "]";
    return result;
  }

  static Json object(const std::vector<std::pair<std::string_view, Json>>& members) {
    Json result = nullptr;
    result.text_ = "{}";
    for (const auto& [name, value] : members) {
      result.add(name, value);
    }
    return result;
  }

  void add(std::string_view name, const Json& value) {
    text_.pop_back();
    text_ +=
        (text_.size() > 1 ? "," : "") + Json(std::string(name)).text_ + ":" + value.text_ + "}";
  }

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace cann_sim

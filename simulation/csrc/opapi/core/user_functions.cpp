// Functions that a user adds while the program runs: cann_simulator/_functions.py.
//
// Their two phases are Python's. They are found by name, as all others are, because this library
// keeps entries in its table of names for them. The table is the older one of ELF, DT_HASH, which
// is as easy to extend as it is to read: setup.py links it so.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "ascendcl/report.h"
#include "ascendcl/runtime.h"
#include "opapi/core/opapi.h"

// clang-format off
#define SPARE(number) \
  void cann_sim_spare_entry_with_room_for_the_name_of_a_function_that_a_user_adds_##number() {}
#define TEN_SPARES(ten) \
  SPARE(ten##0) SPARE(ten##1) SPARE(ten##2) SPARE(ten##3) SPARE(ten##4) \
  SPARE(ten##5) SPARE(ten##6) SPARE(ten##7) SPARE(ten##8) SPARE(ten##9)

extern "C" {
TEN_SPARES(0) TEN_SPARES(1) TEN_SPARES(2) TEN_SPARES(3) TEN_SPARES(4)
TEN_SPARES(5) TEN_SPARES(6) TEN_SPARES(7) TEN_SPARES(8) TEN_SPARES(9)
}
// clang-format on

namespace cann_sim {
namespace {

constexpr std::string_view kSpare = "cann_sim_spare_entry_";

uint32_t hash_of(std::string_view name) {
  uint32_t hash = 0;
  for (const unsigned char c : name) {
    hash = (hash << 4) + c;
    const uint32_t high = hash & 0xF0000000;
    hash = (hash ^ (high >> 24)) & ~high;
  }
  return hash;
}

// The table of names of this library, where the dynamic linker reads it.
class NameTable {
 public:
  NameTable() {
    Dl_info here;
    link_map* map = nullptr;
    dladdr1(reinterpret_cast<void*>(&hash_of), &here, reinterpret_cast<void**>(&map),
            RTLD_DL_LINKMAP);
    base_ = map->l_addr;
    for (const auto* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_HASH:
          hash_ = reinterpret_cast<uint32_t*>(entry->d_un.d_ptr);
          break;
        case DT_SYMTAB:
          symbols_ = reinterpret_cast<ElfW(Sym)*>(entry->d_un.d_ptr);
          break;
        case DT_STRTAB:
          names_ = reinterpret_cast<char*>(entry->d_un.d_ptr);
          break;
        case DT_STRSZ:
          names_size_ = entry->d_un.d_val;
          break;
      }
    }
  }

  // Whether there was an entry left.
  bool add(std::string_view name, void* address) {
    uint32_t index = 1;
    while (index < size() && !is_spare(index, name.size())) {
      ++index;
    }
    if (index == size()) {
      return false;
    }
    make_writable(true);
    auto& symbol = symbols_[index];
    auto* text = names_ + symbol.st_name;
    auto* link = &bucket(text);
    while (*link != index) {
      link = &chain()[*link];
    }
    *link = chain()[index];
    std::ranges::copy(name, text);
    text[name.size()] = '\0';
    symbol.st_value = reinterpret_cast<uintptr_t>(address) - base_;
    chain()[index] = bucket(name);
    bucket(name) = index;
    make_writable(false);
    return true;
  }

 private:
  uint32_t size() const { return hash_[1]; }
  uint32_t* chain() const { return hash_ + 2 + hash_[0]; }
  uint32_t& bucket(std::string_view name) const { return hash_[2 + hash_of(name) % hash_[0]]; }

  bool is_spare(uint32_t index, size_t needed) const {
    const std::string_view name = names_ + symbols_[index].st_name;
    return name.starts_with(kSpare) && name.size() >= needed;
  }

  void make_writable(bool writable) const {
    const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    protect(hash_, chain() + size(), access);
    protect(symbols_, symbols_ + size(), access);
    protect(names_, names_ + names_size_, access);
  }
  static void protect(void* begin, void* end, int access) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<uintptr_t>(begin) / page * page;
    mprotect(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(end) - first, access);
  }

  uintptr_t base_ = 0;
  uint32_t* hash_ = nullptr;
  ElfW(Sym) * symbols_ = nullptr;
  char* names_ = nullptr;
  size_t names_size_ = 0;
};

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

bool cann_sim_add_function(const char* name, void* first_phase, void* second_phase) {
  NameTable table;
  return table.add(std::string(name) + "GetWorkspaceSize", first_phase) &&
         table.add(name, second_phase);
}
void cann_sim_read_tensor(const aclTensor* tensor, cann_sim_tensor* read) {
  *read = readable(tensor->view);
}
int64_t cann_sim_read_list(const aclTensorList* list, const aclTensor* const** tensors) {
  *tensors = list->tensors.data();
  return static_cast<int64_t>(list->tensors.size());
}
int64_t cann_sim_read_integers(const aclIntArray* array, const int64_t** values) {
  *values = array->values.data();
  return static_cast<int64_t>(array->values.size());
}
double cann_sim_read_scalar(const aclScalar* scalar, int64_t* dtype) {
  *dtype = scalar->scalar.dtype;
  return scalar->scalar.value;
}
// For the log of a call, and its number.
void cann_sim_note_call(const char* function, const char* arguments, aclrtStream stream) {
  count(Outcome::aclnn, function);
  if (is_writing_calls()) {
    write_call(std::string("{\"function\":\"") + function + "\",\"arguments\":" + arguments +
               ",\"device\":" + std::to_string(device_of_stream(stream)) +
               ",\"stream\":" + std::to_string(stream_id(stream)) +
               ",\"process\":" + std::to_string(getpid()) + "}");
  }
}
void cann_sim_set_error(const char* message) { set_error_message(message); }

}  // extern "C"

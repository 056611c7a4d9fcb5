// Hides the functions that the chosen device lacks from everybody who looks them up by name.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>

namespace cann_sim {
namespace {

// An entry without a value is no definition for the dynamic linker.
void hide(void* library, const std::string& function) {
  void* address = dlsym(library, function.c_str());
  Dl_info where;
  ElfW(Sym)* entry = nullptr;
  if (!address || !dladdr1(address, &where, reinterpret_cast<void**>(&entry), RTLD_DL_SYMENT) ||
      !entry) {
    return;
  }
  const auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(entry) / page_size * page_size;
  const auto size = reinterpret_cast<uintptr_t>(entry + 1) - begin;
  auto* pages = reinterpret_cast<void*>(begin);
  if (mprotect(pages, size, PROT_READ | PROT_WRITE) == 0) {
    entry->st_value = 0;
    mprotect(pages, size, PROT_READ);
  }
}

// CANN_SIM_WITHOUT has their names, with commas between them.
const bool hidden = [] {
  Dl_info here;
  const char* names = std::getenv("CANN_SIM_WITHOUT");
  if (names && dladdr(reinterpret_cast<void*>(&hide), &here)) {
    void* library = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',');) {
      hide(library, name);
      hide(library, name + "GetWorkspaceSize");
    }
  }
  return true;
}();

}  // namespace
}  // namespace cann_sim

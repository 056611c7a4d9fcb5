// Tells ThreadSanitizer how a parallel region of OpenMP orders threads: what was done before it has
// happened for all of them, and what they do has happened behind it. OpenMP itself is not built
// with the sanitizer, which sees none of that. tools/sanitize.py loads this before all else.
#include <dlfcn.h>
#include <link.h>

#include <string_view>

extern "C" {
using Body = void(void*);
using Parallel = void(Body* body, void* data, unsigned threads, unsigned flags);

void __tsan_acquire(void* address);
void __tsan_release(void* address);
Parallel GOMP_parallel;
}

namespace {

struct Region {
  Body* body;
  void* data;
  char begin = 0;
  char end = 0;
};

void run(void* pointer) {
  auto& region = *static_cast<Region*>(pointer);
  __tsan_acquire(&region.begin);
  region.body(region.data);
  __tsan_release(&region.end);
}

// In the library that torch brings: it has a name of its own, and not every scope.
Parallel* find_parallel() {
  Parallel* found = nullptr;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* result) {
        if (std::string_view(library->dlpi_name).find("libgomp") == std::string_view::npos) {
          return 0;
        }
        void* handle = dlopen(library->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
        *static_cast<void**>(result) = dlsym(handle, "GOMP_parallel");
        return 1;
      },
      &found);
  return found;
}

}  // namespace

void GOMP_parallel(Body* body, void* data, unsigned threads, unsigned flags) {
  static Parallel* const parallel = find_parallel();
  Region region{body, data};
  __tsan_release(&region.begin);
  parallel(run, &region, threads, flags);
  __tsan_acquire(&region.end);
}

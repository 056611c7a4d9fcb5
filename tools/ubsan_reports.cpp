// Where UndefinedBehaviorSanitizer writes its reports, $UBSAN_REPORTS. Its own option, log_path,
// sets that of AddressSanitizer where both are loaded. tools/sanitize.py loads this before its
// library.
#include <dlfcn.h>

#include <cstdlib>

[[gnu::constructor]] static void set_path() {
  using SetPath = void(const char* path);
  auto* set = reinterpret_cast<SetPath*>(dlsym(RTLD_NEXT, "__sanitizer_set_report_path"));
  if (const char* path = std::getenv("UBSAN_REPORTS"); set && path) {
    set(path);
  }
}

// Ends OpenMP's threads before a fork: the child would wait in its first parallel loop for threads
// that it does not have. Both processes start new ones when they need them.
#include <omp.h>
#include <pthread.h>

namespace ascend_attn::cpu {
namespace {

[[maybe_unused]] const int registered = pthread_atfork(
    [] { omp_pause_resource_all(omp_pause_soft); }, /*parent=*/nullptr, /*child=*/nullptr);

}  // namespace
}  // namespace ascend_attn::cpu

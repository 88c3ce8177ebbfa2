// What newer headers of glibc and libstdc++ use and 2.28 lacks. Each is hidden: no other library
// of the process sees it. If a link says that something else is undefined, it belongs here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

struct stat;

// Functions of libc proper only since 2.33. Before that headers called these, with the version of
// the structure.
enum { kStatVersion = 1 };
int __xstat(int version, const char* path, struct stat* out);
int __lxstat(int version, const char* path, struct stat* out);
int __fxstat(int version, int fd, struct stat* out);

HIDDEN int stat(const char* path, struct stat* out) { return __xstat(kStatVersion, path, out); }
HIDDEN int lstat(const char* path, struct stat* out) { return __lxstat(kStatVersion, path, out); }
HIDDEN int fstat(int fd, struct stat* out) { return __fxstat(kStatVersion, fd, out); }
HIDDEN int fstat64(int fd, struct stat* out) { return __fxstat(kStatVersion, fd, out); }

// Since 2.32: whether reference counts may do without atomics. They may not.
HIDDEN char __libc_single_threaded = 0;

// Since 2.36; of std::random_device, which libstdc++ brings whether it is used or not.
HIDDEN uint32_t arc4random(void) {
  uint32_t value;
  if (getrandom(&value, sizeof value, 0) != sizeof value) abort();  // so few bytes never fail
  return value;
}

typedef int ClockWait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
enum { kNanoseconds = 1000000000, kLongestSeconds = 1000000000 };

// Since 2.30. Where it is missing, the deadline is translated to the clock of every condition
// variable, as libstdc++ did then; its callers look at their own clock afterwards and wait again.
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                  clockid_t clock, const struct timespec* until) {
  ClockWait* const newer = (ClockWait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
  if (newer) return newer(condition, mutex, clock, until);
  struct timespec now, translated;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &translated);
  time_t seconds = until->tv_sec - now.tv_sec;
  if (seconds > kLongestSeconds) seconds = kLongestSeconds;
  translated.tv_sec += seconds;
  translated.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (translated.tv_nsec < 0) {
    translated.tv_nsec += kNanoseconds;
    --translated.tv_sec;
  } else if (translated.tv_nsec >= kNanoseconds) {
    translated.tv_nsec -= kNanoseconds;
    ++translated.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &translated);
}

// Preloaded into a process under test: counts its calls that change something below a folder, and at a chosen one the
// process dies or the call fails. Nothing happens before arm().
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { kCount, kKill, kIoError, kNoSpace, kSyncFails, kStop };

static char prefix[4096];
static int action = kCount;
static long at = -1, calls = 0;
static int also = 0;  // a process that dies first
static int armed = 0;

// Of one thread, before those start that write.
void storage_calls_arm(const char* folder, int what, long call, int other_process) {
  snprintf(prefix, sizeof(prefix), "%s", folder);
  action = what;
  at = call;
  calls = 0;
  also = other_process;
  __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}
long storage_calls_count(void) { return __atomic_load_n(&calls, __ATOMIC_SEQ_CST); }

// Whether the call shall fail; errno is set then.
static int step(const char* path, int takes_space, int syncs) {
  if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST) || !path || strncmp(path, prefix, strlen(prefix)) != 0) return 0;
  const long number = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
  if (at < 0) return 0;
  if (action == kKill && number == at) {
    if (also > 0) kill(also, SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  if (action == kStop && number == at) kill(getpid(), SIGSTOP);
  if ((action == kIoError && number == at) || (action == kSyncFails && syncs && number >= at)) {
    errno = EIO;
    return 1;
  }
  if (action == kNoSpace && takes_space && number >= at) {
    errno = ENOSPC;
    return 1;
  }
  return 0;
}

static int step_at(int descriptor, int takes_space, int syncs) {
  if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST)) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  if (length <= 0) return 0;
  path[length] = '\0';
  return step(path, takes_space, syncs);
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                              \
  int name(const char* path, int flags, ...) {                  \
    va_list list;                                               \
    va_start(list, flags);                                      \
    const mode_t mode = (mode_t)va_arg(list, int);              \
    va_end(list);                                               \
    if ((flags & O_CREAT) && step(path, 1, 0)) return -1;       \
    return REAL(int, name, const char*, int, ...)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define PWRITE(name)                                                              \
  ssize_t name(int fd, const void* bytes, size_t size, off_t offset) {            \
    if (step_at(fd, 1, 0)) return -1;                                             \
    return REAL(ssize_t, name, int, const void*, size_t, off_t)(fd, bytes, size, offset); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t write(int fd, const void* bytes, size_t size) {
  if (fd > 2 && step_at(fd, 1, 0)) return -1;
  return REAL(ssize_t, write, int, const void*, size_t)(fd, bytes, size);
}

#define OF_DESCRIPTOR(name, syncs)          \
  int name(int fd) {                        \
    if (step_at(fd, 0, syncs)) return -1;   \
    return REAL(int, name, int)(fd);        \
  }
OF_DESCRIPTOR(fsync, 1)
OF_DESCRIPTOR(fdatasync, 1)

#define FTRUNCATE(name)                        \
  int name(int fd, off_t size) {               \
    if (step_at(fd, 0, 0)) return -1;          \
    return REAL(int, name, int, off_t)(fd, size); \
  }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

#define FALLOCATE(name)                                                \
  int name(int fd, int mode, off_t offset, off_t size) {               \
    if (step_at(fd, 1, 0)) return -1;                                  \
    return REAL(int, name, int, int, off_t, off_t)(fd, mode, offset, size); \
  }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

int rename(const char* from, const char* to) {
  if (step(from, 0, 0)) return -1;
  return REAL(int, rename, const char*, const char*)(from, to);
}
int mkdir(const char* path, mode_t mode) {
  if (step(path, 1, 0)) return -1;
  return REAL(int, mkdir, const char*, mode_t)(path, mode);
}
int unlink(const char* path) {
  if (step(path, 0, 0)) return -1;
  return REAL(int, unlink, const char*)(path);
}
int rmdir(const char* path) {
  if (step(path, 0, 0)) return -1;
  return REAL(int, rmdir, const char*)(path);
}

// An exchange of two names has no function of its own everywhere.
long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_renameat2 && step((const char*)a[1], 0, 0)) return -1;
  return REAL(long, syscall, long, ...)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

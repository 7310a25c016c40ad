/* Counts, records, fails or ends at the file-system calls of one process below one directory.
 *
 * Loaded with LD_PRELOAD, it does nothing until fault_arm() is called. From then on each call that concerns a path below
 * the directory is counted; at the wanted one the process is killed, stopped, loses its file system as by a loss of
 * power, or the call fails with an errno without being made. While recording, every call that succeeded is a line of a log, and what was written is kept in a second
 * file, so that the states after a loss of power can be built from them (tests/faults/power.py).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { COUNT = 1, FAIL, KILL, STOP, CUT };
#define SHUTDOWN _IOR('X', 125, unsigned) /* of ext4, xfs and f2fs: no byte goes to the disk from now on */
#define MOST_RULES 4
typedef struct {
    int action, code;
    long at, until, seen;
    char calls[1024], containing[PATH_MAX];
} Rule;
static struct {
    int on, log, data, rules;
    char below[PATH_MAX];
    Rule rule[MOST_RULES];
} armed = {.log = -1, .data = -1};
static pthread_mutex_t one_at_a_time = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(name, type) \
    static type real; \
    if (!real) real = (type)dlsym(RTLD_NEXT, name)

typedef ssize_t (*pwrite_t)(int, const void *, size_t, off_t);
typedef ssize_t (*write_t)(int, const void *, size_t);

/* log, data: files for a recording, or "". The rules of before are gone. */
void fault_begin(const char *below, const char *log, const char *data) {
    armed.on = armed.rules = 0;
    snprintf(armed.below, sizeof armed.below, "%s", below);
    armed.log = log[0] ? open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    armed.data = data[0] ? open(data, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    armed.on = 1;
}

/* action: see above. code: the errno of FAIL. at, until: the first and last call, from 1, that are hit. calls: names of
 * calls between commas, "" for all but stat. containing: part of the path. */
void fault_rule(int action, int code, long at, long until, const char *calls, const char *containing) {
    if (armed.rules == MOST_RULES) abort();
    Rule *rule = &armed.rule[armed.rules];
    *rule = (Rule){.action = action, .code = code, .at = at, .until = until};
    snprintf(rule->calls, sizeof rule->calls, calls[0] ? ",%s," : "", calls);
    snprintf(rule->containing, sizeof rule->containing, "%s", containing);
    armed.rules++;
}

long fault_seen(int rule) { return armed.rule[rule].seen; }

void fault_end(void) { armed.on = 0; }

static const char *absolute(int dirfd, const char *path, char *out) {
    if (path[0] == '/') return path;
    char link[64], base[PATH_MAX];
    if (dirfd == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return "";
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return "";
        base[length] = 0;
    }
    size_t used = strlen(base), wanted = strlen(path);
    if (used + wanted + 2 > PATH_MAX) return "";
    memcpy(out, base, used);
    out[used] = '/', memcpy(out + used + 1, path, wanted + 1);
    return out;
}

static const char *path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
    return out;
}

static int hit(Rule *rule, const char *call, const char *path) {
    char wanted[80];
    snprintf(wanted, sizeof wanted, ",%s,", call);
    int meant = rule->calls[0] ? strstr(rule->calls, wanted) != NULL : strcmp(call, "stat") != 0;
    if (!meant || !strstr(path, rule->containing)) return 0;
    long now = __atomic_add_fetch(&rule->seen, 1, __ATOMIC_SEQ_CST);
    return now >= rule->at && now <= rule->until;
}

/* Before a call: 0, or the errno with which it is to fail. */
static int before(const char *call, const char *path) {
    size_t length = strlen(armed.below);
    if (!armed.on || strncmp(path, armed.below, length) || (path[length] && path[length] != '/')) return 0;
    for (int i = 0; i < armed.rules; i++) {
        if (!hit(&armed.rule[i], call, path)) continue;
        if (armed.rule[i].action == KILL) kill(getpid(), SIGKILL);
        if (armed.rule[i].action == STOP) kill(getpid(), SIGSTOP);
        if (armed.rule[i].action == CUT) {
            armed.on = 0;
            unsigned without_flushing = 2;
            if (ioctl(open(armed.below, O_RDONLY), SHUTDOWN, &without_flushing)) abort();
            kill(getpid(), SIGKILL);
        }
        if (armed.rule[i].action == FAIL) return armed.rule[i].code;
    }
    return 0;
}

static int recorded(const char *path) {
    size_t length = strlen(armed.below);
    return armed.on && armed.log >= 0 && !strncmp(path, armed.below, length);
}

static void record(const char *call, const char *one, const char *other, long long a, long long b) {
    int saved = errno;
    char line[3 * PATH_MAX];
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%lld\t%lld\n", call, one, other, a, b);
    REAL("write", write_t);
    if (real(armed.log, line, length) != length) abort();
    errno = saved;
}

static void record_bytes(const char *path, const void *bytes, size_t count, off_t offset) {
    int saved = errno;
    REAL("write", write_t);
    if (real(armed.data, bytes, count) != (ssize_t)count) abort();
    record("write", path, "", offset, count);
    errno = saved;
}

#define GUARD(call, path, failed) \
    do { \
        int code = before(call, path); \
        if (code) { errno = code; return failed; } \
    } while (0)
#define ALONE pthread_mutex_lock(&one_at_a_time)
#define TOGETHER pthread_mutex_unlock(&one_at_a_time)

static int opened(const char *name, int dirfd, const char *path, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *full = absolute(dirfd, path, buffer);
    if (armed.on) {
        GUARD(flags & O_CREAT ? "create" : "open", full, -1);
    }
    typedef int (*openat_t)(int, const char *, int, ...);
    REAL("openat64", openat_t);
    (void)name;
    if (!recorded(full)) return real(dirfd, path, flags, mode);
    ALONE;
    struct stat there;
    int is_new = (flags & O_CREAT) && fstatat(dirfd, path, &there, 0) != 0;
    int fd = real(dirfd, path, flags, mode);
    if (fd >= 0 && is_new) record("create", full, "", 0, 0);
    if (fd >= 0 && !is_new && (flags & O_TRUNC)) record("truncate", full, "", 0, 0);
    TOGETHER;
    return fd;
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }
int open(const char *path, int flags, ...) { MODE return opened("open", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened("open", AT_FDCWD, path, flags, mode); }
int openat(int dirfd, const char *path, int flags, ...) { MODE return opened("open", dirfd, path, flags, mode); }
int openat64(int dirfd, const char *path, int flags, ...) { MODE return opened("open", dirfd, path, flags, mode); }

static ssize_t wrote(int fd, const void *bytes, size_t count, off_t offset, int positioned) {
    REAL("pwrite64", pwrite_t);
    static write_t plain;
    if (!plain) plain = (write_t)dlsym(RTLD_NEXT, "write");
    if (!armed.on) return positioned ? real(fd, bytes, count, offset) : plain(fd, bytes, count);
    char buffer[PATH_MAX];
    const char *path = path_of(fd, buffer);
    GUARD("write", path, -1);
    if (!recorded(path)) return positioned ? real(fd, bytes, count, offset) : plain(fd, bytes, count);
    ALONE;
    struct stat there;
    if (!positioned) {
        offset = lseek(fd, 0, SEEK_CUR);
        if ((fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &there)) offset = there.st_size;
    }
    ssize_t done = positioned ? real(fd, bytes, count, offset) : plain(fd, bytes, count);
    if (done > 0) record_bytes(path, bytes, done, offset);
    TOGETHER;
    return done;
}
ssize_t write(int fd, const void *bytes, size_t count) { return wrote(fd, bytes, count, 0, 0); }
ssize_t pwrite(int fd, const void *bytes, size_t count, off_t offset) { return wrote(fd, bytes, count, offset, 1); }
ssize_t pwrite64(int fd, const void *bytes, size_t count, off_t offset) { return wrote(fd, bytes, count, offset, 1); }

#define ON_FD(call, name, result, parameters, arguments, a, b) \
    result name parameters { \
        typedef result(*real_t) parameters; \
        REAL(#name, real_t); \
        if (!armed.on) return real arguments; \
        char buffer[PATH_MAX]; \
        const char *path = path_of(fd, buffer); \
        GUARD(call, path, -1); \
        if (!recorded(path)) return real arguments; \
        ALONE; \
        result done = real arguments; \
        if (done == 0) record(call, path, "", a, b); \
        TOGETHER; \
        return done; \
    }
ON_FD("sync", fsync, int, (int fd), (fd), 0, 0)
ON_FD("sync", fdatasync, int, (int fd), (fd), 0, 0)
ON_FD("truncate", ftruncate, int, (int fd, off_t size), (fd, size), size, 0)
ON_FD("truncate", ftruncate64, int, (int fd, off64_t size), (fd, size), size, 0)
ON_FD("allocate", fallocate, int, (int fd, int mode, off_t from, off_t count), (fd, mode, from, count), from, count)
ON_FD("allocate", fallocate64, int, (int fd, int mode, off64_t from, off64_t count), (fd, mode, from, count), from, count)

#define ON_PATH(call, name, parameters, arguments, dirfd, path) \
    int name parameters { \
        typedef int(*real_t) parameters; \
        REAL(#name, real_t); \
        if (!armed.on) return real arguments; \
        char buffer[PATH_MAX]; \
        const char *full = absolute(dirfd, path, buffer); \
        GUARD(call, full, -1); \
        if (!recorded(full)) return real arguments; \
        ALONE; \
        int done = real arguments; \
        if (done == 0) record(call, full, "", 0, 0); \
        TOGETHER; \
        return done; \
    }
ON_PATH("mkdir", mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
ON_PATH("mkdir", mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), at, path)
ON_PATH("remove", rmdir, (const char *path), (path), AT_FDCWD, path)
ON_PATH("remove", unlink, (const char *path), (path), AT_FDCWD, path)
ON_PATH("remove", unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path)

#define ON_PATHS(call, name, parameters, arguments, dir1, path1, dir2, path2, flags) \
    int name parameters { \
        typedef int(*real_t) parameters; \
        REAL(#name, real_t); \
        if (!armed.on) return real arguments; \
        char one[PATH_MAX], other[PATH_MAX]; \
        const char *from = absolute(dir1, path1, one), *to = absolute(dir2, path2, other); \
        GUARD(flags == 2 && !strcmp(call, "rename") ? "exchange" : call, to, -1); \
        if (!recorded(to)) return real arguments; \
        ALONE; \
        int done = real arguments; \
        if (done == 0) record(call, from, to, flags, 0); \
        TOGETHER; \
        return done; \
    }
ON_PATHS("rename", rename, (const char *from_, const char *to_), (from_, to_), AT_FDCWD, from_, AT_FDCWD, to_, 0)
ON_PATHS("rename", renameat, (int d1, const char *from_, int d2, const char *to_), (d1, from_, d2, to_), d1, from_, d2, to_, 0)
ON_PATHS("rename", renameat2, (int d1, const char *from_, int d2, const char *to_, unsigned flags),
         (d1, from_, d2, to_, flags), d1, from_, d2, to_, flags)
ON_PATHS("link", link, (const char *from_, const char *to_), (from_, to_), AT_FDCWD, from_, AT_FDCWD, to_, 0)
ON_PATHS("link", linkat, (int d1, const char *from_, int d2, const char *to_, int flags), (d1, from_, d2, to_, flags),
         d1, from_, d2, to_, 0)

int symlinkat(const char *target, int dirfd, const char *path) {
    typedef int (*real_t)(const char *, int, const char *);
    REAL("symlinkat", real_t);
    if (!armed.on) return real(target, dirfd, path);
    char buffer[PATH_MAX];
    const char *full = absolute(dirfd, path, buffer);
    GUARD("symlink", full, -1);
    if (!recorded(full)) return real(target, dirfd, path);
    ALONE;
    int done = real(target, dirfd, path);
    if (done == 0) record("symlink", target, full, 0, 0);
    TOGETHER;
    return done;
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

DIR *opendir(const char *path) {
    typedef DIR *(*real_t)(const char *);
    REAL("opendir", real_t);
    if (armed.on) {
        char buffer[PATH_MAX];
        GUARD("list", absolute(AT_FDCWD, path, buffer), NULL);
    }
    return real(path);
}
DIR *fdopendir(int fd) {
    typedef DIR *(*real_t)(int);
    REAL("fdopendir", real_t);
    if (armed.on) {
        char buffer[PATH_MAX];
        GUARD("list", path_of(fd, buffer), NULL);
    }
    return real(fd);
}

#define READS(name, parameters, arguments) \
    ssize_t name parameters { \
        typedef ssize_t(*real_t) parameters; \
        REAL(#name, real_t); \
        if (armed.on) { \
            char buffer[PATH_MAX]; \
            GUARD("read", path_of(fd, buffer), -1); \
        } \
        return real arguments; \
    }
struct iovec;
READS(read, (int fd, void *bytes, size_t count), (fd, bytes, count))
READS(pread, (int fd, void *bytes, size_t count, off_t offset), (fd, bytes, count, offset))
READS(pread64, (int fd, void *bytes, size_t count, off64_t offset), (fd, bytes, count, offset))
READS(preadv, (int fd, const struct iovec *parts, int count, off_t offset), (fd, parts, count, offset))
READS(preadv64, (int fd, const struct iovec *parts, int count, off64_t offset), (fd, parts, count, offset))

/* Looked at only by rules that name it. */
#define STATS(name, parameters, arguments, dirfd, path) \
    int name parameters { \
        typedef int(*real_t) parameters; \
        REAL(#name, real_t); \
        if (armed.on) { \
            char buffer[PATH_MAX]; \
            GUARD("stat", absolute(dirfd, path, buffer), -1); \
        } \
        return real arguments; \
    }
STATS(stat64, (const char *path, struct stat64 *out), (path, out), AT_FDCWD, path)
STATS(lstat64, (const char *path, struct stat64 *out), (path, out), AT_FDCWD, path)
STATS(fstatat64, (int at, const char *path, struct stat64 *out, int flags), (at, path, out, flags), at, path)

/* Preloaded into a process, it makes its disk fail: see faulty_disk.py.
 *
 * KPROXY_DISK names a directory, KPROXY_DISK_FAULT a file. While the file is there it holds one word for each fault:
 * - an operation (write, sync, read), "=", and an errno, or "hang": the operation fails, or waits until the word is
 *   gone, on files whose path begins with KPROXY_DISK.
 * - "sector=", a position, ":" and a path: reads of that file fail with EIO from the position to the end of its sector,
 *   and a mapping of the file ends the process with SIGBUS where it is touched, as the kernel does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SECTOR 4096
#define NOWHERE -1

/* What the word about this fault says, in `text`; NULL if there is none. System calls, because `read` is one of ours. */
static char *told(const char *fault, char *text, size_t size) {
    const char *path = getenv("KPROXY_DISK_FAULT");
    int fd = path == NULL ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    long length = syscall(SYS_read, fd, text, size - 1);
    syscall(SYS_close, fd);
    text[length > 0 ? length : 0] = 0;
    char *rest = text;
    for (char *word; (word = strsep(&rest, " \n")) != NULL;) {
        char *value = strchr(word, '=');
        if (value != NULL && strncmp(word, fault, (size_t)(value - word)) == 0)
            return value + 1;
    }
    return NULL;
}

/* The errno of the operation's fault; 0: none; -1: it hangs. */
static int fault_of(const char *operation) {
    char text[PATH_MAX + 256];
    const char *value = told(operation, text, sizeof text);
    return value == NULL ? 0 : strcmp(value, "hang") == 0 ? -1 : atoi(value);
}

/* Whether the path of `fd` is `path`, or begins with it. */
static int is_at(int fd, const char *path, int or_below) {
    char link[64], found[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, found, sizeof found - 1);
    if (path == NULL || length < 0)
        return 0;
    found[length] = 0;
    return or_below ? strncmp(found, path, strlen(path)) == 0 : strcmp(found, path) == 0;
}

/* 0, or -1 with errno set. */
static int meet(const char *operation, int fd) {
    int before = errno, fault = fault_of(operation);
    if (fault != 0 && is_at(fd, getenv("KPROXY_DISK"), 1)) {
        while (fault < 0) {
            usleep(20000);
            fault = fault_of(operation);
        }
        if (fault > 0) {
            errno = fault;
            return -1;
        }
    }
    errno = before;
    return 0;
}

/* The first unreadable position of the file, or NOWHERE. */
static off_t bad_sector(int fd) {
    char text[PATH_MAX + 256], *path = NULL, *value = told("sector", text, sizeof text);
    off_t position = value == NULL ? NOWHERE : strtoll(value, &path, 10);
    return position != NOWHERE && is_at(fd, path + 1, 0) ? position : NOWHERE;
}

/* How much of a read of `count` bytes at `at` succeeds; -1 for an error. */
static ssize_t readable(int fd, size_t count, off_t at) {
    if (meet("read", fd))
        return -1;
    int before = errno;
    off_t bad = at < 0 ? NOWHERE : bad_sector(fd);
    errno = before;
    if (bad == NOWHERE || at >= bad + SECTOR || at + (off_t)count <= bad)
        return (ssize_t)count;
    if (at < bad)
        return bad - at;
    errno = EIO;
    return -1;
}

ssize_t write(int fd, const void *bytes, size_t count) {
    return meet("write", fd) ? -1 : NEXT(write)(fd, bytes, count);
}

ssize_t read(int fd, void *bytes, size_t count) {
    int before = errno;
    off_t at = lseek(fd, 0, SEEK_CUR);
    errno = before;
    ssize_t much = readable(fd, count, at);
    return much < 0 ? much : NEXT(read)(fd, bytes, (size_t)much);
}

ssize_t pread64(int fd, void *bytes, size_t count, off64_t at) {
    ssize_t much = readable(fd, count, at);
    return much < 0 ? much : NEXT(pread64)(fd, bytes, (size_t)much, at);
}

ssize_t pread(int fd, void *bytes, size_t count, off_t at) { return pread64(fd, bytes, count, at); }

int fsync(int fd) { return meet("sync", fd) ? -1 : NEXT(fsync)(fd); }

int fdatasync(int fd) { return meet("sync", fd) ? -1 : NEXT(fdatasync)(fd); }

void *mmap64(void *where, size_t length, int protection, int flags, int fd, off64_t at) {
    if (!(flags & MAP_ANONYMOUS) && bad_sector(fd) != NOWHERE)
        fd = memfd_create("nothing", 0);
    return (void *)syscall(SYS_mmap, where, length, protection, flags, fd, at);
}

void *mmap(void *where, size_t length, int protection, int flags, int fd, off_t at) {
    return mmap64(where, length, protection, flags, fd, at);
}

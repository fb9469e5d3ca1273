/* Preloaded into a broker, it makes its disk fail: see faulty_disk.py.
 *
 * KPROXY_DISK names a directory, KPROXY_DISK_FAULT a file. While the file is there it holds one word for each fault:
 * an operation (write, sync, read), "=", and an errno, or "hang". The operation then fails, or waits until the word is
 * gone, on files whose path begins with KPROXY_DISK. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* The errno of the operation's fault; 0: none; -1: it hangs. System calls, because `read` is one of ours. */
static int fault_of(const char *operation) {
    const char *path = getenv("KPROXY_DISK_FAULT");
    char text[256];
    int fd = path == NULL ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    long length = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    text[length > 0 ? length : 0] = 0;
    char *rest = text;
    for (char *word; (word = strsep(&rest, " \n")) != NULL;) {
        char *value = strchr(word, '=');
        if (value == NULL || strncmp(word, operation, (size_t)(value - word)) != 0)
            continue;
        return strcmp(value + 1, "hang") == 0 ? -1 : atoi(value + 1);
    }
    return 0;
}

static int is_on_disk(int fd) {
    const char *disk = getenv("KPROXY_DISK");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (disk == NULL || length < 0)
        return 0;
    path[length] = 0;
    return strncmp(path, disk, strlen(disk)) == 0;
}

/* 0, or -1 with errno set. */
static int meet(const char *operation, int fd) {
    int before = errno, fault = fault_of(operation);
    if (fault != 0 && is_on_disk(fd)) {
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

ssize_t write(int fd, const void *bytes, size_t count) {
    return meet("write", fd) ? -1 : NEXT(write)(fd, bytes, count);
}

ssize_t read(int fd, void *bytes, size_t count) { return meet("read", fd) ? -1 : NEXT(read)(fd, bytes, count); }

ssize_t pread(int fd, void *bytes, size_t count, off_t at) {
    return meet("read", fd) ? -1 : NEXT(pread)(fd, bytes, count, at);
}

ssize_t pread64(int fd, void *bytes, size_t count, off64_t at) {
    return meet("read", fd) ? -1 : NEXT(pread64)(fd, bytes, count, at);
}

int fsync(int fd) { return meet("sync", fd) ? -1 : NEXT(fsync)(fd); }

int fdatasync(int fd) { return meet("sync", fd) ? -1 : NEXT(fdatasync)(fd); }

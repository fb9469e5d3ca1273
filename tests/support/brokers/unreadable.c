/* A disk with one bad sector, for a process that preloads this.

   The file that the environment's UNREADABLE names holds "PATH POSITION": reads of PATH fail with EIO from POSITION to
   the end of its sector, and a mapping of PATH ends the process with SIGBUS where it is touched, as the kernel does.
   Without that file nothing fails. */

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
#include <unistd.h>

#define SECTOR 4096
#define NOWHERE -1

/* The first unreadable position of the file behind `fd`, or NOWHERE. */
static off_t bad_sector(int fd) {
    char told[PATH_MAX + 32] = "", link[32], path[PATH_MAX] = "";
    const char *name = getenv("UNREADABLE");
    int control = name == NULL ? -1 : syscall(SYS_openat, AT_FDCWD, name, O_RDONLY);
    if (control < 0) return NOWHERE;
    ssize_t length = syscall(SYS_read, control, told, sizeof told - 1);
    syscall(SYS_close, control);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    char *space = length > 0 ? strrchr(told, ' ') : NULL;
    if (space == NULL || readlink(link, path, sizeof path - 1) < 0) return NOWHERE;
    *space = '\0';
    return strcmp(told, path) == 0 ? atoll(space + 1) : NOWHERE;
}

/* How much of a read of `length` at `position` succeeds; -1 for an error. */
static ssize_t readable(int fd, size_t length, off_t position) {
    off_t bad = bad_sector(fd);
    if (bad == NOWHERE || position >= bad + SECTOR || position + (off_t)length <= bad) return length;
    if (position < bad) return bad - position;
    errno = EIO;
    return -1;
}

ssize_t pread64(int fd, void *into, size_t length, off_t position) {
    ssize_t much = readable(fd, length, position);
    return much < 0 ? much : syscall(SYS_pread64, fd, into, much, position);
}

ssize_t pread(int fd, void *into, size_t length, off_t position) { return pread64(fd, into, length, position); }

ssize_t read(int fd, void *into, size_t length) {
    off_t position = lseek(fd, 0, SEEK_CUR);
    ssize_t much = position < 0 ? (ssize_t)length : readable(fd, length, position);
    return much < 0 ? much : syscall(SYS_read, fd, into, much);
}

void *mmap64(void *where, size_t length, int protection, int flags, int fd, off_t position) {
    if (!(flags & MAP_ANONYMOUS) && bad_sector(fd) != NOWHERE) fd = memfd_create("nothing", 0);
    return (void *)syscall(SYS_mmap, where, length, protection, flags, fd, position);
}

void *mmap(void *where, size_t length, int protection, int flags, int fd, off_t position) {
    return mmap64(where, length, protection, flags, fd, position);
}

/* For LD_PRELOAD: a disk whose n-th write or synchronization of the SQLite file or its log fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static const char FILE_NAME[] = "gateway.sqlite";
static const char LOG_NAME[] = "gateway.sqlite-wal";

static long calls, first_failing, last_failing, unsynced;
static int failing_with;

/* Let the calls `first` to `last` from now on fail; 0 and 0 repair the disk. */
void fail_calls(long first, long last, int error)
{
    first_failing = first;
    last_failing = last;
    failing_with = error;
    __atomic_store_n(&calls, 0, __ATOMIC_SEQ_CST);
}

long count_calls(void)
{
    return __atomic_load_n(&calls, __ATOMIC_SEQ_CST);
}

/* Return the number of writes to the log since it was last synchronized. */
long count_unsynced(void)
{
    return __atomic_load_n(&unsynced, __ATOMIC_SEQ_CST);
}

static int has_name(int file, const char *name, int is_prefix)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    const char *last = strrchr(path, '/');
    return last && (is_prefix ? !strncmp(last + 1, name, strlen(name)) : !strcmp(last + 1, name));
}

static int fails(int file)
{
    if (!has_name(file, FILE_NAME, 1))
        return 0;
    long call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (call < first_failing || call > last_failing)
        return 0;
    errno = failing_with;
    return 1;
}

static void mark(int file, int is_write)
{
    if (!has_name(file, LOG_NAME, 0))
        return;
    if (is_write)
        __atomic_add_fetch(&unsynced, 1, __ATOMIC_SEQ_CST);
    else
        __atomic_store_n(&unsynced, 0, __ATOMIC_SEQ_CST);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* A write that fails has written half of its bytes. */
ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t offset)
{
    int failing = fails(file);
    ssize_t written = REAL(pwrite64)(file, bytes, failing ? count / 2 : count, offset);
    mark(file, 1);
    if (failing) {
        errno = failing_with;
        return -1;
    }
    return written;
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t offset)
{
    return pwrite64(file, bytes, count, offset);
}

ssize_t write(int file, const void *bytes, size_t count)
{
    return fails(file) ? -1 : REAL(write)(file, bytes, count);
}

int ftruncate64(int file, off64_t length)
{
    return fails(file) ? -1 : REAL(ftruncate64)(file, length);
}

int ftruncate(int file, off_t length)
{
    return ftruncate64(file, length);
}

int fdatasync(int file)
{
    if (fails(file))
        return -1;
    int code = REAL(fdatasync)(file);
    mark(file, 0);
    return code;
}

int fsync(int file)
{
    if (fails(file))
        return -1;
    int code = REAL(fsync)(file);
    mark(file, 0);
    return code;
}

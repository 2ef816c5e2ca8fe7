// A libnccl.so.2 in place of NCCL: communicators, and the windows of XLA's barrier kernel. It knows no collectives.
//
// Through a window of NCCL's device API, XLA's barrier kernel writes to all ranks. Here the windows lie in one
// allocation of 4 GiB for each posed GPU, apart from the memory that is registered. So they are good for signals, which
// start at 0, and not for data.
//
// CMM_POSED_GPUS is the number of GPUs, CMM_REAL_LIBCUDA the path of the driver. All GPUs are those of one process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNUSED __attribute__((unused))
#define REAL(name) ((__typeof__(&name))real(#name))

enum { SUCCESS = 0, CUDA_ERROR = 1, INTERNAL_ERROR = 3 };  // ncclResult_t
enum { VERSION = 22900, RANK_SHIFT = 32, WINDOW_SHIFT = 22, WINDOWS = 16, GROUPS = 64 };

// The driver's functions that are used.
int cuMemAlloc_v2(uint64_t *at, size_t bytes);
int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t bytes);
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes);
int cuCtxSynchronize(void);

typedef struct {
    char bytes[128];
} UniqueId;

// Communicators of one unique id are a group: each has its own windows, of the same numbers on all ranks.
typedef struct {
    int group, ranks, rank, windows;
} Comm;

// How ncclWindow_vidmem begins in NCCL's nccl_device/impl/core__types.h. Kernels compute a rank's address as
// lsaFlatBase + rank * stride4G * 4 GiB + offset.
typedef struct {
    void *winHost;
    uint64_t lsaFlatBase;
    int lsaRank, worldRank;
    uint32_t stride4G, mcOffset4K, ginOffset4K, winFlags;
} Window;

static int fail(int result, const char *format, ...) {
    va_list values;
    va_start(values, format);
    fputs("one_gpu_as_several: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    return result;
}

static void *real(const char *name) {
    static void *driver;
    const char *path = getenv("CMM_REAL_LIBCUDA");
    if (path && !driver) driver = dlopen(path, RTLD_NOW);
    void *function = driver ? dlsym(driver, name) : NULL;
    if (!function) {
        fail(0, "%s is not found in the driver, CMM_REAL_LIBCUDA=%s", name, path ? path : "");
        abort();
    }
    return function;
}

static int gpus(void) {
    const char *number = getenv("CMM_POSED_GPUS");
    return number ? atoi(number) : 0;
}

// Returns where the memory of rank 0 begins, or 0. That of the next rank begins 4 GiB behind it.
static uint64_t memory(void) {
    static uint64_t at;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!at) {
        uint64_t made = 0;
        size_t bytes = (size_t)gpus() << RANK_SHIFT;
        int error = REAL(cuMemAlloc_v2)(&made, bytes);
        if (!error) error = REAL(cuMemsetD8_v2)(made, 0, bytes);
        if (!error) error = REAL(cuCtxSynchronize)();
        if (error) fail(0, "no %zu bytes of GPU memory for the barrier, error %d of CUDA", bytes, error);
        else at = made;
    }
    pthread_mutex_unlock(&lock);
    return at;
}

int ncclCommWindowRegister(Comm *comm, UNUSED void *buffer, size_t bytes, uint64_t *window, UNUSED int flags) {
    if (bytes > 1 << WINDOW_SHIFT) return fail(INTERNAL_ERROR, "a window of %zu bytes is larger than 4 MiB", bytes);
    if (comm->windows == WINDOWS) return fail(INTERNAL_ERROR, "a communicator has more than %d windows", WINDOWS);
    uint64_t first = memory();
    if (!first) return CUDA_ERROR;
    uint64_t number = (uint64_t)comm->group * WINDOWS + comm->windows;
    Window made = {
        .lsaFlatBase = first + (number << WINDOW_SHIFT), .lsaRank = comm->rank, .worldRank = comm->rank, .stride4G = 1};
    // Room for fields that later versions add at the end: they are 0.
    char whole[4096] = {0};
    memcpy(whole, &made, sizeof made);
    int error = REAL(cuMemAlloc_v2)(window, sizeof whole);
    if (!error) error = REAL(cuMemcpyHtoD_v2)(*window, whole, sizeof whole);
    if (error) return fail(CUDA_ERROR, "no window of rank %d, error %d of CUDA", comm->rank, error);
    ++comm->windows;
    return SUCCESS;
}

int ncclMemAlloc(uint64_t *at, size_t bytes) { return REAL(cuMemAlloc_v2)(at, bytes) ? CUDA_ERROR : SUCCESS; }

int ncclGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

int ncclGetUniqueId(UniqueId *id) {
    static int groups;
    int group = __atomic_fetch_add(&groups, 1, __ATOMIC_RELAXED);
    memset(id, 0, sizeof *id);
    memcpy(id, &group, sizeof group);
    return SUCCESS;
}

static int init(Comm **comm, int ranks, const UniqueId *id, int rank) {
    int group;
    memcpy(&group, id, sizeof group);
    if (group < 0 || group >= GROUPS) return fail(INTERNAL_ERROR, "there are more than %d groups of GPUs", GROUPS);
    if (ranks > gpus()) return fail(INTERNAL_ERROR, "%d ranks are more than the %d posed GPUs", ranks, gpus());
    *comm = calloc(1, sizeof **comm);
    if (!*comm) return fail(INTERNAL_ERROR, "no memory");
    **comm = (Comm){.group = group, .ranks = ranks, .rank = rank};
    return SUCCESS;
}

int ncclCommInitRank(Comm **comm, int ranks, UniqueId id, int rank) { return init(comm, ranks, &id, rank); }

int ncclCommInitRankConfig(Comm **comm, int ranks, UniqueId id, int rank, UNUSED void *config) {
    return init(comm, ranks, &id, rank);
}

int ncclCommInitRankScalable(Comm **comm, int ranks, int rank, UNUSED int count, UniqueId *ids, UNUSED void *config) {
    return init(comm, ranks, ids, rank);
}

int ncclCommGetAsyncError(UNUSED Comm *comm, int *error) {
    *error = SUCCESS;
    return SUCCESS;
}

int ncclCommCount(Comm *comm, int *ranks) {
    *ranks = comm->ranks;
    return SUCCESS;
}

int ncclCommUserRank(Comm *comm, int *rank) {
    *rank = comm->rank;
    return SUCCESS;
}

int ncclCommCuDevice(UNUSED Comm *comm, int *device) {
    *device = 0;
    return SUCCESS;
}

const char *ncclGetErrorString(UNUSED int result) { return "an error of one_gpu_as_several, see stderr"; }

const char *ncclGetLastError(UNUSED Comm *comm) { return "see stderr"; }

// Nothing to do. Memory stays allocated until the process ends: to free it, CUDA waits for the whole GPU, and there a
// kernel of one rank may wait for that of another, which the caller has yet to launch.
#define NOTHING(name) \
    int name(void) { return SUCCESS; }
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
NOTHING(ncclCommFinalize)
NOTHING(ncclCommDestroy)
NOTHING(ncclCommAbort)
NOTHING(ncclCommRegister)
NOTHING(ncclCommDeregister)
NOTHING(ncclCommWindowDeregister)
NOTHING(ncclMemFree)

#define MISSING(name) \
    int name(void) { return fail(INTERNAL_ERROR, "%s is not there", #name); }
MISSING(ncclAllGather)
MISSING(ncclAllReduce)
MISSING(ncclAlltoAll)
MISSING(ncclBcast)
MISSING(ncclBroadcast)
MISSING(ncclReduce)
MISSING(ncclReduceScatter)
MISSING(ncclSend)
MISSING(ncclRecv)
MISSING(ncclPutSignal)
MISSING(ncclSignal)
MISSING(ncclWaitSignal)
MISSING(ncclDevCommCreate)
MISSING(ncclGetPeerDevicePointer)
MISSING(ncclGetLsaDevicePointer)
MISSING(ncclGetLsaMultimemDevicePointer)

// Of those who call it, none knows how many others go with it.
int ncclCommSplit(void) {
    return fail(INTERNAL_ERROR, "ncclCommSplit is not there; XLA_FLAGS=--xla_gpu_enable_nccl_comm_splitting=false");
}

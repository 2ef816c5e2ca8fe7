// A libcuda.so.1 in front of the driver: it reports several copies of the one GPU of this machine.
//
// Each copy has a context handle of its own, for XLA keeps devices apart by these. All of them stand for the one
// primary context: they are translated where a function takes or returns one, and device numbers become 0.
//
// What is not defined here is found in the driver, because this library depends on it (see run.py): a caller's dlsym
// searches a library and what it depends on. That includes cuGetProcAddress, so who gets functions through it, as
// CUDA's runtime does, sees the one GPU and its primary context.
//
// CMM_POSED_GPUS is the number of copies, CMM_REAL_LIBCUDA the path of the driver.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define UNUSED __attribute__((unused))
// The driver's function of this name. Only its type is taken from the one declared here.
#define REAL(name) ((__typeof__(&name))real(#name))

enum { SUCCESS = 0, INVALID_DEVICE = 101 };                  // CUresult
enum { MULTIPROCESSOR_COUNT = 16, MEMORY_OF_DEVICE = 1 };  // CUdevice_attribute, CUmemLocationType
enum { MOST_COPIES = 64, DEEPEST = 16 };

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;

// As in cuda.h, which is not everywhere: pip installs no headers of the driver.
typedef struct {
    int type, id;
} Location;

typedef struct {
    Location location;
    int flags;
} AccessDesc;

typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    unsigned char flags[8];
} AllocationProp;

typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    size_t most_bytes;
    unsigned char rest[56];
} PoolProps;

static _Noreturn void refuse(const char *why) {
    fprintf(stderr, "one_gpu_as_several: %s\n", why);
    abort();
}

static void *real(const char *name) {
    static void *driver;
    const char *path = getenv("CMM_REAL_LIBCUDA");
    if (!path) refuse("CMM_REAL_LIBCUDA is not set to the path of the driver");
    if (!driver) driver = dlopen(path, RTLD_NOW);
    void *function = driver ? dlsym(driver, name) : NULL;
    if (!function) refuse(dlerror());
    return function;
}

static int copies(void) {
    const char *number = getenv("CMM_POSED_GPUS");
    int n = number ? atoi(number) : 0;
    if (n < 1 || n > MOST_COPIES) refuse("CMM_POSED_GPUS is not a number of GPUs from 1 to 64");
    return n;
}

// The first copy's handle is the primary context itself, that of copy n is the address of the n-th of these.
static char handles[MOST_COPIES];
static CUcontext primary;

static int copy_of(CUcontext context) {
    uintptr_t n = (uintptr_t)context - (uintptr_t)handles;
    return n < MOST_COPIES ? (int)n : 0;
}

static CUcontext meant(CUcontext context) { return copy_of(context) ? primary : context; }

// Of each thread: the handles that were pushed, the current one last. The driver's own stack holds what they stand for.
static __thread CUcontext pushed[DEEPEST];
static __thread int top;

// The handle for what the driver says is current. If that is another context, somebody set it behind our back.
static CUcontext shown(CUcontext context) {
    return context && context == primary && copy_of(pushed[top]) ? pushed[top] : context;
}

// Devices

CUresult cuDeviceGetCount(int *count);

// Not the exported function: a call of that could end in the driver's, where that stands before this library.
static CUresult count_gpus(int *count) {
    CUresult result = REAL(cuDeviceGetCount)(count);
    if (result != SUCCESS) return result;
    if (*count > 1) refuse("there are several GPUs already; set CUDA_VISIBLE_DEVICES to one of them");
    if (*count == 1) *count = copies();
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count) { return count_gpus(count); }

// Counts as well, so that it refuses before anybody uses a device.
CUresult cuInit(unsigned flags) {
    int count;
    CUresult result = REAL(cuInit)(flags);
    return result == SUCCESS ? count_gpus(&count) : result;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= copies()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

// Kernels launch one CTA for each multiprocessor, and those of all copies must be resident together: they wait for each
// other. So each copy has its share.
CUresult cuDeviceGetAttribute(int *value, int attribute, UNUSED CUdevice device) {
    CUresult result = REAL(cuDeviceGetAttribute)(value, attribute, 0);
    if (result == SUCCESS && attribute == MULTIPROCESSOR_COUNT) *value /= copies();
    return result;
}

CUresult cuDeviceGetName(char *name, int length, UNUSED CUdevice device) {
    return REAL(cuDeviceGetName)(name, length, 0);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, UNUSED CUdevice device) { return REAL(cuDeviceTotalMem_v2)(bytes, 0); }

CUresult cuDeviceGetUuid(void *uuid, UNUSED CUdevice device) { return REAL(cuDeviceGetUuid)(uuid, 0); }

CUresult cuDeviceGetUuid_v2(void *uuid, UNUSED CUdevice device) { return REAL(cuDeviceGetUuid_v2)(uuid, 0); }

CUresult cuDeviceGetPCIBusId(char *id, int length, UNUSED CUdevice device) {
    return REAL(cuDeviceGetPCIBusId)(id, length, 0);
}

CUresult cuDeviceGetDefaultMemPool(void **pool, UNUSED CUdevice device) {
    return REAL(cuDeviceGetDefaultMemPool)(pool, 0);
}

CUresult cuDeviceGetMemPool(void **pool, UNUSED CUdevice device) { return REAL(cuDeviceGetMemPool)(pool, 0); }

// Contexts

CUresult cuDevicePrimaryCtxGetState(UNUSED CUdevice device, unsigned *flags, int *active) {
    return REAL(cuDevicePrimaryCtxGetState)(0, flags, active);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(UNUSED CUdevice device, unsigned flags) {
    return REAL(cuDevicePrimaryCtxSetFlags_v2)(0, flags);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (device < 0 || device >= copies()) return INVALID_DEVICE;
    CUresult result = REAL(cuDevicePrimaryCtxRetain)(context, 0);
    if (result != SUCCESS) return result;
    primary = *context;
    if (device) *context = &handles[device];
    return SUCCESS;
}

// It stays until the process ends: other copies may still use it.
CUresult cuDevicePrimaryCtxRelease_v2(UNUSED CUdevice device) { return SUCCESS; }

CUresult cuCtxSetCurrent(CUcontext context) {
    CUresult result = REAL(cuCtxSetCurrent)(meant(context));
    if (result == SUCCESS) pushed[top] = context;
    return result;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (top + 1 == DEEPEST) refuse("more contexts are pushed than it keeps");
    CUresult result = REAL(cuCtxPushCurrent_v2)(meant(context));
    if (result == SUCCESS) pushed[++top] = context;
    return result;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    CUcontext popped;
    CUresult result = REAL(cuCtxPopCurrent_v2)(&popped);
    if (result != SUCCESS) return result;
    if (context) *context = shown(popped);
    if (top) --top;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    CUresult result = REAL(cuCtxGetCurrent)(context);
    if (result == SUCCESS) *context = shown(*context);
    return result;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    CUcontext context;
    CUresult result = REAL(cuCtxGetCurrent)(&context);
    if (result == SUCCESS) result = REAL(cuCtxGetDevice)(device);
    if (result == SUCCESS && copy_of(shown(context))) *device = copy_of(shown(context));
    return result;
}

// Memory of others: all of it is on the one GPU

CUresult cuDeviceCanAccessPeer(int *can, UNUSED CUdevice device, UNUSED CUdevice peer) {
    *can = 1;
    return SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, UNUSED int attribute, UNUSED CUdevice device, UNUSED CUdevice peer) {
    *value = 1;
    return SUCCESS;
}

CUresult cuCtxEnablePeerAccess(UNUSED CUcontext peer, UNUSED unsigned flags) { return SUCCESS; }

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes) {
    return REAL(cuMemcpyPeer)(to, meant(to_context), from, meant(from_context), bytes);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
                           void *stream) {
    return REAL(cuMemcpyPeerAsync)(to, meant(to_context), from, meant(from_context), bytes, stream);
}

// Where memory lies

static Location on_the_gpu(Location location) {
    if (location.type == MEMORY_OF_DEVICE) location.id = 0;
    return location;
}

CUresult cuMemCreate(CUdeviceptr *handle, size_t bytes, const AllocationProp *prop, unsigned long long flags) {
    AllocationProp changed = *prop;
    changed.location = on_the_gpu(prop->location);
    return REAL(cuMemCreate)(handle, bytes, &changed, flags);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const AllocationProp *prop, int option) {
    AllocationProp changed = *prop;
    changed.location = on_the_gpu(prop->location);
    return REAL(cuMemGetAllocationGranularity)(bytes, &changed, option);
}

CUresult cuMemPoolCreate(void **pool, const PoolProps *props) {
    PoolProps changed = *props;
    changed.location = on_the_gpu(props->location);
    return REAL(cuMemPoolCreate)(pool, &changed);
}

// One call for each description: several of them may now name the same device.
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const AccessDesc *descs, size_t count) {
    CUresult result = SUCCESS;
    for (size_t i = 0; i < count && result == SUCCESS; ++i) {
        AccessDesc changed = {on_the_gpu(descs[i].location), descs[i].flags};
        result = REAL(cuMemSetAccess)(at, bytes, &changed, 1);
    }
    return result;
}

CUresult cuMemPoolSetAccess(void *pool, const AccessDesc *descs, size_t count) {
    CUresult result = SUCCESS;
    for (size_t i = 0; i < count && result == SUCCESS; ++i) {
        AccessDesc changed = {on_the_gpu(descs[i].location), descs[i].flags};
        result = REAL(cuMemPoolSetAccess)(pool, &changed, 1);
    }
    return result;
}

CUresult cuMemGetAccess(unsigned long long *flags, const Location *location, CUdeviceptr at) {
    Location changed = on_the_gpu(*location);
    return REAL(cuMemGetAccess)(flags, &changed, at);
}

// Nodes of graphs that name a context

CUresult cuGraphAddMemsetNode(void **node, void *graph, void *const *after, size_t count, const void *params,
                              CUcontext context) {
    return REAL(cuGraphAddMemsetNode)(node, graph, after, count, params, meant(context));
}

CUresult cuGraphAddMemcpyNode(void **node, void *graph, void *const *after, size_t count, const void *params,
                              CUcontext context) {
    return REAL(cuGraphAddMemcpyNode)(node, graph, after, count, params, meant(context));
}

CUresult cuGraphExecMemsetNodeSetParams(void *exec, void *node, const void *params, CUcontext context) {
    return REAL(cuGraphExecMemsetNodeSetParams)(exec, node, params, meant(context));
}

CUresult cuGraphExecMemcpyNodeSetParams(void *exec, void *node, const void *params, CUcontext context) {
    return REAL(cuGraphExecMemcpyNodeSetParams)(exec, node, params, meant(context));
}

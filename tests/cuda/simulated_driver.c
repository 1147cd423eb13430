/* A CUDA driver without a GPU: the calls that kvxfer makes, with the signatures of NVIDIA's cuda.h.
 *
 * Built as libcuda.so.1, it is what `cuda-bindings` loads on a machine without a driver. Device memory
 * is mapped without any permission at the address that programs see, so whoever touches it other than
 * through a copy dies at once. Streams are threads: what is enqueued happens later, and the copies of a
 * batch happen in reverse. The functions that begin with `sim_` are for tests.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANGES 1024
#define NUM_DEVICES 2
#define LEAST_PRIORITY 3

enum op_kind { COPY, RECORD, WAIT, STOP };

struct op {
    enum op_kind kind;
    char *to;
    const char *from;
    size_t num_bytes;
    struct CUevent_st *event;
    unsigned long turn, process;
    struct op *next;
};

struct CUevent_st {
    unsigned long recorded, passed, process;
    double passed_ms;
    int has_timing, captured;
};

struct CUstream_st {
    struct CUctx_st *context;
    unsigned long process;
    pthread_t thread;
    struct op *first, **last;
    int captured;
};

struct CUctx_st {
    int device, num_owners, lost;
    struct CUstream_st *default_stream;
};

struct range {
    uintptr_t address;
    size_t num_bytes;
    char *behind; /* where the bytes of device memory can be reached; NULL for registered host memory */
    int device; /* of host memory: HOST, or REGISTERED by the program that owns it */
};
enum { HOST = -1, REGISTERED = -2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUctx_st contexts[NUM_DEVICES] = {{.device = 0}, {.device = 1}};
static struct range ranges[MAX_RANGES];
static int num_ranges, num_busy; /* streams that copy at this moment */
static __thread struct CUctx_st *stack[16];
static __thread int depth;

static int version = 13000, numa_node = -1, paused, refuse_records, strange_result;
static size_t bytes_that_may_be_registered = SIZE_MAX, registered_bytes;
static unsigned delay_us;
static unsigned long num_batches, num_single, num_2d, num_pageable, num_live_events, num_live_streams;
static unsigned long num_opened; /* by calls that a capture on another thread does not allow */
static struct { CUstream stream; CUstreamCaptureMode mode; pthread_t thread; int invalidated; } capture;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static unsigned long process; /* what an earlier one opened is not among the live ones, nor missed when it is closed */

/* As in a new process: the device is there, and whatever was registered or left to be copied is forgotten. */
static void find_again(struct CUctx_st *context) {
    process++;
    if (capture.stream) capture.stream->captured = 0;
    capture.stream = NULL;
    context->lost = context->num_owners = 0;
    num_live_events = num_live_streams = registered_bytes = 0;
    for (int i = num_ranges; i--;)
        if (ranges[i].device == REGISTERED) ranges[i] = ranges[--num_ranges];
}

/* For tests. */
void sim_set(const char *name, long value) {
    pthread_mutex_lock(&lock);
    if (!strcmp(name, "version")) version = (int)value;
    else if (!strcmp(name, "numa_node")) numa_node = (int)value;
    else if (!strcmp(name, "bytes_that_may_be_registered")) bytes_that_may_be_registered = (size_t)value;
    else if (!strcmp(name, "delay_us")) delay_us = (unsigned)value;
    else if (!strcmp(name, "refuse_records")) refuse_records = (int)value;
    else if (!strcmp(name, "strange_result")) strange_result = (int)value;
    else if (!strcmp(name, "paused")) paused = (int)value;
    else if (!strcmp(name, "lost")) contexts[value].lost = 1;
    else if (!strcmp(name, "found")) find_again(&contexts[value]);
    else abort();
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

unsigned long sim_get(const char *name) {
    if (!strcmp(name, "num_batches")) return num_batches;
    if (!strcmp(name, "num_single")) return num_single;
    if (!strcmp(name, "num_2d")) return num_2d;
    if (!strcmp(name, "num_pageable")) return num_pageable;
    if (!strcmp(name, "num_live_events")) return num_live_events;
    if (!strcmp(name, "num_live_streams")) return num_live_streams;
    if (!strcmp(name, "num_opened")) return num_opened;
    if (!strcmp(name, "registered_bytes")) return registered_bytes;
    if (!strcmp(name, "num_contexts")) return (unsigned long)(contexts[0].num_owners + contexts[1].num_owners);
    abort();
}

static struct range *range_of(uintptr_t address, size_t num_bytes) {
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].address <= address && address + num_bytes <= ranges[i].address + ranges[i].num_bytes)
            return &ranges[i];
    return NULL;
}

/* Whether some of the bytes are registered, or of a device. */
static int is_known_in_part(uintptr_t address, size_t num_bytes) {
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].address < address + num_bytes && address < ranges[i].address + ranges[i].num_bytes) return 1;
    return 0;
}

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

static CUresult check(void) {
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    return current()->lost ? CUDA_ERROR_ECC_UNCORRECTABLE : CUDA_SUCCESS;
}

/* For calls that are not in the order of a stream: "If the local thread has an ongoing capture sequence that was not
 * initiated with RELAXED, or if any other thread has a concurrent capture sequence initiated with GLOBAL, this thread is
 * prohibited from potentially unsafe API calls", unless its mode says otherwise. The capture is invalid then.
 * https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html, cuThreadExchangeStreamCaptureMode;
 * which calls those are: https://github.com/pytorch/pytorch/pull/148594 for cuEventQuery. Here all of them are. */
static CUresult check_capture(void) {
    CUresult result = check();
    if (result || !capture.stream || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return result;
    int is_own = pthread_equal(capture.thread, pthread_self());
    if (is_own ? capture.mode == CU_STREAM_CAPTURE_MODE_RELAXED
               : thread_mode != CU_STREAM_CAPTURE_MODE_GLOBAL || capture.mode != CU_STREAM_CAPTURE_MODE_GLOBAL)
        return CUDA_SUCCESS;
    capture.invalidated = 1;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult check_opening(void) {
    CUresult result = check_capture();
    num_opened += !result;
    return result;
}

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

static void *work(void *argument) {
    struct CUstream_st *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first || paused) pthread_cond_wait(&changed, &lock);
        struct op *op = stream->first;
        while (op->kind == WAIT && op->event->passed < op->turn) pthread_cond_wait(&changed, &lock);
        if (op->kind == COPY && !stream->context->lost && op->process == process) {
            num_busy++;
            unsigned pause_us = delay_us;
            pthread_mutex_unlock(&lock);
            if (pause_us) usleep(pause_us);
            memcpy(op->to, op->from, op->num_bytes);
            pthread_mutex_lock(&lock);
            num_busy--;
        }
        if (op->kind == RECORD && op->event->passed < op->turn)
            op->event->passed = op->turn, op->event->passed_ms = now_ms();
        stream->first = op->next;
        if (!stream->first) stream->last = &stream->first;
        int stop = op->kind == STOP;
        free(op);
        pthread_cond_broadcast(&changed);
        if (stop) break;
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* What a captured stream is given becomes a part of the graph, and does not happen. */
static void enqueue(struct CUstream_st *stream, struct op op) {
    if (stream->captured) return;
    struct op *copy = malloc(sizeof op);
    *copy = op;
    copy->process = process, copy->next = NULL;
    *stream->last = copy;
    stream->last = &copy->next;
    pthread_cond_broadcast(&changed);
}

static struct CUstream_st *start_stream(struct CUctx_st *context) {
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    stream->context = context, stream->last = &stream->first;
    pthread_create(&stream->thread, NULL, work, stream);
    return stream;
}

/* A program that means the default stream by NULL may get another one than it means. */
static struct CUstream_st *resolve(CUstream stream) {
    return stream == CU_STREAM_LEGACY ? current()->default_stream : stream;
}

static CUresult enqueue_copy(uintptr_t to, uintptr_t from, size_t num_bytes, CUstream stream) {
    struct range *target = range_of(to, num_bytes), *source = range_of(from, num_bytes);
    int device = current()->device;
    struct range *ends[2] = {target, source};
    for (int i = 0; i < 2; i++)
        if (ends[i] && ends[i]->behind && ends[i]->device != device) return CUDA_ERROR_INVALID_VALUE;
    /* "must be entirely registered": no copy crosses the border of two registrations, or of one */
    if (!target && is_known_in_part(to, num_bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (!source && is_known_in_part(from, num_bytes)) return CUDA_ERROR_INVALID_VALUE;
    num_pageable += !target + !source;
    enqueue(resolve(stream), (struct op){
        .kind = COPY,
        .to = target && target->behind ? target->behind + (to - target->address) : (char *)to,
        .from = source && source->behind ? source->behind + (from - source->address) : (char *)from,
        .num_bytes = num_bytes,
    });
    return CUDA_SUCCESS;
}

/* Devices and contexts. */
CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *out) { *out = version; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *out) { *out = NUM_DEVICES; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *out, int index) {
    if (index < 0 || index >= NUM_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *out = index;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *out = numa_node; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: *out = 1; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    pthread_mutex_lock(&lock);
    struct CUctx_st *context = &contexts[device];
    if (!context->default_stream) context->default_stream = start_stream(context);
    context->num_owners++;
    *out = context;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    pthread_mutex_lock(&lock);
    CUresult result = contexts[device].num_owners-- > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) { stack[depth++] = context; return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *out) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *out = stack[--depth];
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *out) { *out = current(); return CUDA_SUCCESS; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = LEAST_PRIORITY, *greatest = -5;
    return check();
}

/* Memory. */
static CUresult add_range(struct range range) {
    if (num_ranges == MAX_RANGES) return CUDA_ERROR_OUT_OF_MEMORY;
    ranges[num_ranges++] = range;
    return CUDA_SUCCESS;
}
static CUresult remove_range(uintptr_t address, struct range *removed) {
    while (num_busy) pthread_cond_wait(&changed, &lock); /* memory is freed when no copy is under way */
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].address == address) {
            *removed = ranges[i];
            ranges[i] = ranges[--num_ranges];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t num_bytes) {
    CUresult result = check_opening();
    if (result) return result;
    int file = memfd_create("simulated device", 0);
    if (file < 0 || ftruncate(file, (off_t)num_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    void *seen = mmap(NULL, num_bytes, PROT_NONE, MAP_SHARED, file, 0);
    void *behind = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    pthread_mutex_lock(&lock);
    result = add_range((struct range){(uintptr_t)seen, num_bytes, behind, current()->device});
    pthread_mutex_unlock(&lock);
    *out = (CUdeviceptr)seen;
    return result;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    struct range range;
    CUresult result = check_capture();
    if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) return result;
    pthread_mutex_lock(&lock);
    result = remove_range(address, &range);
    pthread_mutex_unlock(&lock);
    if (result) return result;
    munmap((void *)range.address, range.num_bytes);
    munmap(range.behind, range.num_bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemHostRegister_v2(void *address, size_t num_bytes, unsigned flags) {
    (void)flags;
    CUresult result = check_opening();
    if (result) return result;
    pthread_mutex_lock(&lock);
    if (range_of((uintptr_t)address, 1)) result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (registered_bytes + num_bytes > bytes_that_may_be_registered) result = CUDA_ERROR_OUT_OF_MEMORY;
    else result = add_range((struct range){(uintptr_t)address, num_bytes, NULL, REGISTERED});
    if (!result) registered_bytes += num_bytes;
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuMemHostUnregister(void *address) {
    struct range range;
    CUresult result = check_capture();
    if (result) return result;
    pthread_mutex_lock(&lock);
    result = remove_range((uintptr_t)address, &range);
    if (result) result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    else registered_bytes -= range.num_bytes;
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuMemHostAlloc(void **out, size_t num_bytes, unsigned flags) {
    CUresult result = check();
    if (result || flags) return result ? result : CUDA_ERROR_INVALID_VALUE;
    *out = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_mutex_lock(&lock);
    result = *out == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : add_range((struct range){(uintptr_t)*out, num_bytes, NULL, HOST});
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuMemFreeHost(void *address) {
    struct range range;
    pthread_mutex_lock(&lock);
    CUresult result = remove_range((uintptr_t)address, &range);
    pthread_mutex_unlock(&lock);
    if (!result) munmap(address, range.num_bytes);
    return result;
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    struct range *range = range_of(address, 1);
    CUresult result = range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (range && attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) *(unsigned long long *)out = range->address;
    else if (range && attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out = range->device;
    else if (range && attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)out = range->behind ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else if (range) result = CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Streams and events. */
CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    CUresult result = check_opening();
    if (result) return result;
    /* docs/gpu.md: streams of copies are of the lowest priority, and nothing else opens any */
    if (flags != CU_STREAM_NON_BLOCKING || priority != LEAST_PRIORITY) return CUDA_ERROR_INVALID_VALUE;
    *out = start_stream(current());
    pthread_mutex_lock(&lock);
    (*out)->process = process;
    num_live_streams++;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
    CUresult result = check_capture();
    if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) return result;
    pthread_mutex_lock(&lock);
    if (stream->process == process) num_live_streams--;
    enqueue(stream, (struct op){.kind = STOP});
    pthread_mutex_unlock(&lock);
    pthread_detach(stream->thread);
    return result;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CUresult result = check();
    if (result || flags || !stream) return result ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (event->captured) resolve(stream)->captured = 1; /* it joins the capture */
    enqueue(resolve(stream), (struct op){.kind = WAIT, .event = event, .turn = event->recorded});
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *out, unsigned flags) {
    CUresult result = check_opening();
    if (result) return result;
    *out = calloc(1, sizeof **out);
    (*out)->has_timing = !(flags & CU_EVENT_DISABLE_TIMING);
    pthread_mutex_lock(&lock);
    (*out)->process = process;
    num_live_events++;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) {
    CUresult result = check_capture();
    if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) return result;
    pthread_mutex_lock(&lock);
    if (event->process == process) num_live_events--;
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    CUresult result = check();
    if (result) return result;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (refuse_records) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    event->captured = resolve(stream)->captured;
    if (!event->captured)
        enqueue(resolve(stream), (struct op){.kind = RECORD, .event = event, .turn = ++event->recorded});
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
    pthread_mutex_lock(&lock); /* first: an event of copies that a lost device dropped must not have passed */
    CUresult result = check_capture();
    if (!result && event->captured) result = CUDA_ERROR_CAPTURED_EVENT;
    if (!result && event->passed < event->recorded) result = CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&lock);
    return result;
}
/* INVALID_HANDLE "if either event has not been recorded" or was created without timing, NOT_READY "if it has been called
 * on both events but the device has not yet completed": cuEventElapsedTime_v2 of group__CUDA__EVENT.html. */
CUresult cuEventElapsedTime_v2(float *out, CUevent start, CUevent end) {
    pthread_mutex_lock(&lock);
    CUresult result = check_capture();
    if (!result && !(start->has_timing && end->has_timing && start->recorded && end->recorded))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (!result && (start->passed < start->recorded || end->passed < end->recorded)) result = CUDA_ERROR_NOT_READY;
    if (!result) *out = (float)(end->passed_ms - start->passed_ms);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Captures of graphs, one at a time. */
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode, *mode = before;
    return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    CUresult result = check();
    if (result) return result;
    if (!stream || stream == CU_STREAM_LEGACY || capture.stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    stream->captured = 1;
    capture.stream = stream, capture.mode = mode, capture.thread = pthread_self(), capture.invalidated = 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *out) {
    if (stream != capture.stream) return CUDA_ERROR_ILLEGAL_STATE;
    *out = NULL;
    pthread_mutex_lock(&lock);
    stream->captured = 0;
    capture.stream = NULL;
    pthread_mutex_unlock(&lock);
    return capture.invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out) {
    CUresult result = check();
    if (result || !stream) return result ? result : CUDA_ERROR_INVALID_HANDLE;
    *out = resolve(stream)->captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

/* Copies. */
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream stream) {
    CUresult result = check();
    if (result) return result;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    num_single++;
    result = strange_result ? (CUresult)strange_result : enqueue_copy(to, from, num_bytes, stream);
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) {
    CUresult result = check();
    if (result) return result;
    int to_host = copy->dstMemoryType == CU_MEMORYTYPE_HOST; /* pageable memory has no unified address */
    if (copy->srcMemoryType != (to_host ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST) ||
        copy->dstMemoryType != (to_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE))
        return CUDA_ERROR_INVALID_VALUE;
    uintptr_t to = to_host ? (uintptr_t)copy->dstHost : copy->dstDevice;
    uintptr_t from = to_host ? copy->srcDevice : (uintptr_t)copy->srcHost;
    if (copy->srcPitch < copy->WidthInBytes || copy->dstPitch < copy->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    num_2d++;
    for (size_t row = copy->Height; row-- && !result;)
        result = enqueue_copy(to + row * copy->dstPitch, from + row * copy->srcPitch, copy->WidthInBytes, stream);
    pthread_mutex_unlock(&lock);
    return result;
}
static CUresult copy_batch(CUdeviceptr *to, CUdeviceptr *from, size_t *num_bytes, size_t count,
                           CUmemcpyAttributes *attributes, size_t *first, size_t num_attributes, CUstream stream) {
    CUresult result = check();
    if (result) return result;
    /* "hStream must not be legacy NULL stream": cuMemcpyBatchAsync of group__CUDA__MEM.html */
    if (!stream || stream == CU_STREAM_LEGACY || !count || num_attributes != 1 || first[0] != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->captured) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!num_bytes[i]) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    num_batches++;
    result = (CUresult)strange_result;
    for (size_t i = count; i-- && !result;)
        result = enqueue_copy(to[i], from[i], num_bytes[i], stream);
    pthread_mutex_unlock(&lock);
    return result;
}
static CUresult copy_batch_12080(CUdeviceptr *to, CUdeviceptr *from, size_t *num_bytes, size_t count,
                                 CUmemcpyAttributes *attributes, size_t *first, size_t num_attributes,
                                 size_t *failed, CUstream stream) {
    *failed = SIZE_MAX;
    return copy_batch(to, from, num_bytes, count, attributes, first, num_attributes, stream);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t num_bytes) {
    struct range *range = range_of(to, num_bytes);
    if (!range || !range->behind) return CUDA_ERROR_INVALID_VALUE;
    memcpy(range->behind + (to - range->address), from, num_bytes);
    return check();
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t num_bytes) {
    struct range *range = range_of(from, num_bytes);
    if (!range || !range->behind) return CUDA_ERROR_INVALID_VALUE;
    memcpy(to, range->behind + (from - range->address), num_bytes);
    return check();
}

CUresult cuGetErrorName(CUresult error, const char **out) {
    switch (error) {
    case CUDA_ERROR_INVALID_VALUE: *out = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *out = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_ECC_UNCORRECTABLE: *out = "CUDA_ERROR_ECC_UNCORRECTABLE"; break;
    default: *out = "CUDA_ERROR_OF_ANOTHER_KIND";
    }
    return CUDA_SUCCESS;
}

#define CALL(name, function) {name, (void *)function}
static const struct { const char *name; void *function; } calls[] = {
    CALL("cuInit", cuInit), CALL("cuDriverGetVersion", cuDriverGetVersion),
    CALL("cuDeviceGetCount", cuDeviceGetCount), CALL("cuDeviceGet", cuDeviceGet),
    CALL("cuDeviceGetAttribute", cuDeviceGetAttribute),
    CALL("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain),
    CALL("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2),
    CALL("cuCtxPushCurrent", cuCtxPushCurrent_v2), CALL("cuCtxPopCurrent", cuCtxPopCurrent_v2),
    CALL("cuCtxGetCurrent", cuCtxGetCurrent),
    CALL("cuCtxGetStreamPriorityRange", cuCtxGetStreamPriorityRange),
    CALL("cuMemAlloc", cuMemAlloc_v2), CALL("cuMemFree", cuMemFree_v2),
    CALL("cuMemHostRegister", cuMemHostRegister_v2), CALL("cuMemHostUnregister", cuMemHostUnregister),
    CALL("cuMemHostAlloc", cuMemHostAlloc), CALL("cuMemFreeHost", cuMemFreeHost),
    CALL("cuPointerGetAttribute", cuPointerGetAttribute),
    CALL("cuStreamCreateWithPriority", cuStreamCreateWithPriority),
    CALL("cuStreamDestroy", cuStreamDestroy_v2),
    CALL("cuStreamWaitEvent", cuStreamWaitEvent), CALL("cuEventCreate", cuEventCreate),
    CALL("cuEventDestroy", cuEventDestroy_v2), CALL("cuEventRecord", cuEventRecord),
    CALL("cuEventQuery", cuEventQuery), CALL("cuEventElapsedTime", cuEventElapsedTime_v2),
    CALL("cuThreadExchangeStreamCaptureMode", cuThreadExchangeStreamCaptureMode),
    CALL("cuStreamBeginCapture", cuStreamBeginCapture_v2), CALL("cuStreamEndCapture", cuStreamEndCapture),
    CALL("cuStreamIsCapturing", cuStreamIsCapturing), CALL("cuMemcpyAsync", cuMemcpyAsync),
    CALL("cuMemcpy2DAsync", cuMemcpy2DAsync_v2), CALL("cuMemcpyHtoD", cuMemcpyHtoD_v2),
    CALL("cuMemcpyDtoH", cuMemcpyDtoH_v2), CALL("cuGetErrorName", cuGetErrorName),
};

CUresult cuGetProcAddress_v2(const char *name, void **out, int wanted, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    (void)flags;
    *out = NULL;
    if (!strcmp(name, "cuGetProcAddress")) *out = (void *)cuGetProcAddress_v2;
    for (size_t i = 0; i < sizeof calls / sizeof *calls && !*out; i++)
        if (!strcmp(name, calls[i].name)) *out = calls[i].function;
    if (!strcmp(name, "cuMemcpyBatchAsync") && version >= 12080 && wanted >= 12080)
        *out = wanted >= 13000 ? (void *)copy_batch : (void *)copy_batch_12080;
    if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

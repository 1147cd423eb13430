/* Counts allocations for Python objects. Declares the interface, since Python.h may be missing. */
#include <stddef.h>

#define PYMEM_DOMAIN_OBJ 2
typedef struct {
    void *context;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
} Allocator; /* PyMemAllocatorEx */

void PyMem_GetAllocator(int domain, Allocator *allocator);
void PyMem_SetAllocator(int domain, Allocator *allocator);

unsigned long num_allocations;
static Allocator original;

static void *count_malloc(void *context, size_t num_bytes) {
    num_allocations++;
    return original.malloc(context, num_bytes);
}
static void *count_calloc(void *context, size_t count, size_t num_bytes) {
    num_allocations++;
    return original.calloc(context, count, num_bytes);
}
static void *count_realloc(void *context, void *memory, size_t num_bytes) {
    num_allocations += !memory;
    return original.realloc(context, memory, num_bytes);
}

void count_allocations(void) {
    PyMem_GetAllocator(PYMEM_DOMAIN_OBJ, &original);
    Allocator counting = {original.context, count_malloc, count_calloc, count_realloc, original.free};
    PyMem_SetAllocator(PYMEM_DOMAIN_OBJ, &counting);
}

/* What this library was built from and for, and how fast memory can be read. */
#include "vectors.h"

#ifndef OCTAVO_SOURCES
#error "define OCTAVO_SOURCES as the digest of the sources, as a string"
#endif

EXPORT const char *octavo_sources(void) { return OCTAVO_SOURCES; }

/* Does this CPU have the instructions that the compiler was allowed to use? */
EXPORT int octavo_supported(void) {
#ifdef __AVX512BF16__
    if (!__builtin_cpu_supports("avx512bf16"))
        return 0;
#endif
#ifdef __AVX512F__
    if (!__builtin_cpu_supports("avx512f"))
        return 0;
#endif
#ifdef __AVX2__
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
#endif
    return 1;
}

typedef struct {
    const char *from;
    int64_t num_bytes, next;
    uint32_t sum;
} read_job;

enum { BYTES_AT_ONCE = 1 << 20 };

static void read_body(void *argument) {
    read_job *job = argument;
    vu sums[8] = {{0}};
    int64_t begin;
    while ((begin = __atomic_fetch_add(&job->next, BYTES_AT_ONCE, __ATOMIC_RELAXED))
           < job->num_bytes) {
        const int64_t left = job->num_bytes - begin;
        const int64_t end = begin + (left < BYTES_AT_ONCE ? left : BYTES_AT_ONCE);
        for (int64_t at = begin; at + (int64_t)sizeof sums <= end; at += sizeof sums) {
            vu words[8];
            memcpy(words, job->from + at, sizeof words);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                sums[i] += words[i];
        }
    }
    vu total = {0};
    for (int i = 0; i < 8; i++)
        total += sums[i];
    for (int i = 0; i < LANES; i++)
        __atomic_fetch_add(&job->sum, total[i], __ATOMIC_RELAXED);
}

/* Sum of all 32-bit words: what a decode kernel would cost that only read. The
 * yardstick of `octavo bench attention`. */
EXPORT uint32_t octavo_read(const void *from, int64_t num_bytes, int num_threads) {
    read_job job = {from, num_bytes, 0, 0};
    run_parallel(read_body, &job, num_threads);
    return job.sum;
}

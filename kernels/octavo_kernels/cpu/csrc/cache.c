/* Writing new K/V to their slots. */
#include "octavo.h"

typedef struct {
    const octavo_write *keys, *values;
    const int64_t *slots;
    int64_t num_tokens, block_size, num_kv_heads, row_bytes, element_bytes;
    int64_t next;
} write_job;

enum { TOKENS_AT_ONCE = 16, LEAST_PARALLEL_BYTES = 1 << 18 };

static void write_token(const write_job *job, const octavo_write *to, int64_t token) {
    const int64_t slot = job->slots[token];
    const char *from = (const char *)to->source + token * to->token_stride * job->element_bytes;
    char *row = (char *)to->cache
        + slot / job->block_size * to->block_stride * job->element_bytes
        + slot % job->block_size * job->num_kv_heads * job->row_bytes;
    for (int64_t head = 0; head < job->num_kv_heads; head++)
        memcpy(
            row + head * job->row_bytes, from + head * to->head_stride * job->element_bytes,
            (size_t)job->row_bytes
        );
}

static void write_body(void *argument) {
    write_job *job = argument;
    int64_t begin;
    while ((begin = __atomic_fetch_add(&job->next, TOKENS_AT_ONCE, __ATOMIC_RELAXED))
           < job->num_tokens)
        for (int64_t token = begin;
             token < begin + TOKENS_AT_ONCE && token < job->num_tokens; token++)
            if (job->slots[token] >= 0) {
                write_token(job, job->keys, token);
                write_token(job, job->values, token);
            }
}

/* slots: [num_tokens]; a negative one is skipped. */
EXPORT int octavo_reshape_and_cache(
    const octavo_write *keys, const octavo_write *values, const int64_t *slots,
    int64_t num_tokens, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
    int64_t element_bytes, int num_threads
) {
    write_job job = {keys, values, slots, num_tokens, block_size, num_kv_heads,
                     head_dim * element_bytes, element_bytes, 0};
    const int64_t bytes = 2 * num_tokens * num_kv_heads * job.row_bytes;
    run_parallel(write_body, &job, threads_for(bytes, LEAST_PARALLEL_BYTES, num_threads));
    return OK;
}

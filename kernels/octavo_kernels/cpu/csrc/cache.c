/* Writing new K/V to their slots. */
#include "octavo.h"

typedef struct {
    const octavo_writes *writes;
    int64_t next;
} write_queue;

enum { TOKENS_AT_ONCE = 16, LEAST_PARALLEL_BYTES = 1 << 18 };

static void write_row(const octavo_writes *of, const octavo_write *to, int64_t token) {
    const int64_t slot = of->slots[token], head_bytes = of->head_dim * of->element_bytes;
    const char *from = (const char *)to->source + token * to->token_stride * of->element_bytes;
    char *row = (char *)to->cache + slot / of->block_size * to->block_stride * of->element_bytes
        + slot % of->block_size * of->num_kv_heads * head_bytes;
    for (int64_t head = 0; head < of->num_kv_heads; head++)
        memcpy(
            row + head * head_bytes, from + head * to->head_stride * of->element_bytes,
            (size_t)head_bytes
        );
}

void octavo_write_token(const octavo_writes *writes, int64_t token) {
    if (writes->slots[token] < 0)
        return;
    write_row(writes, &writes->keys, token);
    write_row(writes, &writes->values, token);
}

static void write_body(void *argument) {
    write_queue *queue = argument;
    const int64_t count = queue->writes->num_tokens;
    int64_t begin;
    while ((begin = __atomic_fetch_add(&queue->next, TOKENS_AT_ONCE, __ATOMIC_RELAXED)) < count)
        for (int64_t token = begin; token < begin + TOKENS_AT_ONCE && token < count; token++)
            octavo_write_token(queue->writes, token);
}

EXPORT void octavo_reshape_and_cache(const octavo_writes *writes) {
    write_queue queue = {writes, 0};
    const int64_t bytes = 2 * writes->num_tokens * writes->num_kv_heads * writes->head_dim
        * writes->element_bytes;
    run_parallel(
        write_body, &queue, threads_for(bytes, LEAST_PARALLEL_BYTES, writes->num_threads)
    );
}

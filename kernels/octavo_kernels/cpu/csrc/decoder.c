/* All decoder layers of a step in one call, for models of Llama's family:
 *
 *     qkv  = norm(x += delta) @ [q | k | v]        rotate q and k, write k and v to the pool
 *     delta = attention(q) @ o
 *     delta = (silu(gate) * up) @ down, where [gate | up] = norm(x += delta) @ one weight
 *
 * What a layer adds to x is added on the way through the next norm. The last layer ends, after
 * its attention, for the tokens alone whose logits are wanted.
 *
 * The kernels are those of the other files. What needs no result of another thread follows in
 * the same parallel section: at the end of one, each thread waits for the other, which may have
 * lost its core to a process beside this one. A layer has eight: two norms, four products (the
 * gate is part of its own), rotate and write, attention of chunks and decodes. */
#include "octavo.h"

typedef struct {
    octavo_linear qkv, output, gate_up, down; /* their weights; the rest is set here */
    const void *attention_norm, *mlp_norm;    /* [width] */
    void *keys, *values;                      /* the layer's part of the pool */
    float attention_epsilon, mlp_epsilon, scale;
    int32_t window; /* which of the step's attentions is this layer's */
} octavo_layer;

/* A step's attention: what depends on tables and lengths, for layers of one window. */
typedef struct {
    const octavo_attention *decode, *prefill;
} octavo_window;

/* Tensors are contiguous, in the dtype of x. Tokens of decodes come first. */
typedef struct {
    const octavo_layer *layers;
    const octavo_window *windows;
    const int64_t *slots; /* [num_tokens] */
    const int64_t *kept;  /* [num_kept], places of tokens; x of the others is left unfinished */
    void *x;              /* [num_tokens, width], changed in place */
    const void *table;    /* [num_tokens, head_dim] cosines, sines */
    void *scratch;        /* octavo_layer_scratch elements a token */
    int64_t num_layers, num_tokens, num_decodes, num_kept;
    int64_t width, num_heads, num_kv_heads, head_dim, mlp_width;
    int64_t block_size, key_block_stride, value_block_stride;
    int32_t is_bf16, num_threads;
} octavo_layers;

/* Where what is of some tokens, all or those that are kept. */
typedef struct {
    int64_t num_rows;
    char *x, *normed, *delta, *qkv, *attended, *activated;
} rows_of;

INLINE int64_t qkv_width(const octavo_layers *step) {
    return (step->num_heads + 2 * step->num_kv_heads) * step->head_dim;
}

INLINE int64_t heads_width(const octavo_layers *step) { return step->num_heads * step->head_dim; }

INLINE int64_t element_bytes(const octavo_layers *step) { return step->is_bf16 ? 2 : 4; }

EXPORT int64_t octavo_layer_scratch(const octavo_layers *step) {
    return 3 * step->width + qkv_width(step) + 2 * heads_width(step) + step->mlp_width;
}

/* `kept` has places of its own for x and attention, and shares the others. */
static rows_of divide(const octavo_layers *step, rows_of *kept) {
    const int64_t column = step->num_tokens * element_bytes(step);
    rows_of all = {.num_rows = step->num_tokens, .x = step->x};
    all.normed = step->scratch;
    all.delta = all.normed + step->width * column;
    all.qkv = all.delta + step->width * column;
    all.attended = all.qkv + qkv_width(step) * column;
    all.activated = all.attended + heads_width(step) * column;
    *kept = all;
    kept->num_rows = step->num_kept;
    kept->x = all.activated + step->mlp_width * column;
    kept->attended = kept->x + step->width * column;
    return all;
}

static void norm(
    const octavo_layers *step, const rows_of *of, const void *weight, float epsilon, int adds
) {
    const octavo_rows rows = {
        .x = of->x, .y = adds ? of->delta : NULL, .weight = weight, .out = of->normed,
        .x_stride = step->width, .y_stride = step->width, .out_stride = step->width,
        .num_rows = of->num_rows, .width = step->width, .epsilon = epsilon,
        .is_bf16 = step->is_bf16, .num_threads = step->num_threads,
    };
    octavo_rms_norm(&rows);
}

static void multiply(
    const octavo_layers *step, octavo_linear call, int64_t num_rows, const void *x, void *out
) {
    call.x = x, call.out = out, call.x_stride = call.num_in;
    call.num_rows = num_rows, call.num_threads = step->num_threads;
    octavo_multiply(&call);
}

/* What is done to each token between its projections and its attention. */
typedef struct {
    octavo_rows rotation;
    octavo_writes writes;
    int64_t next;
} placing;

enum { TOKENS_AT_ONCE = 4, LEAST_PARALLEL_ELEMENTS = 1 << 14 };

static void place_some(void *argument) {
    placing *queue = argument;
    const int64_t count = queue->writes.num_tokens;
    int64_t begin;
    while ((begin = __atomic_fetch_add(&queue->next, TOKENS_AT_ONCE, __ATOMIC_RELAXED)) < count)
        for (int64_t token = begin; token < begin + TOKENS_AT_ONCE && token < count; token++) {
            octavo_rotate_row(&queue->rotation, token);
            octavo_write_token(&queue->writes, token);
        }
}

/* Rotate queries and keys, write keys and values to their slots. */
static void place(const octavo_layers *step, const octavo_layer *layer, const rows_of *of) {
    const int64_t head = step->head_dim * element_bytes(step), width = qkv_width(step);
    char *keys = of->qkv + step->num_heads * head, *values = keys + step->num_kv_heads * head;
    placing queue = {
        .rotation = {
            .x = of->qkv, .y = step->table, .x_stride = width, .y_stride = step->head_dim,
            .width = step->head_dim, .num_heads = step->num_heads + step->num_kv_heads,
            .is_bf16 = step->is_bf16,
        },
        .writes = {
            .keys = {keys, layer->keys, width, step->head_dim, step->key_block_stride},
            .values = {values, layer->values, width, step->head_dim, step->value_block_stride},
            .slots = step->slots, .num_tokens = step->num_tokens, .block_size = step->block_size,
            .num_kv_heads = step->num_kv_heads, .head_dim = step->head_dim,
            .element_bytes = element_bytes(step),
        },
    };
    const int64_t elements = step->num_tokens * width;
    run_parallel(
        place_some, &queue, threads_for(elements, LEAST_PARALLEL_ELEMENTS, step->num_threads)
    );
}

/* The tokens from `first` on that `laid_out` is about. */
static octavo_attention attention(
    const octavo_layers *step, const octavo_layer *layer, const rows_of *of,
    const octavo_attention *laid_out, int64_t first
) {
    const int64_t width = heads_width(step), size = element_bytes(step);
    octavo_attention call = *laid_out;
    call.query = of->qkv + first * qkv_width(step) * size;
    call.out = of->attended + first * width * size;
    call.keys = layer->keys, call.values = layer->values;
    call.query_token_stride = qkv_width(step), call.out_token_stride = width;
    call.query_head_stride = call.out_head_stride = step->head_dim;
    call.key_block_stride = step->key_block_stride;
    call.value_block_stride = step->value_block_stride;
    call.scale = layer->scale, call.softcap = 0;
    return call;
}

/* Chunks and decodes, handed out one after the other: who finds no chunk left goes on with
 * decodes. */
typedef struct {
    work_queue chunks, decodes;
} attending;

static void attend_some(void *argument) {
    attending *both = argument;
    if (both->chunks.attention)
        octavo_prefill_items(&both->chunks);
    if (both->decodes.attention)
        octavo_decode_items(&both->decodes);
}

static int attend(const octavo_layers *step, const octavo_layer *layer, const rows_of *of) {
    const octavo_window *window = step->windows + layer->window;
    const octavo_attention decode = attention(step, layer, of, window->decode, 0);
    const octavo_attention prefill =
        attention(step, layer, of, window->prefill, step->num_decodes);
    attending both = {{NULL, 0, OK}, {NULL, 0, OK}};
    int num_threads = 1;
    if (step->num_decodes < step->num_tokens)
        both.chunks.attention = &prefill, num_threads = prefill.num_threads;
    if (step->num_decodes) {
        both.decodes.attention = &decode;
        if (decode.num_threads > num_threads)
            num_threads = decode.num_threads;
    }
    run_parallel(attend_some, &both, num_threads);
    return both.chunks.status != OK ? both.chunks.status : both.decodes.status;
}

/* What follows attention. */
static void finish(const octavo_layers *step, const octavo_layer *layer, const rows_of *of) {
    multiply(step, layer->output, of->num_rows, of->attended, of->delta);
    norm(step, of, layer->mlp_norm, layer->mlp_epsilon, 1);
    octavo_linear gate_up = layer->gate_up;
    gate_up.is_gated = 1;
    multiply(step, gate_up, of->num_rows, of->normed, of->activated);
    multiply(step, layer->down, of->num_rows, of->activated, of->delta);
}

static void finish_kept(
    const octavo_layers *step, const octavo_layer *layer, const rows_of *all, const rows_of *kept
) {
    const size_t width = (size_t)(step->width * element_bytes(step));
    const size_t heads = (size_t)(heads_width(step) * element_bytes(step));
    for (int64_t i = 0; i < step->num_kept; i++) {
        memcpy(kept->x + i * width, all->x + step->kept[i] * width, width);
        memcpy(kept->attended + i * heads, all->attended + step->kept[i] * heads, heads);
    }
    finish(step, layer, kept);
    const octavo_rows sum = {
        .x = kept->x, .y = kept->delta, .x_stride = step->width, .y_stride = step->width,
        .num_rows = step->num_kept, .width = step->width, .is_bf16 = step->is_bf16,
        .num_threads = step->num_threads,
    };
    octavo_add(&sum);
    for (int64_t i = 0; i < step->num_kept; i++)
        memcpy(all->x + step->kept[i] * width, kept->x + i * width, width);
}

/* Returns OK or NO_MEMORY. */
EXPORT int octavo_run_layers(const octavo_layers *step) {
    rows_of kept;
    const rows_of all = divide(step, &kept);
    for (int64_t i = 0; i < step->num_layers; i++) {
        const octavo_layer *layer = step->layers + i;
        norm(step, &all, layer->attention_norm, layer->attention_epsilon, i > 0);
        multiply(step, layer->qkv, all.num_rows, all.normed, all.qkv);
        place(step, layer, &all);
        const int status = attend(step, layer, &all);
        if (status != OK)
            return status;
        if (i + 1 < step->num_layers)
            finish(step, layer, &all);
        else
            finish_kept(step, layer, &all, &kept);
    }
    return OK;
}

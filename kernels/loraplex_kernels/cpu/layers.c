/* All layers of a decoder in one call: the other kernels of this folder, one after the other, for a whole step.
 *
 * What is computed is what the calls one by one compute, by the very same machine code, so all bits are the same.
 * What is saved is the way from Python to C and back, ten times a layer, and the allocation of every result.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "calls.h"

enum { LAYERS_QKV, LAYERS_O, LAYERS_GATE_UP, LAYERS_DOWN, LAYERS_SITES };

typedef struct {
    const char *panels;
    const float *bias; /* or NULL */
    int64_t num_inputs;
    int64_t num_outputs;
    int64_t format;
} layers_linear;

typedef struct {
    const void *input_norm;
    const void *mlp_norm;
    void *kv; /* the layer's cache */
    layers_linear linear[LAYERS_SITES];
} layers_layer;

/* What a step's time is told apart by. */
enum { LAYERS_LINEAR, LAYERS_ATTENTION, LAYERS_LORA, LAYERS_SMALL, LAYERS_PARTS };

/* What stays as it is for all steps. */
typedef struct {
    ops_rms_norm_call *rms_norm;
    ops_gated_call *gated;
    ops_rotate_and_write_call *rotate_and_write;
    linear_forward_call *linear;
    attention_forward_call *attention;
    lora_add_call *lora; /* NULL: there are no adapters */
    const layers_layer *layers;
    const int32_t *slice_begins[LAYERS_SITES]; /* see lora_add */
    int64_t num_layers;
    int64_t hidden_size;
    int64_t inner_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t is_bf16;
    int32_t num_threads;
    float eps;
} layers_model;

/* One step. */
typedef struct {
    void *hidden;      /* (num_rows, hidden): in: embedded tokens */
    const void *cos;   /* (num_rows, head_dim) */
    const void *sin;
    const int64_t *slot; /* of the first num_tokens rows; the others are padding */
    int64_t num_rows;
    int64_t num_tokens;
    const struct attention_call *attention; /* all but `kv` */
    const void **attention_kv;              /* that field */
    const struct attention_item *items;
    const struct attention_item *merges;
    float *attention_scratch;
    int32_t num_items;
    int32_t num_merges;
    const struct lora_step *lora; /* NULL: no row has an adapter */
    const uint8_t *is_active;     /* by layer * LAYERS_SITES + site: whether some adapter adds there */
    /* Results: (num_rows, width of each). */
    void *normed;
    void *qkv;
    void *attended;
    void *added; /* out: what is still to be added to `hidden` */
    void *gate_up;
    void *gated;
    float *wide; /* what linear_forward works in, for those of the layers' formats that need the most */
    double *part_seconds; /* (LAYERS_PARTS): each is increased by what it took. NULL: no clock is read */
} layers_step;

static double layers_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Books the time since *since, as `part`, and begins anew. */
static void layers_book(const layers_step *step, int part, double *since) {
    if (!step->part_seconds) return;
    const double now = layers_now();
    step->part_seconds[part] += now - *since;
    *since = now;
}

static void layers_apply(const layers_model *model, const layers_step *step, int64_t layer, int site,
                         const void *x, void *y, double *since) {
    const layers_linear *linear = &model->layers[layer].linear[site];
    model->linear(linear->panels, linear->bias, x, y, step->wide, step->num_rows,
                  linear->num_inputs, linear->num_outputs, linear->num_inputs,
                  linear->num_outputs, (int32_t)linear->format, model->is_bf16,
                  model->num_threads);
    layers_book(step, LAYERS_LINEAR, since);
    const int64_t index = layer * LAYERS_SITES + site;
    if (step->lora && step->is_active[index]) {
        model->lora(y, x, model->is_bf16, (int32_t)linear->num_inputs,
                    (int32_t)linear->num_outputs, model->slice_begins[site], (int32_t)index,
                    step->lora);
        layers_book(step, LAYERS_LORA, since);
    }
}

static void layers_norm(const layers_model *model, const layers_step *step, const void *added,
                        const void *weight) {
    model->rms_norm(step->hidden, NULL, added, weight, step->normed, step->num_rows,
                    model->hidden_size, model->eps, model->is_bf16, model->num_threads);
}

/* Computes every layer; `hidden` then lacks what is in `added`. */
void layers_forward(const layers_model *model, const layers_step *step) {
    const size_t q_bytes = (size_t)model->num_heads * (size_t)model->head_dim *
                           (model->is_bf16 ? 2 : sizeof(float));
    double since = step->part_seconds ? layers_now() : 0.0;
    /* Attention does not write padding rows. */
    if (step->num_tokens < step->num_rows)
        memset((char *)step->attended + (size_t)step->num_tokens * q_bytes, 0,
               (size_t)(step->num_rows - step->num_tokens) * q_bytes);
    for (int64_t i = 0; i < model->num_layers; i++) {
        const layers_layer *layer = model->layers + i;
        layers_norm(model, step, i == 0 ? NULL : step->added, layer->input_norm);
        layers_book(step, LAYERS_SMALL, &since);
        layers_apply(model, step, i, LAYERS_QKV, step->normed, step->qkv, &since);
        model->rotate_and_write(step->qkv, step->cos, step->sin, layer->kv, step->slot,
                                step->num_tokens, model->num_heads, model->num_kv_heads,
                                model->head_dim, model->is_bf16, model->num_threads);
        layers_book(step, LAYERS_SMALL, &since);
        *step->attention_kv = layer->kv;
        model->attention(step->attention, step->items, step->num_items, step->merges,
                         step->num_merges, step->attention_scratch, model->num_threads);
        layers_book(step, LAYERS_ATTENTION, &since);
        layers_apply(model, step, i, LAYERS_O, step->attended, step->added, &since);
        layers_norm(model, step, step->added, layer->mlp_norm);
        layers_book(step, LAYERS_SMALL, &since);
        layers_apply(model, step, i, LAYERS_GATE_UP, step->normed, step->gate_up, &since);
        model->gated(step->gate_up, step->gated, step->num_rows, model->inner_size,
                     model->is_bf16, model->num_threads);
        layers_book(step, LAYERS_SMALL, &since);
        layers_apply(model, step, i, LAYERS_DOWN, step->gated, step->added, &since);
    }
}

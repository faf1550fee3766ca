/* The kernels that a decoder layer is made of, as function types: each kernel's file declares its own as one of
 * these, and layers.c calls them through pointers, so that neither can change alone.
 */
#ifndef LORAPLEX_CALLS_H
#define LORAPLEX_CALLS_H

#include <stdint.h>

/* See ops.c. */
typedef void ops_rms_norm_call(void *x, const int64_t *row, const void *y, const void *weight,
                               void *out, int64_t num_rows, int64_t width, float eps,
                               int32_t is_bf16, int32_t num_threads);
typedef void ops_gated_call(const void *gate_up, void *out, int64_t num_rows, int64_t width,
                            int32_t is_bf16, int32_t num_threads);
typedef void ops_rotate_and_write_call(void *qkv, const void *cos, const void *sin, void *kv,
                                       const int64_t *slot, int64_t num_tokens, int32_t num_heads,
                                       int32_t num_kv_heads, int32_t head_dim, int32_t is_bf16,
                                       int32_t num_threads);

/* See linear.c. */
typedef void linear_forward_call(const char *panels, const float *bias, const void *x, void *y,
                                 float *wide, int64_t num_rows, int64_t num_inputs,
                                 int64_t num_outputs, int64_t x_stride, int64_t y_stride,
                                 int32_t format, int32_t is_bf16, int32_t num_threads);

/* See attention.c. */
struct attention_call;
struct attention_item;
typedef void attention_forward_call(const struct attention_call *call,
                                    const struct attention_item *items, int32_t num_items,
                                    const struct attention_item *merges, int32_t num_merges,
                                    float *scratch, int32_t num_threads);

/* See lora.c. */
struct lora_step;
typedef void lora_add_call(void *y, const void *x, int32_t x_is_bf16, int32_t num_inputs,
                           int32_t num_outputs, const int32_t *slice_begin, int32_t site_index,
                           const struct lora_step *step);

#endif
